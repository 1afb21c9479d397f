"""Ratios and verdicts in the table of a sweep."""

import io
import re

import msgspec
import numpy as np
import pytest

from perfexp.comparison import pairing, sweep_verdicts
from perfexp.comparison.pairing import FEATURES, Side
from perfexp.records import sweep_summary
from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.record import Status, SweepMembership
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.report.console import Console
from perfexp.report.plots import sweep_plots
from perfexp.report.tracking import descriptions
from tests.support.verdicts import record

PROCESSES = [0.999, 1.0, 1.001]


def swept(*runs):
    """A sweep over algorithms: for each run the factors of its points; None for a run without a record."""
    records, children = [], []
    for job, factors in enumerate(runs):
        name = f"run{job}"
        children.append(
            SweepChild(
                job=job, name=name, directory=name, status=Status.OK, axes={"algorithm": name}
            )
        )
        if factors is not None:
            found = record(
                name,
                [[factor * one for one in PROCESSES] for factor in factors],
                np.random.default_rng(job),
            )
            found.plan = {"algorithm": {"name": name}}
            found.sweep = SweepMembership(
                uid="sweep", job=job, directory="..", axes={"algorithm": name}
            )
            records.append(found)
    return Sweep(uid="sweep", name="algorithm", started="2026-01-01", children=children), records


def grid(axes_and_factors):
    """A sweep of runs of one point: for each run its axes and the factor of its times; None runs out of memory."""
    records, children = [], []
    for job, (axes, factor) in enumerate(axes_and_factors):
        name = "-".join(axes.values())
        children.append(SweepChild(job=job, name=name, directory=name, status=Status.OK, axes=axes))
        found = record(
            name, [[(factor or 1.0) * one for one in PROCESSES]], np.random.default_rng(job)
        )
        for point in found.points:
            point.key = msgspec.structs.replace(
                point.key, batch_size=int(axes.get("batch_size", 1))
            )
            if factor is None:
                point.status, point.series = Status.OOM, []
        found.plan = {
            "model": {"name": axes.get("model", "resnet18")},
            "algorithm": {"name": "default"},
        }
        found.sweep = SweepMembership(uid="sweep", job=job, directory="..", axes=axes)
        records.append(found)
    return Sweep(
        uid="sweep", name="model × batch_size", started="2026-01-01", children=children
    ), records


def models_and_batches(*factors):
    """Models a, b, … at the batch sizes 1, 8, … with a factor for each."""
    return grid(
        ({"model": model, "batch_size": batch}, factor)
        for model, of_model in zip("abc", factors, strict=False)
        for batch, factor in zip(("1", "8", "64"), of_model, strict=False)
    )


def test_each_run_is_compared_with_the_first_one():
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(*swept([1.0], [0.8], [1.2], [1.0])))
    assert found.title == "device / run 0"
    texts = {job: text for (job, phase), text in found.ratios.items() if phase == "inference"}
    assert {job: text.split()[-2:] for job, text in texts.items()} == {
        1: ["▲", "FASTER"],
        2: ["▼", "SLOWER"],
        3: ["=", "SAME"],
    }
    assert [float(text.split()[0]) for text in texts.values()] == pytest.approx(
        [0.8, 1.2, 1.0], rel=0.01
    )
    assert found.fastest == []


@pytest.mark.parametrize("level", [None, 0.007])
def test_sweep_plot_marks_undecided_ratios_like_the_table(level):
    """The intervals of both runs of 0.7 do not overlap the baseline's; only the exact one is decided."""
    sweep, records = swept([1.0], [0.7], [0.7])
    for point, factor in zip(records[1].points, (0.6, 1.0, 1.6), strict=True):
        for series in point.series:
            series.samples = [factor * sample for sample in series.samples]
    for one in records:
        one.sweep.level = level
    texts = {
        job: text.split()[-1]
        for (job, _), text in sweep_verdicts.of_sweep(
            SweepAnalysis.of(sweep, records)
        ).ratios.items()
    }
    assert texts == {1: "UNDECIDED", 2: "FASTER"}
    plot = sweep_plots.plot(SweepAnalysis.of(sweep, records))
    bars = {bar.label: bar.text.partition(" · ")[2] for bar in plot.facets[0].groups[""]}
    assert bars["run0"] == "baseline"
    assert re.fullmatch(r"≈ 0\.\d+ × device", bars["run1"])
    assert re.fullmatch(r"0\.\d+ × device", bars["run2"])
    assert plot.caption.subtitle.endswith(
        "; × is the ratio to the baseline, ≈ before it: undecided"
    )


@pytest.mark.parametrize(
    ("level", "said"), [(0.0, "no intervals before 2 processes"), (0.007, "99.3 % intervals")]
)
def test_the_confidence_of_turns_is_told_if_there_are_intervals(level, said):
    sweep, records = swept([1.0], [0.7])
    for one in records:
        one.sweep.level = level
    lines = [
        line
        for line in sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records)).notes
        if line.startswith("± of ")
    ]
    assert [said in line for line in lines] == [True]
    assert "100 %" not in lines[0]


def test_sweep_plot_compares_runs_with_the_first_of_their_model():
    axes = [
        {"model": model, "algorithm": algorithm} for model in "ab" for algorithm in ("gemm", "fft")
    ]
    sweep, records = grid(zip(axes, (1.0, 0.8, 2.0, 3.0), strict=True))
    for one in records:
        one.plan["algorithm"]["name"] = one.sweep.axes["algorithm"]
    plot = sweep_plots.plot(SweepAnalysis.of(sweep, records))
    texts = {
        (name, bar.label): bar.text.partition(" · ")[2]
        for name, bars in plot.facets[0].groups.items()
        for bar in bars
    }
    assert texts["a", "gemm"] == texts["b", "gemm"] == "baseline"
    ratios = {
        place: text.removesuffix(" × device") for place, text in texts.items() if place[1] == "fft"
    }
    assert float(ratios["a", "fft"]) == pytest.approx(0.8, rel=0.01)
    assert float(ratios["b", "fft"]) == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize(
    ("second", "title"),
    [(("gemm", "fft"), "device / gemm"), (("fft", "gemm"), "device / the first of its model")],
)
def test_runs_are_compared_within_their_model(second, title):
    axes = [{"model": "a", "algorithm": name} for name in ("gemm", "fft")]
    axes += [{"model": "b", "algorithm": name} for name in second]
    sweep, records = grid(zip(axes, (1.0, 0.8, 20.0, 30.0), strict=True))
    for one in records:
        one.plan["algorithm"]["name"] = one.sweep.axes["algorithm"]
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert (found.title, found.notes, found.fastest) == (title, [], [])
    assert {job: float(text.split()[0]) for (job, _), text in found.ratios.items()} == {
        1: pytest.approx(0.8, rel=0.01),
        3: pytest.approx(1.5, rel=0.01),
    }


def test_model_without_the_baseline_has_no_ratios():
    axes = [
        {"model": model, "algorithm": name} for model in "ab" for name in ("gemm", "fft", "direct")
    ]
    sweep, records = grid(zip(axes[:5], (1.0, 0.8, 1.2, 2.0, 3.0), strict=True))
    for one in records:
        one.plan["algorithm"]["name"] = one.sweep.axes["algorithm"]
        one.plan["compare"] = {"baseline": "direct"}
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert (found.title, sorted(job for job, _ in found.ratios)) == ("device / run 2", [0, 1])
    assert found.notes == [
        "no device / run 2: the baseline has no time of the same phase, size and batch"
    ]


def test_rates_too_are_compared_as_times():
    sweep, records = swept([1.0], [0.8])
    for point in (point for one in records for point in one.points):
        point.series[0].name, point.facts["bound_by"] = "throughput", "gpu"
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    (text,) = found.ratios.values()
    assert found.title == "time per sample / run 0"
    assert re.fullmatch(r"0\.8\d* ± [\d.]+ % ▲ FASTER", text)
    assert float(text.split()[0]) == pytest.approx(0.8, rel=0.01)
    assert text.endswith("FASTER")


def test_other_times_with_another_verdict_are_named():
    sweep, records = swept([1.0], [0.8], [0.9])
    for one, factor in zip(records, (1.0, 2.0, 1.0), strict=True):
        for point in one.points:
            point.facts["bound_by"] = "gpu"
            [device] = point.series
            samples = [factor * sample for sample in device.samples]
            point.series.append(msgspec.structs.replace(device, name="latency", samples=samples))
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert [text.split()[-1] for text in found.ratios.values()] == ["FASTER"] * 2
    assert found.notes == [
        "by device; latency (1 of 2), throughput (1 of 2): SLOWER (perfexp compare DIR)"
    ]
    sweep.children.pop()
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records[:2]))
    assert found.notes == ["by device; latency, throughput: SLOWER (perfexp compare DIR)"]
    out = io.StringIO()
    Console(out=out, err=out, width=120).show_sweep(SweepAnalysis.of(sweep, records[:2]), None)
    for text in (out.getvalue(), descriptions.of_sweep(SweepAnalysis.of(sweep, records[:2]))):
        assert found.notes[0] in text


def test_the_first_run_with_a_time_is_the_baseline():
    assert (
        sweep_verdicts.of_sweep(SweepAnalysis.of(*swept(None, [1.0], [0.8]))).title
        == "device / run 1"
    )


@pytest.mark.parametrize("name", ["1", "run1", "algorithm=run1"])
def test_the_baseline_may_be_another_run(name):
    sweep, records = swept([1.0], [0.8], [1.2])
    for one in records:
        one.plan["compare"] = {"baseline": name}
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert found.title == "device / run 1"
    texts = {job: text.split() for (job, _), text in found.ratios.items()}
    assert {job: words[-1] for job, words in texts.items()} == {0: "SLOWER", 2: "SLOWER"}


def test_a_baseline_that_no_run_is_called_is_named():
    sweep, records = swept([1.0], [0.8])
    records[0].plan["compare"] = {"baseline": "gemm"}
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert (found.title, found.ratios) == ("", {})
    assert found.fastest == ["compare.baseline=gemm: no timed run has this name"]


@pytest.mark.parametrize("runs", [(), (None,), ([1.0],), ([1.0], None)])
def test_a_single_run_is_compared_with_nothing(runs):
    assert (
        sweep_verdicts.of_sweep(SweepAnalysis.of(*swept(*runs))) == sweep_verdicts.SweepVerdicts()
    )


def test_runs_without_a_point_in_common_are_not_compared():
    sweep, records = swept([1.0], [0.8])
    for point in records[1].points:
        point.key = msgspec.structs.replace(point.key, batch_size=64)
    assert (
        sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records)) == sweep_verdicts.SweepVerdicts()
    )


def test_of_several_points_the_verdicts_are_counted():
    found = sweep_verdicts.of_sweep(
        SweepAnalysis.of(*swept([1.0, 1.0, 1.0], [0.8, 0.8, 1.2], [0.9, 0.7, 1.0]))
    )
    assert found.ratios == {
        (1, "inference"): "▲ FASTER at 2, ▼ SLOWER at 1",
        (2, "inference"): "▲ FASTER at 2, = SAME at 1",
    }
    assert found.fastest == [
        "run 0: no other run is shown to be faster at 1 of 3 points",
        "run 1: fastest at 1 of 3 points",
        "run 2: fastest at 1 of 3 points",
    ]


def test_the_fastest_at_a_point_is_of_all_curves():
    for count, lines in (
        (4, ["run 1: fastest at 1 of 4 points", "run 2: fastest at 3 of 4 points"]),
        (5, ["run 2: fastest at 4 of 4 points"]),  # three points are no curve, four are
    ):
        sweep, records = swept(count * [1.0], count * [0.8], count * [0.7])
        del records[2].points[-len(PROCESSES) :]
        found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
        assert found.fastest == lines


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_failed_run_of_a_curve_leaves_a_point_to_the_others(is_recorded):
    batches = {"1": 1.0, "8": 1.0, "64": 1.0, "128": 1.0, "256": 1.0}
    sweep, records = grid(
        ({"algorithm": name, "batch_size": batch}, None if batch == "256" == last else factor)
        for name, factor, last in (("default", 1.0, ""), ("gemm", 0.8, ""), ("fft", 0.9, "256"))
        for batch in batches
    )
    if not is_recorded:
        records.pop()
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert found.fastest == ["algorithm=gemm: fastest at 5 of 5 points"]


def last_words(found):
    return {job: text.split()[-1] for (job, _), text in found.ratios.items()}


def test_runs_differing_only_in_points_are_compared_per_point():
    sweep, records = models_and_batches([1.0, 3.0, 9.0], [0.8, 3.0, 13.5])
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert (found.title, found.notes) == ("device / model=a", [])
    assert last_words(found) == {3: "FASTER", 4: "SAME", 5: "SLOWER"}
    ratios = [float(text.split()[0]) for text in found.ratios.values()]
    assert ratios == pytest.approx([0.8, 1.0, 1.5], rel=0.01)
    assert found.fastest == [
        "model=a: nothing else is shown to be faster at 2 of 3 points",
        "model=b: fastest at 1 of 3 points",
    ]
    out = io.StringIO()
    Console(out=out, err=out, width=120).show_sweep(SweepAnalysis.of(sweep, records), None)
    for text in (out.getvalue(), descriptions.of_sweep(SweepAnalysis.of(sweep, records))):
        assert "device / model=a" in text
        assert "has no time" not in text
    assert descriptions.winner_tags(SweepAnalysis.of(sweep, records)) == {
        "perfexp.best": "b (batch 1) | a (batch 8, batch 64)",
        "perfexp.best_by": "device/p50_ms",
        "perfexp.best_ties": "b (batch 8)",
    }


@pytest.mark.parametrize("name", ["2", "3", "b", "model=b"])
def test_the_baseline_may_be_any_run_of_a_group(name):
    sweep, records = models_and_batches([1.0, 3.0], [0.8, 3.0])
    for one in records:
        one.plan["compare"] = {"baseline": name}
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert found.title == "device / model=b"
    assert last_words(found) == {0: "SLOWER", 1: "SAME"}


def test_a_sweep_over_points_alone_has_no_ratios():
    sweep, records = models_and_batches([1.0, 3.0, 9.0])
    assert (
        sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records)) == sweep_verdicts.SweepVerdicts()
    )
    assert descriptions.winner_tags(SweepAnalysis.of(sweep, records)) == {}


def test_point_with_failed_baseline_has_no_ratio():
    sweep, records = models_and_batches([1.0, 3.0, None], [0.8, 3.0, 9.0])
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert last_words(found) == {3: "FASTER", 4: "SAME"}
    assert found.notes == [
        "no device / model=a: the baseline has no time of the same phase, size and batch"
    ]
    found = sweep_verdicts.of_sweep(
        SweepAnalysis.of(*models_and_batches([1.0, 3.0, 9.0], [0.8, 3.0, None]))
    )
    assert (last_words(found), found.notes) == ({3: "FASTER", 4: "SAME"}, [])
    found = sweep_verdicts.of_sweep(
        SweepAnalysis.of(*models_and_batches([None, None], [0.8, 3.0], [1.0, 3.0]))
    )
    assert (found.title, last_words(found)) == ("device / model=b", {4: "SLOWER", 5: "SAME"})


def test_same_point_on_another_device_count_is_another_run():
    axes = [{"gpu.count": count, "batch_size": batch} for count in "12" for batch in "18"]
    sweep, records = grid(zip(axes, (1.0, 3.0, 0.8, 3.0), strict=True))
    assert [group.name for group in pairing.groups(SweepAnalysis.of(sweep, records).runs)] == [
        "gpu.count=1",
        "gpu.count=2",
    ]
    assert last_words(sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))) == {
        2: "FASTER",
        3: "SAME",
    }


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ([{"input_size": "32"}, {"input_size": "64"}], [""]),
        ([{"mode.train.batch_size": "4"}, {"mode.train.batch_size": "8"}], [""]),
        ([{"mode.inference.batch_size": "4"}, {"mode.inference.batch_size": "8"}], [""]),
        ([{"precision": "fp32"}, {"precision": "bf16"}], ["run 0", "run 1"]),
        ([{"processes": "3"}, {"processes": "5"}], ["run 0", "run 1"]),
        ([{}, {}], ["run 0", "run 1"]),  # two variants of `perfexp ab` that are alike
    ],
)
def test_only_axes_of_points_make_a_group(axes, names):
    children = [
        SweepChild(job=job, name="", directory="", status=Status.OK, axes=of_run)
        for job, of_run in enumerate(axes)
    ]
    assert [group.name for group in pairing.groups((child, None) for child in children)] == names


def test_an_axis_of_points_does_not_name_them_twice():
    _, [one] = grid(
        [
            (
                {
                    "mode": "train",
                    "mode.train.batch_size": "8",
                    "execution.threads": "1",
                    "cache": "flush",
                },
                1.0,
            )
        ]
    )
    assert Side.of("A", "run", [Analysis.of(one)]).features("mode") == {""}
    assert Side.of("A", "run", [Analysis.of(one)]).measurements[0].features.keys() - {
        *FEATURES
    } == {"cache"}


def test_runs_with_a_point_in_common_are_no_group():
    sweep, records = grid([({"mode": "inference"}, 1.0), ({"mode": "train_inference"}, 0.8)])
    found = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert (found.title, last_words(found)) == ("device / run 0", {1: "FASTER"})
    assert (
        descriptions.winner_tags(SweepAnalysis.of(sweep, records))["perfexp.best"]
        == "train_inference"
    )


def test_console_and_store_show_them():
    sweep, records = swept([1.0, 1.0], [0.8, 1.2])
    out = io.StringIO()
    Console(out=out, err=out, width=80).show_sweep(SweepAnalysis.of(sweep, records), None)
    for text in (out.getvalue(), descriptions.of_sweep(SweepAnalysis.of(sweep, records))):
        assert "device / run 0" in text
        assert "▲ FASTER at 1, ▼ SLOWER at 1" in text
        assert "run 1: fastest at 1 of 2 points" in text


def test_a_sweep_without_ratios_has_no_such_column():
    titles = [
        column.title for column in sweep_summary.runs(SweepAnalysis.of(*swept([1.0], None))).columns
    ]
    assert not any("/ run" in title for title in titles)


def test_the_winner_in_the_store_follows_the_verdicts():
    sweep, records = swept([1.0], [0.8], [1.2], [0.8005])
    assert descriptions.winner_tags(SweepAnalysis.of(sweep, records)) == {
        "perfexp.best": "run1",
        "perfexp.best_by": "device/p50_ms",
        "perfexp.best_ties": "run3",
    }


def test_run_that_loses_by_latency_does_not_win_by_device_time():
    """The third run has no time of the device: by latency, it is faster than the one that is best by that."""
    sweep, records = swept([1.0], [0.4], [1.0])
    for one, factor in zip(records, (1.0, 1.0, 0.5), strict=True):
        for point in one.points:
            samples = [factor * 5 * sample for sample in point.series[0].samples]
            point.series.append(
                msgspec.structs.replace(point.series[0], name="latency", samples=samples)
            )
    # the samples of the second run carry the factor of its device time
    for point in records[1].points:
        point.series[1].samples = [sample / 0.4 for sample in point.series[1].samples]
    for point in records[2].points:
        del point.series[0]
    assert descriptions.winner_tags(SweepAnalysis.of(sweep, records)) == {
        "perfexp.best": "run2",
        "perfexp.best_by": "latency/p50_ms",
    }


def test_a_faster_looking_run_that_is_undecided_is_a_tie():
    sweep, records = swept([1.0], [0.9], [1.2])
    [point] = records[1].points = records[1].points[:1]
    point.series[0].samples = point.series[0].samples[
        :3
    ]  # one process of few calls has no interval
    verdicts = sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records))
    assert [text.split()[-1] for text in verdicts.ratios.values()] == ["UNDECIDED", "SLOWER"]
    assert descriptions.winner_tags(SweepAnalysis.of(sweep, records)) == {
        "perfexp.best": "run0",
        "perfexp.best_by": "device/p50_ms",
        "perfexp.best_ties": "run1",
    }


def test_a_sweep_of_which_nothing_is_decided_has_no_winner():
    sweep, records = swept([1.0], [0.5])
    for one in records:
        [point] = one.points = one.points[:1]
        point.series[0].samples = point.series[0].samples[:3]
    assert [
        text.split()[-1]
        for text in sweep_verdicts.of_sweep(SweepAnalysis.of(sweep, records)).ratios.values()
    ] == ["UNDECIDED"]
    assert descriptions.winner_tags(SweepAnalysis.of(sweep, records)) == {
        "perfexp.best_undecided": "run0; run1",
        "perfexp.best_by": "device/p50_ms",
    }


@pytest.mark.parametrize("runs", [(), ([1.0],), ([1.0], None)])
def test_a_sweep_without_verdicts_has_no_winner(runs):
    assert descriptions.winner_tags(SweepAnalysis.of(*swept(*runs))) == {}


def test_runs_of_different_batch_sizes_have_no_winner():
    sweep, records = swept([1.0], [0.8])
    for point in records[1].points:
        point.key = msgspec.structs.replace(point.key, batch_size=64)
    assert descriptions.winner_tags(SweepAnalysis.of(sweep, records)) == {}


def test_the_winner_of_each_point_is_named():
    tags = descriptions.winner_tags(SweepAnalysis.of(*swept([1.0, 1.0, 1.0], [0.8, 0.8, 1.2])))
    assert tags["perfexp.best"] == "run1 (32, 33) | run0 (34)"
    assert "perfexp.best_ties" not in tags
    tags = descriptions.winner_tags(SweepAnalysis.of(*swept([1.0, 1.0], [0.8, 0.7])))
    assert tags["perfexp.best"] == "run1"


def test_each_model_has_a_winner_of_its_own():
    sweep, records = swept([1.0], [0.8], [0.1], [0.2])
    for job, (child, one) in enumerate(zip(sweep.children, records, strict=True)):
        model, algorithm = "ab"[job // 2], "xy"[job % 2]
        child.axes = {"model": model, "algorithm": algorithm}
        one.sweep = msgspec.structs.replace(one.sweep, axes=child.axes)
        one.plan = {"model": {"name": model}, "algorithm": {"name": algorithm}}
    assert (
        descriptions.winner_tags(SweepAnalysis.of(sweep, records))["perfexp.best"]
        == "y (a) | x (b)"
    )


def test_axes_are_named_where_values_alone_would_not_tell():
    sweep, records = swept([1.0], [0.8])
    for child, one in zip(sweep.children, records, strict=True):
        child.axes = {"algorithm": one.name, "execution.threads": "1"}
        one.sweep = msgspec.structs.replace(one.sweep, axes=child.axes)
    assert (
        descriptions.winner_tags(SweepAnalysis.of(sweep, records))["perfexp.best"]
        == "algorithm=run1, execution.threads=1"
    )
