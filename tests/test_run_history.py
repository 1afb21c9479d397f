"""Earlier runs of the same command on the same device widen the intervals of the next one, and of no other."""

import itertools
import math
import re
import shutil

import numpy as np
import pytest
from scipy import stats

from perfexp import commands
from perfexp.orchestration import run_history
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Record, Series
from perfexp.records.summary import rows

COMMAND = ("model=fake", "gpu=fake", "input_size=64", "stopping=brisk", "tracking=none", "ttfp=false")
#: Factors on the device's times of the runs 0, 1, ….
FACTORS = np.exp(np.random.default_rng(2).normal(0, 0.05, 6)).tolist()


#: Codes of other work, which the tests empty.
DISTURBED = run_history._DISTURBED


@pytest.fixture(autouse=True)
def _no_other_work(monkeypatch):
    monkeypatch.setattr(run_history, "_DISTURBED", frozenset())


@pytest.fixture
def measure(run, slower_device, tmp_path):
    """A function that measures on a device with a UUID, in each run slower by another factor; gives the record."""
    factors, numbers = itertools.cycle(FACTORS), itertools.count()

    def measure(*overrides, uuid="GPU-1", code=0, factor=None):
        factor = factor or next(factors)

        slower_device(factor, uuid=uuid)
        folder = f"run{next(numbers)}"
        assert run(*COMMAND, *overrides, f"output_dir={folder}")[0] == code
        return Record.load(tmp_path / folder)

    return measure


def row_of(record):
    [row] = rows(record)
    return row


def half_width(record):
    return row_of(record).times["device"].median.relative_half_width


@pytest.mark.slow
def test_from_the_third_run_on_the_interval_is_that_of_runs(measure):
    records = [measure() for _ in range(6)]
    assert [row_of(record).runs for record in records] == [0, 0, 2, 3, 4, 5]
    assert max(half_width(record) for record in records[:2]) < 0.01
    for number, record in enumerate(records[2:], start=3):
        medians = np.log([row_of(each).times["device"].median.value for each in records[:number]])
        expected = math.sinh(stats.t.ppf(0.975, number - 1) * medians.std(ddof=1))
        assert half_width(record) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_a_record_holds_the_earlier_times_by_which_it_was_widened(measure, capsys, tmp_path):
    for _ in range(3):
        record = measure()
    time = next(time for time in record.earlier if time.time == "device")
    assert [len(run) for run in time.runs] == [1, 1]
    assert time.uids == [Record.load(tmp_path / f"run{number}").uid for number in range(2)]
    assert commands.run(["show", "run2"]) == 0
    assert "± this machine: mean over runs of this command, by 2 earlier runs of its plan" in capsys.readouterr().out


@pytest.mark.slow
def test_the_spread_of_processes_is_named_beside_earlier_runs(measure, capsys):
    for _ in range(3):
        measure("replicate=3")
    assert commands.run(["show", "run2"]) == 0
    earlier = "mean over runs of this command, by 2 earlier runs of its plan and its processes, "
    assert re.search(earlier + r"standard deviation [\d.< ]+ % in \w+", capsys.readouterr().out)


@pytest.mark.slow
def test_processes_of_one_run_widen_a_later_run_of_one_process(measure):
    measure("replicate=5", factor=1.0)
    near, far = row_of(measure(factor=1.0001)), row_of(measure(factor=1.2))
    assert (near.processes, near.runs) == (1, 1)
    assert (far.processes, far.runs) == (1, 2)  # the third run shows how runs differ


@pytest.mark.slow
def test_the_processes_are_named_until_runs_count(measure, capsys):
    measure("replicate=3")
    measure("replicate=3")
    assert commands.run(["show", "run1"]) == 0
    words = r"mean over processes \(3 processes, standard deviation [\d.< ]+ % in \w+(, and 1 earlier run)?\)"
    assert re.search(words, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"overrides": ("batch_size=2",)}, {"uuid": "GPU-2"}])
def test_another_plan_and_another_device_have_a_history_of_their_own(measure, other):
    for _ in range(3):
        measure()
    record = measure(*other.get("overrides", ()), uuid=other.get("uuid", "GPU-1"))
    assert record.earlier == []


@pytest.mark.slow
def test_other_extent_of_the_measurement_is_the_same_command(measure):
    for _ in range(2):
        measure()
    assert row_of(measure("stopping=coarse", "percentiles=[50]")).runs == 2


@pytest.mark.slow
def test_no_more_runs_are_remembered_than_the_limit(measure, monkeypatch):
    monkeypatch.setattr(run_history, "_MOST_RUNS", 3)
    runs = [row_of(measure()).runs for _ in range(6)]
    assert runs == [0, 0, 2, 3, 3, 3]


@pytest.mark.parametrize("code", sorted(DISTURBED))
def test_each_code_of_other_work_disturbs_the_times_of_its_point(code, make_record, monkeypatch):
    monkeypatch.setattr(run_history, "_DISTURBED", DISTURBED)
    record = make_record(sizes=(64, 128), doubts=[])
    if code == "pace_changed":  # is seen from the times
        waiting = record.points[1].find_series("latency") or record.points[1].series[0]
        pipelined = [2 * value for value in waiting.samples]
        record.points[1].series = [
            Series(name=name, samples=samples)
            for name, samples in (("throughput", pipelined), ("latency", waiting.samples))
        ]
    else:
        record.points[1].doubts = [Diagnostic(code=code, message="", help="")]
    times = run_history._times(record)
    assert {(time.key.input_size[0], time.disturbed) for time in times} == {(64, False), (128, True)}


@pytest.mark.slow
def test_runs_beside_other_work_are_a_history_of_such_runs_alone(measure, monkeypatch):
    quiet = [measure(), measure()]
    with monkeypatch.context() as busy:
        busy.setattr(run_history, "_DISTURBED", {"simulated"})  # which each run on the scripted device has
        disturbed = measure()
    assert [len(record.earlier[0].runs) for record in (disturbed, quiet[1])] == [2, 1]
    assert measure().earlier[0].uids == [record.uid for record in quiet]
    assert disturbed.earlier[0].uids == [record.uid for record in quiet]


def test_a_device_that_cannot_be_told_from_others_has_no_history(measure):
    for _ in range(3):
        record = measure(uuid=None)
    assert record.earlier == []


def test_a_resumed_run_is_no_earlier_run_of_itself(measure, run):
    measure()
    for _ in range(3):
        assert run(*COMMAND, "output_dir=run0")[0] == 0
    assert Record.load(run.folder / "run0").earlier == []


@pytest.mark.slow
def test_a_finished_run_of_somebody_else_is_no_earlier_run(measure, run, tmp_path):
    own = measure()
    shutil.copytree(tmp_path / "run0", tmp_path / "foreign")
    for file in (tmp_path / "foreign").glob("*.*"):
        file.write_bytes(file.read_bytes().replace(own.uid.encode(), b"f" * 32))
    code, printed, _ = run("resume=foreign", "tracking=none")
    assert code == 0
    assert "Nothing is left to measure" in printed
    assert {uid for earlier in Record.load(tmp_path / "foreign").earlier for uid in earlier.uids} == {own.uid}
    assert {uid for earlier in measure().earlier for uid in earlier.uids} == {own.uid}


@pytest.mark.slow
def test_points_that_failed_widen_nothing(measure):
    for _ in range(3):
        measure("model.faults.oom=1000", code=1)
    assert measure("model.faults.oom=1000", code=1).earlier == []


@pytest.mark.parametrize("content", ["", '{"findings": {"a": [{"time": 5}]}}', '{"findings": []}'])
def test_a_history_that_cannot_be_read_counts_as_none(measure, monkeypatch, tmp_path, content):
    monkeypatch.setattr(run_history, "cache_folder", lambda name: tmp_path / name)
    measure()
    [file] = (tmp_path / "runs").glob("*.json")
    file.write_text(content)
    assert measure().earlier == []
