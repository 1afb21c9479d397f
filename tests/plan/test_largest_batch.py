"""`batch_size=max`: the search against a known memory, its results in a run, and what is refused."""

import csv
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from perfexp import commands
from perfexp.commands.reproduce import _found_batches
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.plan import config, largest_batch, plan_file
from perfexp.plan.largest_batch import (
    MOST_TRIALS,
    TRIALS,
    Trial,
    bracket,
    failures,
    next_batch,
    outcomes,
    resolved,
    trial_keys,
)
from perfexp.records.analysis import Analysis
from perfexp.records.paths import RunPaths
from perfexp.records.record import (
    LARGEST,
    Key,
    Metric,
    Point,
    Status,
    is_trial,
    layers_key,
    read_points,
    trial_key,
)
from perfexp.records.sweep_record import Sweep
from perfexp.report.tracking import descriptions, payload
from perfexp.run import supervisor
from perfexp.run.preparation import Assignment, is_finished

pytestmark = pytest.mark.usefixtures("quick_commands")

CAPACITY = 80e9
WEIGHTS = 3e8
#: 500 bytes hold weights of 96 and 2 pixels of 160 bytes, or 1 of 320 bytes in training.
MEMORY = (
    "+gpu.script.memory_bytes=500",
    "model.weight_bytes=96",
    "model.bytes_per_pixel=160",
    "input_size=1",
)
BOTH = ("batch_size=max", "mode=train_inference")
SEARCH = (*BOTH, "model=fake", "gpu=fake", "tracking=none", "stopping=fixed", *MEMORY)


def search(largest, *, start, assumed=1.0, capacity=CAPACITY):
    """The trials on a device that holds `largest` samples, and whose memory seems to be `assumed` times as large."""
    trials = []
    per_sample = (CAPACITY / assumed - WEIGHTS) / largest
    while (batch := next_batch(trials, start=start, capacity_bytes=capacity)) is not None:
        trials.append(
            Trial(
                batch, batch <= largest, WEIGHTS + per_sample * batch if batch <= largest else None
            )
        )
    return trials


@pytest.mark.parametrize("largest", [1, 2, 3, 17, 100, 720, 3000])
@pytest.mark.parametrize("near", [0, 0.02, -0.02])
def test_a_traced_start_finds_the_edge_in_few_trials(largest, near):
    trials = search(largest, start=max(1, round(largest * (1 + near))), assumed=1.001)
    assert bracket(trials) == (largest, largest + 1)
    assert len(trials) <= MOST_TRIALS


@pytest.mark.parametrize("start", [1, 64, 1500, 1_000_000])
@pytest.mark.parametrize("assumed", [0.97, 0.99, 1, 1.01, 1.03])
def test_wrong_start_or_capacity_costs_trials_not_correctness(start, assumed):
    trials = search(720, start=start, assumed=assumed)
    fits, fails = bracket(trials)
    assert len(trials) <= MOST_TRIALS
    assert len({trial.batch_size for trial in trials}) == len(trials)
    assert 0.95 * 720 <= fits <= 720 < fails


def test_memory_that_an_allocator_can_give_back_leads_nowhere():
    """A training of resnet50 on a GPU of 85 GB: at batch 940 torch reserves 47 GB for tensors of 42.4 GB."""
    tried = [point(1881, Status.OOM)]
    while (batch := next_batch(_trials(tried), start=1881, capacity_bytes=85.0e9)) is not None:
        peak, is_fitting = 42.42e9 + (batch - 940) * 44.75e6, batch <= 1866
        reserved = min(max(1.108 * peak, 47.0e9), 84.2e9)
        values = {
            "peak_bytes": peak,
            "reserved_peak_bytes": reserved,
            "device_bytes": reserved + 0.8e9,
        }
        metrics = [
            Metric(name=f"memory/{name}", value=value, unit="bytes")
            for name, value in values.items()
        ]
        tried.append(
            replace(point(batch, Status.OK if is_fitting else Status.OOM), metrics=metrics)
        )
    fits, fails = bracket(_trials(tried))
    assert fits <= 1866 < fails
    assert fails - fits <= 3
    assert len(tried) <= MOST_TRIALS


def _trials(points):
    return outcomes(largest_batch._fact(one) for one in points)


def test_without_used_bytes_the_batch_doubles_and_is_bisected():
    assert [trial.batch_size for trial in search(5, start=1, capacity=None)] == [1, 2, 4, 8, 6, 5]
    assert [trial.batch_size for trial in search(200, start=1, capacity=None)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
    ]


def test_where_not_even_one_sample_fits_the_search_ends():
    assert search(0.5, start=1) == [Trial(1, False)]
    assert [trial.batch_size for trial in search(0.5, start=300)] == [300, 150, 2, 1]


def point(batch, status=Status.OK, *, of_trial=True, replicate=0, **facts):
    key = Key(
        phase="train", input_size=(8, 8), batch_size=batch, precision="fp32", replicate=replicate
    )
    metrics = (
        [Metric(name="memory/peak_bytes", value=100.0 * batch, unit="bytes")]
        if status is Status.OK
        else []
    )
    key = trial_key(key) if of_trial else key
    return Point(key=key, status=status, metrics=metrics, facts={"capacity_bytes": 450, **facts})


WANTED = [
    Key(phase="train", input_size=(8, 8), batch_size=batch, precision="fp32", replicate=replicate)
    for replicate, batch in itertools.product(range(2), (2, LARGEST))
]


def sizes(results):
    keys = resolved(WANTED, results), trial_keys(WANTED, results)
    return tuple([key.batch_size for key in of] for of in keys)


def test_trials_are_due_until_the_edge_is_known():
    assert sizes([]) == ([2, LARGEST, 2, LARGEST], [LARGEST])
    tried = [point(1)]
    assert sizes(tried) == ([2, LARGEST, 2, LARGEST], [4])
    tried.append(point(4))
    assert sizes(tried) == ([2, LARGEST, 2, LARGEST], [5])
    tried.append(point(5, Status.OOM_PREDICTED))
    assert sizes(tried) == ([2, 4, 2, 4], [])


def test_out_of_memory_measurement_counts_as_a_trial():
    tried = [point(2), point(4), point(5, Status.OOM)]
    trials = [{"batch_size": 4, "status": "ok"}]
    tried.append(point(4, Status.OOM, of_trial=False, **{TRIALS: trials}))
    assert sizes(tried) == ([2, LARGEST, 2, LARGEST], [3])
    assert sizes([*tried, point(3)]) == ([2, 3, 2, 3], [])


def test_a_measured_batch_is_final_without_its_trials():
    assert sizes([point(3, of_trial=False, **{TRIALS: [{"batch_size": 3}]})]) == ([2, 3, 2, 3], [])


@pytest.mark.parametrize("batch", [LARGEST, 5])
@pytest.mark.parametrize(
    "status", [Status.FAILED, Status.TIMEOUT, Status.KILLED, Status.UNSUPPORTED]
)
def test_trial_failing_without_oom_ends_the_search_with_no_batch(batch, status):
    tried = [*([point(4)] if batch else []), point(batch, status)]
    tried[-1].error = "why"
    assert sizes(tried) == ([2, LARGEST, 2, LARGEST], [])
    wanted = [*WANTED, layers_key(WANTED[1]), replace(WANTED[1], phase="ttfp")]
    timed, other, layers = failures(wanted, tried)
    assert [one.key for one in (timed, other, layers)] == [
        WANTED[1],
        WANTED[3],
        layers_key(WANTED[1]),
    ]
    assert {(one.status, one.error) for one in (timed, other, layers)} == {(status, "why")}
    assert [one["batch_size"] for one in timed.facts[TRIALS]] == [
        one.key.batch_size for one in tried
    ]
    assert sizes([timed]) == ([2, LARGEST, 2, LARGEST], []), "a record has no other trials"


def test_a_model_that_does_not_even_load_has_no_largest_batch():
    [timed, _] = failures(WANTED, [point(LARGEST, Status.OOM)])
    assert timed.status is Status.OOM
    assert sizes([timed]) == ([2, LARGEST, 2, LARGEST], [])


def test_points_get_the_status_of_their_failed_search(tmp_path, monkeypatch):
    wanted = [*WANTED[1::2], replace(WANTED[1], phase="inference")]

    plan = SimpleNamespace(
        profiler={"_target_": "perfexp.measuring.profilers.NoProfiler"},
        is_sparse=True,
        timed_keys=lambda results: resolved(wanted, results),
        trial_keys=lambda results: trial_keys(wanted, results),
        **dict.fromkeys(("layer_keys", "first_prediction_keys", "profile_keys"), lambda _: []),
    )
    ending = supervisor._Ending(Status.KILLED, "the worker was ended by SIGKILL")
    workers = []
    monkeypatch.setattr(supervisor, "prepare", lambda *_: "hash")
    monkeypatch.setattr(supervisor, "_one_worker", lambda _, what: workers.append(what) or ending)
    job = supervisor.Supervisor(Assignment(plan=plan, plain={}, folder=tmp_path, name="run"))
    job.paths.create()
    job.prepare()
    for replicate in range(2):
        supervisor.measure(job, replicate)
    assert workers == [["--what=trials", "--replicate=0"]] * 3, "the second search begins as well"
    assert [(one.key, one.status, one.error) for one in supervisor.results(job)] == [
        (key, ending.status, ending.text) for key in wanted
    ]


def test_a_worker_that_dies_in_layers_leaves_others_to_the_next(tmp_path, monkeypatch):
    timed = [WANTED[0], replace(WANTED[0], batch_size=4)]
    layers = list(map(layers_key, timed))
    plan = SimpleNamespace(
        profiler={"_target_": "perfexp.measuring.profilers.NoProfiler"},
        is_sparse=True,
        timed_keys=lambda _: timed,
        layer_keys=lambda _: layers,
        **dict.fromkeys(("trial_keys", "first_prediction_keys", "profile_keys"), lambda _: []),
    )
    workers = []

    def one_worker(job, what):
        measured = timed if "--what=timed" in what else layers[1:]
        supervisor._append(job.paths, [Point(key=key, status=Status.OK) for key in measured])
        workers.append(what[0])
        current = layers[0] if measured is timed else None
        return supervisor._Ending(Status.KILLED, "the worker was ended by SIGKILL", current)

    monkeypatch.setattr(supervisor, "prepare", lambda *_: "hash")
    monkeypatch.setattr(supervisor, "_one_worker", one_worker)
    job = supervisor.Supervisor(Assignment(plan=plan, plain={}, folder=tmp_path, name="run"))
    job.paths.create()
    job.prepare()
    supervisor.measure(job, 0)
    assert workers == ["--what=timed", "--what=layers"]
    statuses = [Status.OK, Status.OK, Status.KILLED, Status.OK]
    assert [one.status for one in supervisor.results(job)] == statuses


@pytest.mark.parametrize("batch", [-4, -3, 1 << 40])
def test_batches_that_cannot_be_are_ignored(batch):
    tried = [point(4), point(batch), point(batch, Status.OOM), point(LARGEST)]
    assert sizes(tried) == sizes([point(4)])
    facts = {TRIALS: [{"batch_size": size, "status": "oom"} for size in (batch, True, 4)]}
    wanted = [WANTED[1]]
    assert [
        key.batch_size
        for key in trial_keys(wanted, [point(8, Status.OOM, of_trial=False, **facts)])
    ] == [2]
    assert resolved(wanted, [point(batch, of_trial=False, **facts)]) == wanted


@pytest.mark.parametrize("size", ["x", 5e-324, -1, math.inf, math.nan, True, [], 10**400])
def test_memory_sizes_that_cannot_be_are_ignored(size):
    tried = [point(4, capacity_bytes=size)]
    assert sizes(tried) == ([2, LARGEST, 2, LARGEST], [8])
    tried = [point(4)]
    tried[0].metrics[0].value = size
    assert sizes(tried) == ([2, LARGEST, 2, LARGEST], [8])


@pytest.mark.parametrize("hostile", [None, "x", [1], [{"batch_size": "1", "status": {}}], [{}]])
def test_facts_of_another_form_are_no_trials(hostile):
    wanted = [WANTED[1]]
    assert trial_keys(wanted, [point(3, Status.OOM, of_trial=False, **{TRIALS: hostile})])
    assert resolved(wanted, [point(7, of_trial=False, **{TRIALS: hostile})])


def batches(record):
    return {one.key.phase: one.key.batch_size for one in record.points if one.key.replicate == 0}


@pytest.mark.slow
@pytest.mark.always("memory limits: the largest batch")
def test_each_phase_is_measured_with_its_own_largest_batch(run, capsys):
    run.draws = True
    code, printed, [record] = run.shared(*SEARCH, "output_dir=x")
    assert (code, record.status) == (0, Status.OK)
    assert batches(record) == {"train": 1, "inference": 2}
    [train] = [one for one in record.points if one.key.phase == "train"]
    assert [(one["batch_size"], one["status"]) for one in train.facts[TRIALS]] == [
        (2, "oom"),
        (1, "ok"),
    ]
    assert train.metric("largest_batch/too_large").value == 2
    assert train.metric("largest_batch/trials_count").value == len(train.facts[TRIALS])
    assert "train 1 batch 2: oom" in printed
    with Path("x/fake_default_overall.csv").open() as file:
        assert [row["batch_size"] for row in csv.DictReader(file)] == ["1", "2"]
    assert record.plan["batch_size"] == "max"
    assert plan_file.plan_hash(plan_file.read(Path("x/details/plan.yaml"))) == record.plan_hash

    capsys.readouterr()
    assert commands.run(["status", "x"]) == 0
    assert "2/2 done" in capsys.readouterr().out
    assert is_finished(RunPaths(Path("x")), config.typed(record.plan))
    assert main(["resume=x"]) == 0
    assert "Nothing is left to measure" in capsys.readouterr().out


@pytest.mark.slow
def test_interrupted_search_continues_with_its_finished_trials(run):
    _, _, [record] = run.shared(*SEARCH, "output_dir=x")
    lines = Path("x/details/points.jsonl").read_bytes().splitlines(keepends=True)
    assert is_trial(read_points(Path("x/details/points.jsonl"))[1].key)
    Path("x/details/points.jsonl").write_bytes(b"".join(lines[:2]))
    Path("x/record.json").unlink()
    _, _, [again] = run(*SEARCH, "output_dir=x")
    assert batches(again) == batches(record)
    assert Path("x/details/points.jsonl").read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert len(read_points(Path("x/details/points.jsonl"))) == len(lines)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["gpu=cpu"], "a memory of its own"),
        (["gpu=fake", "sweep=sparse"], "sweep=sparse"),
        (["gpu=fake", "profiler=nvtx"], "profiler=nvtx"),
        (["gpu=h100", "gpu.count=2"], "gpu.count=2"),
        (["gpu=fake", "batch_size=[max,max]"], "batch_size has max twice"),
        (["gpu=fake", "batch_size=largest"], "batch_size=largest is not a batch size"),
    ],
)
def test_a_search_without_an_end_is_one_line(run, given, reason):
    code, printed, records = run(
        "model=fake", "batch_size=max", "tracking=none", "output_dir=x", *given
    )
    assert (code, records) == (2, [])
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert reason in printed
    assert not Path("x").exists()


def test_a_device_without_a_memory_size_is_one_line(run):
    code, printed, records = run(
        "model=fake", "gpu=fake", "batch_size=max", "tracking=none", "output_dir=x"
    )
    assert (code, records) == (2, [])
    assert printed.strip() == (
        "error: batch_size=max needs a device with a limited memory, not scripted device: set batch_size=N."
    )
    assert not Path("x").exists()


def test_mlflow_has_no_batch_size_until_it_is_found(make_record, tmp_path):
    plan = {
        "data": {"name": "synthetic"},
        "batch_size": [8, "max"],
        "model": {"name": "unet"},
        "mode": {"name": "both"},
        "precision": {"name": "torch"},
    }
    record = make_record(plan=plan, phases=("train", "inference"), batches=(8,))
    unknown = Point(
        key=replace(record.points[1].key, batch_size=LARGEST), status=Status.INTERRUPTED
    )
    record.points.insert(2, unknown)
    run = payload.of_run(Analysis.of(record), tmp_path)
    assert run.params["phase"] == "train, inference"
    assert "batch_size" not in run.params
    assert run.name == "unet both 224 b8-max"
    assert [one.identity["perfexp.batch_size"] for one in run.children] == ["8", "8", "1"], (
        "with the cold start"
    )
    assert [one.name for one in run.datasets] == ["synthetic 224x224 b8"]
    [table] = [json.loads(one.content) for one in run.files if one.source is None]
    assert [line[table["columns"].index("batch_size")] for line in table["data"]] == [8, 8]
    sweep = Sweep(uid="s", name="model", started=record.started, jobs=2)
    assert (
        descriptions.params_of_sweep(sweep, [make_record(batches=(1, 8))])["batch_size"] == "1, 8"
    )
    assert "batch_size" not in descriptions.params_of_sweep(sweep, [make_record(), record])
    record.points = [unknown]
    alone = payload.of_run(Analysis.of(record), tmp_path)
    assert (alone.status, alone.first_tags, alone.datasets) == ("KILLED", {}, [])
    assert not any(
        " 0 " in f" {text} " or "b0" in text for text in [alone.name, *alone.params.values()]
    )


def test_predictions_name_the_batch_instead(capsys):
    assert commands.run(["predict", "model=fake", "gpu=fake", "batch_size=max"]) == 2
    assert "prints the largest batch" in capsys.readouterr().err


def test_the_batches_of_a_record_are_measured_again(make_record):
    plan = {"batch_size": "max", "mode": {"train": None, "inference": {"batch_size": None}}}
    assert _found_batches(make_record(batches=(24,), plan=plan)) == [
        "mode.inference.batch_size=[24]",
        "batch_size=1",
    ]
    assert (
        _found_batches(make_record(batches=(LARGEST, 8), plan=plan))[0]
        == "mode.inference.batch_size=[8]"
    )
    assert (
        _found_batches(make_record(batches=(LARGEST,), plan=plan))[0]
        == "mode.inference.batch_size=max"
    )
    plan["mode"]["inference"]["batch_size"] = 3
    assert _found_batches(make_record(batches=(3,), plan=plan)) == ["batch_size=1"]
    plan["mode"] |= {"train._target_=os.system": {"batch_size": "max"}}
    assert _found_batches(make_record(batches=(3,), plan=plan)) == ["batch_size=1"]
    plan["mode"]["inference"]["batch_size"] = ["max"]
    with pytest.raises(UserError, match="Each size"):
        _found_batches(make_record(sizes=(64, 96), plan=plan))
