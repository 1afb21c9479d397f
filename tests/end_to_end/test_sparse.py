"""Sparse sweeps from command to files, on the scripted device: a few sizes are measured, the others are predicted."""

import csv
import json
import shutil
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfexp.cli.composition import compose
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.plan import config
from perfexp.plan.sparse import Sparse
from perfexp.prediction import corpus, predictions, skill
from perfexp.prediction.skill import GAUSSIAN_PROCESS
from perfexp.records.analysis import Analysis
from perfexp.records.expected import Expected
from perfexp.records.record import Metric, Point, Record, Status, points_from_lines, read_points
from perfexp.report.plots import record_plots
from perfexp.run import job
from perfexp.statistics.conformal import Calibration
from perfexp.statistics.estimators import Interval

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = (
    "model=fake",
    "gpu=fake",
    "tracking=none",
    "stopping=fixed",
    "stopping.measure=8",
    "quiet=true",
)
SPARSE = (*FAKE, "sweep=sparse", "model.stairs=0.02", "output_dir=out")


@pytest.fixture(scope="session")
def sparse(finished):
    done = finished(*SPARSE)
    assert done.code == 0
    return done.root / "out"


def table(folder, what):
    [file] = folder.glob(f"*_{what}.csv")
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def truth(side):
    """Milliseconds of the scripted model without stairs."""
    return 1.0 + 20 * side * side / 1e6


def test_a_few_sizes_are_measured_and_all_others_are_predicted(sparse):
    measured, predicted = table(sparse, "overall"), table(sparse, "predicted")
    assert 6 < len(measured) <= 12
    assert len(predicted) == 100
    sides = [line["input_size"] for line in measured]
    assert sides == sorted(sides, key=int)
    assert [line["input_size"] for line in predicted if line["source"] == "measured"] == sides
    others = [line for line in predicted if line["source"] == "interpolated"]
    assert len(others) == 100 - len(measured)
    assert all(line["nearest_input_size"] in sides for line in others)
    held = [
        float(line["median_ms_low"])
        <= truth(int(line["input_size"]))
        <= float(line["median_ms_high"])
        for line in others
    ]
    assert sum(held) >= 0.85 * len(others)


def test_the_console_says_how_much_is_predicted_and_how_sure(sparse):
    [forecast] = predictions.of_record(
        Record.load(sparse), corpus.find_curves([sparse]), corpus.Corpus([])
    )
    number = 100 - len(Record.load(sparse).points)
    assert predictions.summary(forecast).startswith(
        f"inference time: {number} of 100 points predicted within ±"
    )


def test_predictions_are_in_their_own_files_and_not_in_results(sparse):
    record, lines = Record.load(sparse), (sparse / "details" / "predicted.jsonl").read_bytes()
    keys = {point.key for point in record.points}
    assert {point.key for point in read_points(sparse / "details" / "points.jsonl")} == keys
    assert set(Expected.load(sparse / "details" / "expected.json").keys) == keys
    assert {"details/predicted.jsonl", "fake_default_predicted.csv"} <= {
        artifact.path for artifact in record.artifacts
    }
    first = json.loads(lines.splitlines()[1])
    assert first["source"] == "interpolated"
    assert first["low"] < first["value"] < first["high"]
    assert len(first["corpus_sha256"]) == 64
    with pytest.raises(UserError, match="not a point"):
        points_from_lines(lines)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.floats(1e-6, 1e6))
def test_no_predicted_value_enters_a_corpus(tmp_path_factory, sparse, number, seconds):
    folder = tmp_path_factory.mktemp("run") / "out"
    shutil.copytree(sparse, folder)
    lines = [
        json.loads(line)
        for line in (folder / "details" / "predicted.jsonl").read_text().splitlines()
    ]
    lines[number] |= {"value": seconds, "source": "measured"}
    (folder / "details" / "predicted.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "fake_default_predicted.csv").write_text(
        f"input_size,median_ms\n{number},{seconds}\n"
    )
    poisoned, clean = corpus.find_curves([folder]), corpus.find_curves([sparse])
    assert corpus.digest(poisoned) == corpus.digest(clean)
    assert [len(curve.values) for curve in poisoned] == [len(Record.load(sparse).points)]
    shutil.rmtree(folder)


def test_only_neighboring_runs_calibrate_a_run(sparse, tmp_path):
    near, far = tmp_path / "sweep" / "run", tmp_path / "a" / "b" / "c"
    content = json.loads((sparse / "record.json").read_text())
    for folder, changes in {
        near: {},
        far: {"uid": "f" * 32},
        tmp_path / "odd": {"uid": "0" * 32},
    }.items():
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(content | changes))
    content["plan"] |= {"choices": None, "model": {}, "mode": 7, "data": [[]]}
    content["uid"], content["environment"] = "1" * 32, {"device": {"name": "x"}, "ranks": 3}
    (tmp_path / "odd" / "record.json").write_text(json.dumps(content))
    found = corpus.sibling_curves(tmp_path / "own")
    assert {curve.folder for curve in found} == {near, tmp_path / "odd"}
    assert not corpus.sibling_curves(tmp_path / "sweep" / "run")


@pytest.mark.parametrize("part", ["sibling_curves", "of_record"])
def test_a_failed_prediction_loses_neither_record_nor_tables(run, monkeypatch, part):
    def fails(*_):
        raise AttributeError("a foreign record")

    monkeypatch.setattr(corpus, part, fails)
    words = [word for word in SPARSE if not word.startswith("output_dir")]
    _, printed, [record] = run(*words, "sweep.measured=4", "output_dir=out")
    assert "a foreign record" in "".join(printed)
    assert len(record.points) == 4
    assert len(table(run.folder / "out", "overall")) == 4


def test_a_sweep_that_is_continued_chooses_the_same_sizes(finished, tmp_path, monkeypatch):
    folder = finished(*SPARSE).copied(tmp_path).root / "out"
    before = (folder / "details" / "points.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "details" / "points.jsonl").write_bytes(b"".join(before[:7]))
    (folder / "record.json").unlink()
    monkeypatch.chdir(tmp_path)
    assert main(SPARSE) == 0
    after = read_points(folder / "details" / "points.jsonl")
    assert len(after) > 7
    assert {point.key for point in after[:7]} == {
        point.key for point in points_from_lines(b"".join(before[:7]))
    }


def test_sizes_that_do_not_fit_the_memory_are_not_predicted(run):
    code, _, [record] = run(
        *SPARSE[:-1], "model.faults.oom=160000", "sweep.measured=9", "output_dir=out"
    )
    assert code == 1
    assert Status.OOM in {point.status for point in record.points}
    lines = table(run.folder / "out", "predicted")
    refused = [line for line in lines if line["source"] == "refused"]
    assert {line["reason"] for line in refused} == {
        "a point of at most this size ran out of memory",
        "outside the measured range",
    }
    assert all(line["median_ms"] == "" for line in refused)
    assert max(int(line["input_size"]) for line in lines if line["source"] == "interpolated") <= 400


def test_batch_sizes_of_one_size_and_both_phases_are_predicted(run):
    code, _, [record] = run(
        *FAKE, "sweep=sparse", "sweep.measured=4", "mode=train_inference", "input_size=64",
        "batch_size=[1,2,4,8,16,32,64,128]", "output_dir=out",
    )  # fmt: skip
    assert code == 0
    assert {point.key.batch_size for point in record.points} == {1, 4, 32, 128}
    lines = table(run.folder / "out", "predicted")
    assert [line["batch_size"] for line in lines if line["source"] == "interpolated"] == [
        "2",
        "8",
        "16",
        "64",
    ] * 2


def test_batch_sizes_of_a_phase_alone_are_predicted_for_it_alone(run):
    code, _, _ = run(
        *FAKE, "sweep=sparse", "sweep.measured=4", "mode=train_inference", "input_size=64",
        "batch_size=[1,2,4,8,16,32]", "mode.train.batch_size=[2,4,8,16,32,64]", "output_dir=out",
    )  # fmt: skip
    assert code == 0
    lines = table(run.folder / "out", "predicted")
    assert {line["batch_size"] for line in lines if line["phase"] == "train"} == {
        "2",
        "4",
        "8",
        "16",
        "32",
        "64",
    }
    assert {line["batch_size"] for line in lines if line["phase"] == "inference"} == {
        "1",
        "2",
        "4",
        "8",
        "16",
        "32",
    }


def test_phases_with_own_batch_sizes_select_by_their_own_results():
    words = "batch_size=[1,2,4,8,16,32,64,128]", "mode.train.batch_size=[1,2,4,8,16,32,64,256]"
    plan = config.typed(
        compose(
            [
                *FAKE[:2],
                "sweep=sparse",
                "sweep.measured=7",
                "mode=train_inference",
                "input_size=64",
                *words,
            ]
        )
    )
    first = [key for key in plan.timed_keys() if not key.replicate]
    trained = [Point(key=key, status=Status.OK) for key in first if key.phase == "train"]
    odd = Point(
        key=msgspec.structs.replace(trained[0].key, batch_size=2), status=Status.OK
    )  # tried in training only
    after = [key for key in plan.timed_keys([*trained, odd]) if not key.replicate]
    assert odd.key in after
    assert [key for key in after if key.phase == "inference"] == [
        key for key in first if key.phase == "inference"
    ]


def test_plot_shows_predictions_as_a_band_between_measured_sizes(sparse):
    record, curves = Record.load(sparse), corpus.find_curves([sparse])
    [forecast] = predictions.of_record(record, curves, corpus.Corpus([]))
    panel, rate = record_plots.plot(Analysis.of(record), [forecast]).panels
    [line] = [line for line in panel.lines if line.predicted]
    assert (line.label, [line for line in rate.lines if line.predicted]) == ("device", [])
    assert not panel.curves
    assert len(line.predicted) == 100 - len(record.points)
    assert not set(line.predicted) & set(line.x)


def test_settings_of_sparse_sweeps_are_checked():
    for wrong in (
        {"measured": 3},
        {"measured": 101},
        {"target": 0},
        {"target": float("nan")},
        {"min_size": 0},
    ):
        with pytest.raises(UserError, match="sweep"):
            Sparse(**wrong)


def test_points_outside_the_measured_range_are_refused(sparse):
    [curve] = corpus.find_curves([sparse])
    pairs = [((200, 200), 1), ((225, 225), 1), ((224, 224), 2), ((600, 600), 1), ((300, 301), 1)]
    made = predictions.forecast(curve, pairs, Calibration())
    assert [point.source for point in made.points] == [
        "refused", "interpolated", "refused", "refused", "interpolated"
    ]  # fmt: skip


def test_values_of_a_few_points_are_refused_too(sparse):
    [curve] = corpus.find_curves([sparse])
    few = {pair: Interval(value=1.0, low=None, high=None) for pair in list(curve.values)[:3]}
    thin = corpus.MeasuredCurve(**{**vars(curve), "values": few})
    [point] = predictions.forecast(thin, [((226, 226), 1)], Calibration()).points
    assert point.source == "refused"
    assert "needs 4" in point.reason


def test_short_curves_are_scored_by_leaving_one_out(sparse):
    [curve] = corpus.find_curves([sparse])
    values = {
        ((side, side), 1): Interval(value=truth(side), low=None, high=None)
        for side in range(224, 249)
    }
    dense = replace(curve, values=values)
    for measured, unseen in {12: 13, 24: 1, 25: 23, 100: 23}.items():
        [scores] = skill.score_all([dense], measured=measured, dense=20)[0].scores
        assert scores[GAUSSIAN_PROCESS].errors.size == unseen


def test_a_dry_run_names_the_scope(run):
    code, printed, _ = run(*SPARSE, "--dry-run")
    assert code == 0
    assert "6 points" in printed
    assert "then up to 12 of 100 points by their results, the others predicted" in printed


def test_the_scope_counts_the_batch_sizes_of_each_phase():
    mode = [
        "mode=train_inference",
        "mode.train.batch_size=[1,2,4,8]",
        "mode.inference.batch_size=[1,2]",
    ]
    sweep = ["sweep=sparse", "sweep.measured=5", "input_size=[64,96]"]
    plan = config.typed(compose(["model=fake", "gpu=fake", "tracking=none", *mode, *sweep]))
    assert plan.scope == "; then up to 9 of 12 points by their results, the others predicted"


def test_algorithm_that_computes_nothing_is_noted(make_record, tmp_path):
    def codes(share):
        metrics = [Metric.of("algorithm/flops_share", share)]
        return [
            doubt.code
            for doubt in job._notes(make_record(sizes=(224, 512), metrics=metrics), tmp_path)
        ]

    assert codes(0.0) == ["algorithm_without_effect"]
    assert not codes(0.4)


TINY = """
from torch import nn

class Tiny(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
"""
CAMPAIGN = """
# @package _global_
defaults:
  - override /sweep: sparse
cold_start: true
sweep: {measured: 4, num_sizes: 5, min_size: 32, max_size: 64}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "cold_starts"), [((), 1), (("cold_start=true",), 2)])
def test_a_cold_start_of_the_default_algorithm_is_enough(typed, cold_starts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_net.py").write_text(TINY)
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "campaign.yaml").write_text(CAMPAIGN)
    words = ["experiment=campaign", "model=tiny_net:Tiny", "algorithm=default,fft", *typed]
    settings = ["gpu=cpu", "tracking=none", "stopping=fixed", "stopping.measure=3"]
    assert main(["--config-dir=own", "-m", *words, *settings, "output_dir=s"]) == 0
    keys = [
        point.key
        for run in ("0-default", "1-fft")
        for point in Record.load(tmp_path / "s" / run).points
    ]
    assert sum(key.phase == "ttfp" for key in keys) == cold_starts
    assert main(["resume=s/1-fft"]) == 0  # the second run is found again by itself


def test_each_measured_size_has_a_progress_line(run):
    _, printed, [record] = run(*FAKE[:-1], "sweep=sparse", "processes=1", "output_dir=out")
    lines = [line for line in printed.splitlines() if line.startswith("[")]
    count = len([point for point in record.points if point.key.is_timed])
    assert count > 6
    assert len(lines) == count
    assert lines[-1].startswith(f"[{count}/{count}] ")
