"""Predictions between measured sizes: a Gaussian process against closed formulas, its calibration, and its choices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfexp.errors import UserError
from perfexp.prediction import corpus, lookup, predictions, skill
from perfexp.prediction.corpus import MeasuredCurve, MeasuredDevice
from perfexp.prediction.skill import GAUSSIAN_PROCESS, Truth
from perfexp.records.analysis import Analysis
from perfexp.records.record import Key, Metric, Point, Status, layers_key
from perfexp.records.subject import Subject
from perfexp.statistics import gaussian_process, selection
from perfexp.statistics.conformal import NORMAL_FACTOR, Calibration, calibrate
from perfexp.statistics.estimators import Interval
from perfexp.statistics.gaussian_process import GRID, Curve, predict
from perfexp.statistics.prior import Prior


def truth(seed=0, *, noise=0.01, jump=None, group="model"):
    random, side = np.random.default_rng(seed), np.linspace(224, 512, 100).round()
    values = (0.3 + 0.7 * side**2 / 512**2) * np.exp(noise * random.standard_normal(100))
    if jump:
        values *= np.where(np.arange(100) >= 50, jump, 1.0)
    x = np.column_stack([2 * np.log(side), np.zeros(100)])
    return Truth(name=str(seed), group=group, x=x, values=values, errors=np.full(100, 0.001))


def test_prediction_at_one_grid_point_matches_the_textbook(monkeypatch):
    monkeypatch.setattr(gaussian_process, "GRID", GRID[100:101])
    smooth, length, lasting, white = GRID[100]
    random = np.random.default_rng(3)
    x, y, at = random.random((5, 1)), random.random(5), np.array([[0.4]])
    one = predict(Curve(x=x, spans=np.ones(1), y=y, errors=np.full(5, 0.02)), at)

    def kernel(a, b):
        distance = abs(a - b.T)
        matern = (1 + np.sqrt(3) * distance / length) * np.exp(-np.sqrt(3) * distance / length)
        return smooth**2 * matern + lasting**2 * np.exp(-distance / 0.3) + 100 + 9 * a @ b.T

    covariance = kernel(x, x) + np.eye(5) * (0.02**2 + white**2)
    gain = kernel(at, x) @ np.linalg.inv(covariance)
    assert one.mean == pytest.approx(y.mean() + gain @ (y - y.mean()))
    variance = kernel(at, at) + white**2 - gain @ kernel(x, at) + 0.02**2
    assert one.deviation == pytest.approx(np.sqrt(variance).ravel())


def test_prediction_intervals_cover_noise_stairs_and_changes():
    others = [truth(seed, group="other") for seed in range(100, 104)]
    calibration = calibrate([other.curve(other.campaign(12, 0.0)) for other in others])
    covered = []
    for seed in range(6):
        one = truth(seed, noise=0.005 * (1 + seed % 4), jump=1.3 if seed % 4 == 0 else None)
        covered.append(
            skill.score(one, one.campaign(12, 0.0), calibration)[GAUSSIAN_PROCESS].is_covered.mean()
        )
    assert 0.83 <= np.mean(covered) <= 0.97


def test_one_wild_curve_does_not_calibrate_the_others_alone():
    flat = Curve(
        x=np.linspace(0, 1, 8)[:, None], spans=np.ones(1), y=np.zeros(8), errors=np.full(8, 0.01)
    )
    curves = [flat] * 4
    assert calibrate([]).factor == NORMAL_FACTOR
    assert calibrate(curves).factor < 2
    assert calibrate(curves).curves == 4


def test_sparse_sweep_refines_least_certain_size_until_certain():
    smooth = truth(noise=0.001)
    x = selection.scaled(smooth.x, smooth.x)
    first = selection.initial(x)
    assert len(first) == 6
    assert {0, 99} <= set(first)
    assert len(smooth.campaign(12, 0.03)) < 10
    tight = smooth.campaign(12, 0.0001)
    assert len(tight) == 12
    assert set(first) < set(tight)
    assert len(truth(noise=0.05).campaign(12, 0.03)) == 12


def test_two_phases_are_measured_until_both_are_sure():
    quiet, loud = truth(noise=0.001), truth(noise=0.05)
    x = selection.scaled(quiet.x, quiet.x)
    first = selection.initial(x)
    curves = [quiet.curve(first), loud.curve(first)]
    assert selection.following(x, curves[:1], first, target=0.1) is None
    assert selection.following(x, curves, first, target=0.1) is not None
    assert selection.following(x, curves, range(100), target=0.03) is None


def test_initial_points_include_all_corners_of_sizes_and_batches():
    batches = selection.coordinates([((224, 224), 2**power) for power in range(8)])
    assert selection.initial(selection.scaled(batches, batches), 4) == [0, 2, 5, 7]
    both = selection.coordinates(
        [((side, side), batch) for side in (224, 320, 512) for batch in (1, 4, 16)]
    )
    assert {0, 2, 6, 8} <= set(selection.initial(selection.scaled(both, both)))
    one = selection.coordinates([((224, 224), 1)])
    assert selection.initial(selection.scaled(one, one)) == [0]


def test_a_time_that_bends_over_the_batch_size_is_predicted():
    """A time that is constant for small batches and in proportion to large ones."""
    batches = [2**power for power in range(8)]
    at = selection.coordinates([((224, 224), batch) for batch in batches])
    x, seconds = selection.scaled(at, at), 2.0 + 0.3 * np.array(batches)
    known = [0, 2, 5, 7]
    curve = Curve(
        x=x[known], spans=np.ptp(at, axis=0), y=np.log(seconds[known]), errors=np.full(4, 0.001)
    )
    predicted = predict(curve, x)
    assert np.abs(np.exp(predicted.mean) / seconds - 1).max() < 0.01


def test_bend_over_batch_size_is_predicted():
    random, sides = np.random.default_rng(1), np.linspace(128, 512, 9).round()
    pairs = [
        ((int(side), int(side)), int(batch))
        for side, batch in zip(sides, np.geomspace(128, 4, 9), strict=True)
    ]
    at = selection.coordinates([*pairs, ((512, 512), 128), ((128, 128), 4)])
    x, spans = selection.scaled(at, at), np.ptp(at, axis=0)
    pixels, batches = np.exp(at).T
    for constant in random.uniform(4, 40, 5):
        y = np.log(pixels * (constant + batches))
        known = np.arange(10)
        curve = Curve(x=x[known], spans=spans, y=y[known], errors=np.full(10, 0.001))
        assert abs(np.expm1(predict(curve, x[10:]).mean - y[10:])).max() < 0.02


def test_single_batch_runs_form_one_curve_newest_value_wins(make_record, tmp_path):
    batches, folder = (1, 2, 4, 8, 2), tmp_path / "runs"
    for number, batch in enumerate(batches):
        run = folder / str(number)
        run.mkdir(parents=True)
        ended = f"2026-01-0{number + 1}T00:00:00.000+00:00"
        record = make_record(uid=str(number), batches=(batch,), ended=ended)
        if number == len(batches) - 1:
            record.points[0].series[0].samples = [9.0] * 40
        (run / "record.json").write_bytes(record.to_json())
    [curve] = [curve for curve in corpus.find_curves([folder]) if curve.quantity == "time"]
    assert {batch for _, batch in curve.values} == {1, 2, 4, 8}
    assert curve.values[(224, 224), 2].value == 9.0
    assert curve.folder == folder / "4"
    assert {batch: path.name for (_, batch), path in curve.folders.items()} == {
        1: "0", 2: "4", 4: "2", 8: "3"
    }  # fmt: skip
    key = Key(phase="inference", input_size=(224, 224), batch_size=4, precision="fp32")
    answer = lookup.look_up(key, "time", record.plan, corpus.Corpus([curve]), {})
    assert (answer.predicted.source, answer.curve.folder) == ("measured", folder / "2")
    whole = folder / "whole"
    whole.mkdir()
    record = make_record(uid="9", batches=(1, 2, 4, 8), ended="2026-01-01T00:00:00.000+00:00")
    (whole / "record.json").write_bytes(record.to_json())
    of_time = [curve for curve in corpus.find_curves([folder]) if curve.quantity == "time"]
    assert [curve.folder.name for curve in of_time] == [
        "whole",
        "4",
    ]  # a whole curve comes first, though it is older


def test_layers_that_a_size_lacks_are_not_asked_for_again(make_record):
    record = make_record(sizes=(64,))
    key = record.points[0].key
    with pytest.raises(UserError, match="Measure with sweep=sparse"):
        lookup.layers_at(key, record)
    missing = Metric.of("layers/closure", None, reason="a call launches many kernels")
    record.points.append(Point(key=layers_key(key), status=Status.OK, metrics=[missing]))
    with pytest.raises(UserError, match="A size has none: a call launches many kernels"):
        lookup.layers_at(key, record)


def test_joined_curve_includes_a_run_that_only_ran_out_of_memory(make_record, tmp_path):
    for number, size in enumerate((64, 128, 224, 512, 256)):
        run = tmp_path / str(number)
        run.mkdir()
        failing = {512: Status.OOM} if size == 512 else {}
        (run / "record.json").write_bytes(
            make_record(uid=str(number), sizes=(size,), failing=failing).to_json()
        )
    [curve] = [curve for curve in corpus.find_curves([tmp_path]) if curve.quantity == "time"]
    assert (len(curve.values), curve.out_of_memory) == (4, {((512, 512), 1)})


def test_shuffled_values_give_no_skill_and_unseen_are_not_used():
    one = truth(noise=0.01)
    random = np.random.default_rng(0)
    nonsense = Truth(
        name="", group="", x=one.x, values=random.permutation(one.values), errors=one.errors
    )
    chosen = nonsense.campaign(12, 0.0)
    unseen = np.setdiff1d(np.arange(100), chosen)
    error = skill.score(nonsense, chosen, Calibration())[GAUSSIAN_PROCESS].errors.mean()
    guess = np.abs(np.median(nonsense.values[unseen]) / nonsense.values[unseen] - 1).mean()
    assert error > 0.9 * guess
    poisoned = nonsense.values.copy()
    poisoned[unseen] *= 10
    other = Truth(name="", group="", x=one.x, values=poisoned, errors=one.errors)
    at = selection.scaled(one.x, one.x)
    assert (predict(other.curve(chosen), at).mean == predict(nonsense.curve(chosen), at).mean).all()


def test_baselines_recover_the_curves_that_they_are_made_for():
    side = np.linspace(224, 512, 30)
    x = np.column_stack([2 * np.log(side), np.zeros(30)])
    line = Truth(name="", group="", x=x, values=0.2 + (side / 512) ** 2, errors=np.full(30, 0.001))
    scores = skill.score(line, range(0, 30, 3), Calibration())
    assert scores["linear in pixels"].errors.max() < 1e-9
    assert scores["scaling model"].errors.max() < 0.01
    assert scores["nearest"].errors.mean() > scores["log interpolation"].errors.mean() > 0.0
    assert skill.pooled(list(scores.values()))["coverage"] > 0.5


def curve_over(values, *, quantity="time", spread=0.001):
    """A curve of a record by input size and batch size, each value known to ±0.1 %, or without an interval."""

    def interval(value):
        ends = (None, None) if spread is None else ((1 - spread) * value, (1 + spread) * value)
        return Interval(value=value, low=ends[0], high=ends[1])

    about = Subject(
        model="resnet18",
        algorithm="default",
        mode="inference",
        precision="fp32",
        number_format="fp32",
        execution="eager",
        device=None,
    )
    return MeasuredCurve(
        folder=Path("run"),
        about=about,
        identity="",
        device=MeasuredDevice.of({}),
        phase="inference",
        quantity=quantity,
        kind="device",
        values={pair: interval(value) for pair, value in values.items()},
        out_of_memory=frozenset(),
        conditions={},
        ended="",
    )


@pytest.mark.parametrize(("falling", "is_stair"), [(None, False), (1, True), (4, True)])
def test_faster_larger_size_is_a_stair_at_each_batch_size(falling, is_stair):
    sizes, batches = range(128, 289, 32), (1, 2, 4)
    values = {
        ((size, size), batch): 1e-3 + 1e-7 * size**2 * batch for batch in batches for size in sizes
    }
    if falling:
        values[(224, 224), falling] = 0.95 * values[(192, 192), falling]
    found = [item.message for item in lookup.stairs(curve_over(values))]
    assert (
        any(
            f"192 · batch {falling} takes longer than 224 · batch {falling}" in text
            for text in found
        )
        is is_stair
    )
    assert is_stair or not found


def test_memory_that_falls_with_the_size_is_a_stair():
    pairs = [((size, size), 1) for size in range(128, 289, 32)]
    for values, is_stair in (
        ([100, 101, 60, 62, 64, 66], True),
        ([100, 101, 102, 104, 106, 108], False),
    ):
        counted = {pair: float(value) for pair, value in zip(pairs, values, strict=True)}
        found = [
            item.message
            for item in lookup.stairs(curve_over(counted, quantity="memory", spread=None))
        ]
        assert (
            any("160 · batch 1 needs more memory than 192 · batch 1" in text for text in found)
            is is_stair
        )


def test_a_curve_without_inner_points_is_not_scored():
    """Six points of the least or the most work: none is left to predict."""
    ends = {(size, 1): 1e-3 for size in ((64, 256), (128, 128), (256, 64))}
    ends |= {(size, 1): 2e-3 for size in ((64, 512), (128, 256), (256, 128))}
    inner = {((size, size), 1): 1e-3 + 1e-7 * size**2 for size in range(128, 321, 32)}
    assert skill.score_all([curve_over(ends)], measured=12, dense=20) == []
    [table] = skill.score_all([curve_over(ends), curve_over(inner)], measured=12, dense=20)
    assert [len(curve.values) for curve in table.curves] == [7]
    assert table.scores[0][GAUSSIAN_PROCESS].errors.size == 5


def test_energy_of_three_sizes_borrows_from_the_times():
    sides = [224, 256, 290, 324, 367, 400, 433, 474, 512]
    times = {((side, side), 1): 1e-8 * side**2 * (1.2 if side > 340 else 1.0) for side in sides}
    watts = {pair: 200 + 0.3 * pair[0][0] for pair in times}
    joules = {pair: times[pair] * watts[pair] for pair in times}
    ends = {pair: joules[pair] for pair in [((224, 224), 1), ((367, 367), 1), ((512, 512), 1)]}
    alone = curve_over(ends, quantity="energy")
    borrowing = replace(alone, times=curve_over(times))
    others = [pair for pair in joules if pair not in ends]
    made = predictions.forecast(borrowing, others, Calibration())
    assert {point.source for point in made.points} == {predictions.INTERPOLATED}
    errors = [abs(point.value.value / joules[point.pair] - 1) for point in made.points]
    assert max(errors) < 0.04  # the step of 20 % is only in the times
    held = [point.value.low < joules[point.pair] < point.value.high for point in made.points]
    assert all(held)
    assert made.corpus != predictions.forecast(alone, others, Calibration()).corpus
    refused = predictions.forecast(alone, others, Calibration())
    assert {point.source for point in refused.points} == {predictions.REFUSED}


def test_related_curve_without_few_points_is_not_borrowed():
    dense = {((side, side), 1): 1e-8 * side**2 for side in range(224, 512, 16)}
    times = curve_over({**dense, ((512, 512), 1): 1.0})
    assert not replace(curve_over(dense, quantity="energy"), times=times).borrows


def test_looked_up_intervals_are_those_of_the_record(make_record, tmp_path):
    record = make_record(sizes=(224, 256, 288, 320))
    record.priors = {"host-bound": Prior(variance=0.01, degrees=100.0)}
    (tmp_path / "record.json").write_bytes(record.to_json())
    [curve] = [curve for curve in corpus.find_curves([tmp_path]) if curve.quantity == "time"]
    halves = []
    for size in (256, 272):
        key = Key(phase="inference", input_size=(size, size), batch_size=1, precision="fp32")
        answer = lookup.look_up(key, "time", record.plan, corpus.Corpus([curve]), {})
        halves.append(np.log(answer.predicted.value.high / answer.predicted.value.value))
    shown = Analysis.of(record).rows[1].figures[curve.kind].interval
    stated, own = (np.log(each.high / each.value) for each in (shown, curve.values[(256, 256), 1]))
    assert stated > 3 * own
    assert halves[0] == pytest.approx(stated * NORMAL_FACTOR / 1.96, rel=0.01)
    assert halves[1] > 0.95 * halves[0]
