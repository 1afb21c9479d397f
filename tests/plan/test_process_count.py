"""How many processes measure a run: until its times are precise enough, or its budget is spent."""

import pytest

from perfexp.main import main
from perfexp.plan.process_count import wanted
from perfexp.records.record import Key, Point, Series, Status, read_points, without_replicate
from perfexp.stopping import Fixed, Precision

pytestmark = pytest.mark.usefixtures("quick_commands")


def rule(**settings):
    return Precision(
        **{"target": 0.02, "processes": 3, "most_processes": 5, "budget_seconds": 100.0, **settings}
    )


def process(number, seconds=0.01, *, sizes=(64,), status=Status.OK, wall=1.0, start=1.0):
    made = []
    for size in sizes:
        key = Key(
            phase="inference",
            input_size=(size, size),
            batch_size=1,
            precision="fp32",
            replicate=number,
        )
        samples = [seconds * (1 + 1e-4 * (index % 7)) for index in range(80)]
        point = Point(
            key=key,
            status=status,
            series=[Series(name="device", samples=samples)],
            wall_seconds=wall,
        )
        point.facts |= {"device_method": "queue"} | (
            {"start_seconds": start} if size == sizes[0] else {}
        )
        made.append(point)
    return made


def count(processes, of=None):
    points = [point for one in processes for point in one]
    return wanted(points, of or rule(), {without_replicate(point.key) for point in processes[0]})


NOISY = (0.01, 0.012, 0.0105, 0.0115, 0.01)


def test_minimum_process_count_is_measured_in_any_case():
    for done in range(1, 3):
        assert count([process(number) for number in range(done)]) == 3


def test_imprecise_processes_add_others_up_to_the_maximum():
    assert count([process(number) for number in range(3)]) == 3
    for done in (3, 4):
        assert count([process(number, NOISY[number]) for number in range(done)]) == done + 1
    assert count([process(number, NOISY[number]) for number in range(5)]) == 5


@pytest.mark.parametrize(("budget", "expected"), [(7.9, 3), (8.1, 4)])
def test_further_process_must_fit_into_the_time_budget(budget, expected):
    """Three processes of 2 s each, starts included, and one more."""
    noisy = [process(number, NOISY[number]) for number in range(3)]
    assert count(noisy, rule(budget_seconds=budget)) == expected


def test_a_hundred_points_share_ten_budgets():
    sizes = tuple(range(64, 164))
    noisy = [
        process(number, NOISY[number], sizes=sizes, wall=0.1, start=0.0) for number in range(3)
    ]
    assert count(noisy, rule(budget_seconds=3.9)) == 3
    assert count(noisy, rule(budget_seconds=4.1)) == 4
    shared = rule(max_seconds=0.5, warmup_seconds=0.2).shared_by(100)
    assert (shared.max_seconds, shared.warmup_seconds) == (pytest.approx(0.05), pytest.approx(0.02))
    assert rule(max_seconds=0.5).shared_by(8).max_seconds == 0.5


def test_unfinished_process_does_not_change_the_process_count():
    planned = {without_replicate(point.key) for point in process(0, sizes=(64, 65))}
    whole = [
        point for number in range(3) for point in process(number, NOISY[number], sizes=(64, 65))
    ]
    begun, further = process(3, 0.02)[:1], process(0, sizes=(500,))
    interrupted = process(3, sizes=(64, 65), status=Status.INTERRUPTED)
    for more in ([], begun, further, interrupted):
        assert wanted([*whole, *more], rule(), planned) == 4


def test_points_without_a_time_need_no_further_process():
    failed = [process(number, status=Status.OOM) for number in range(3)]
    assert count(failed) == 3
    assert count([process(0)], Fixed(processes=2)) == 2


@pytest.mark.slow
@pytest.mark.always("README: processes are added until ± is narrow")
def test_a_run_goes_on_until_it_is_precise_and_is_complete_then(
    slower_device, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    slower_device(1.0, 1.1, 1.05, 1.0, 1.0)
    command = [
        "model=fake",
        "gpu=fake",
        "input_size=64",
        "stopping=brisk",
        "stopping.budget_seconds=60",
    ]
    command += ["tracking=none", "output_dir=x", "device_lock=wait"]
    assert main(command) == 0
    assert {
        point.key.replicate for point in read_points(tmp_path / "x" / "details" / "points.jsonl")
    } == set(range(5))
    assert "over 5 processes" in capsys.readouterr().out
    assert main(command) == 0
    assert "Nothing is left to measure" in capsys.readouterr().out
