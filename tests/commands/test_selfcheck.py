"""`perfexp selfcheck`: processes that differ by a planted spread, what is printed and cached, and what is refused."""

import json

import numpy as np
import pytest

from perfexp import commands, main
from perfexp.commands import doctor, selfcheck
from perfexp.doctor import Choice
from perfexp.errors import UserError
from perfexp.records import diagnostics, priors
from perfexp.records.record import Key, Point, Record, Series, Status
from perfexp.records.summary import rows
from perfexp.run import machine_priors, worker_query

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = ("model=fake", "gpu=fake", "input_size=64", "stopping=brisk", "device_lock=wait")
#: Factors on the device's times of the replicates 0, 1, ….
FACTORS = np.exp(np.random.default_rng(11).normal(0, 0.05, 10)).tolist()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def processes_that_differ(slower_device):
    """Workers on a device that is slower by the factor of their replicate."""
    slower_device(*FACTORS)


@pytest.mark.slow
def test_a_planted_spread_is_found_printed_and_measured_once(processes_that_differ, here, capsys):
    command = ["selfcheck", *FAKE, "output_dir=x"]
    assert commands.run([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    planted = float(np.expm1(np.log(FACTORS).std(ddof=1)))
    by_time = {one["time"]: one for one in answer["spreads"]}
    device = by_time["device"]
    # medians of 20 samples with 1 % of noise: a standard error of 2 %
    assert device["cv"] == pytest.approx(planted, rel=0.06)
    assert device["cv_interval"][0] < planted < device["cv_interval"][1]
    assert device["processes"] == 10
    assert (
        device["detectable"]["3"] > device["detectable"]["5"] > device["detectable"]["10"] > planted
    )

    record = Record.load(here / "x")
    assert {point.key.replicate for point in record.points} == set(range(10))
    assert {point.key.phase for point in record.points} == {"inference"}
    assert "work/macs" not in {metric.name for point in record.points for metric in point.metrics}

    before = (here / "x" / "details" / "points.jsonl").read_bytes()
    assert commands.run(command) == 0
    assert (here / "x" / "details" / "points.jsonl").read_bytes() == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == answer["sentence"]
    assert "selfcheck: 10 processes of fake-default-inference" in lines


@pytest.mark.slow
def test_equal_processes_have_no_spread(capsys):
    assert commands.run(["selfcheck", *FAKE, "--processes=3", "--json"]) == 0
    for one in json.loads(capsys.readouterr().out)["spreads"]:
        assert one["cv"] < 1e-3


def test_a_run_that_fails_is_not_summed_up(capsys):
    assert commands.run(["selfcheck", *FAKE, "model.faults.oom=1000", "--processes=3"]) != 0
    assert "No two processes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["processes=5"], "'processes' is set by --processes"),
        (["cold_start=true"], "'cold_start' is set by the command"),
        (["fast"], "'fast' is not an override"),
        (["batch_size=1,8"], "batch_size"),
    ],
)
def test_keys_of_the_command_and_sweeps_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        selfcheck.settle([*FAKE, *words], 10, None)


@pytest.mark.parametrize(("visible", "model"), [(0, "resnet18"), (2, "resnet50")])
def test_without_a_model_the_machine_decides(monkeypatch, visible, model):
    monkeypatch.setattr(worker_query, "visible_gpus", lambda: visible)
    _, plan = selfcheck.settle([], 10, None)
    assert (plan.model_name, plan.processes, plan.cold_start) == (model, 10, False)
    assert plan.input_size == [(96, 96)]
    _, plan = selfcheck.settle(["gpu=cpu", "input_size=64", "stopping=coarse"], 4, None)
    assert (plan.model_name, plan.processes, plan.input_size) == ("resnet18", 4, [(64, 64)])


def record_of(make_record, **device):
    """Five processes with 10 % between them, and the facts of a device."""
    key = {"phase": "inference", "input_size": (96, 96), "batch_size": 1, "precision": "fp32"}
    generator = np.random.default_rng(1)
    points = [
        Point(
            key=Key(**key, replicate=number),
            status=Status.OK,
            series=[
                Series(
                    name="latency",
                    samples=list(level * generator.normal(1, 0.01, 80)),
                    blocks=list(range(0, 80, 10)),
                )
            ],
        )
        for number, level in enumerate((0.010, 0.011, 0.0105, 0.012, 0.0095))
    ]
    facts = {"perfexp": "1", "packages": {"torch": "2.11"}, "device": device}
    return make_record(points=points, environment=facts)


def test_sentence_states_the_spread_and_detectable_differences(make_record):
    [spread] = selfcheck.spreads(rows(record_of(make_record, name="AMD EPYC")))
    assert spread.time == "latency"
    text = selfcheck.sentence_of([spread])
    assert text == (
        "On this machine, latency varies by 9.3 % between processes; 5 processes each show differences from 20 %."
    )


def test_doctor_shows_the_spread_of_this_device_and_driver(make_record):
    record = record_of(make_record, name="NVIDIA H200", kind="cuda", uuid="1111", driver="580.65")
    record.doubts = []  # with other work beside it, a run shows nothing of the next one
    machine_priors.add(record)
    facts = {
        "machine": {"perfexp": "1", "packages": {"torch": "2.11"}, "cpu": {"name": "AMD EPYC"}},
        "survey": {
            "parts": {
                "cuda": {"devices": [{"index": 0, "name": "NVIDIA H200", "uuid": "1111"}]},
                "boards": {
                    "boards": [
                        {"uuid": "GPU-1111", "name": "NVIDIA H200", "facts": {"driver": "580.65"}}
                    ]
                },
            }
        },
        "gpu_files": {},
    }
    auto, cpu = Choice(name="auto"), Choice(name="cpu")
    shown = {name: one["measurements"] for name, one in doctor._spread_here(facts, auto).items()}
    assert shown == {"device": 0, "latency": 0, "rate": 0, "memory": 0, "host-bound": 2}
    assert all(one["measurements"] == 0 for one in doctor._spread_here(facts, cpu).values())
    facts["survey"]["parts"]["boards"]["boards"][0]["facts"]["driver"] = "590"
    assert all(one["measurements"] == 0 for one in doctor._spread_here(facts, auto).values())


@pytest.mark.slow
def test_later_runs_know_how_processes_differed(processes_that_differ, here, monkeypatch):
    for code, rule in list(diagnostics.DIAGNOSTICS.items()):  # other tests are other work
        monkeypatch.setitem(diagnostics.DIAGNOSTICS, code, rule._replace(disturbs=False))
    run = (
        "model=fake",
        "gpu=fake",
        "input_size=128",
        "stopping=coarse",
        "tracking=none",
        "processes=1",
    )
    for folder in ("before", "after", "again"):
        assert main.main([*run, f"output_dir={folder}"]) == 0
        if folder == "before":
            assert commands.run(["selfcheck", *FAKE]) == 0
    records = [Record.load(here / name) for name in ("before", "after", "again")]
    before, after, again = (record.priors["device"] for record in records)
    assert (before.cells, after.cells) == (priors.of_kind("fake")["device"].cells, before.cells + 1)
    assert after.variance > 2 * before.variance and after == again, (
        "a run of one process shows nothing of others"
    )
    widths = [
        row.times["device"].median.relative_half_width for record in records for row in rows(record)
    ]
    assert widths[1] > 1.3 * widths[0]
