"""Look up a point in a corpus: its value is measured, interpolated or refused, with diagnostics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from perfexp.errors import UserError
from perfexp.plan.sparse import LEAST_ANCHORS, LEAST_MEASURED, Pair
from perfexp.prediction.corpus import Corpus, MeasuredCurve
from perfexp.prediction.identity import identity
from perfexp.prediction.predictions import (
    INTERPOLATED,
    MEASURED,
    NARROWER,
    OUTSIDE,
    REFUSED,
    Predicted,
    forecast,
)
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.layer_lines import name_of, pass_of, seconds_of
from perfexp.records.quantities import CLOSURE
from perfexp.records.record import Key, Record, timed_key
from perfexp.statistics.conformal import LEVEL
from perfexp.statistics.estimators import Interval, Samples
from perfexp.statistics.gaussian_process import leave_one_out
from perfexp.statistics.moderated import around

#: A stair is a jump in a curve, for example where another kernel begins. A point shows one if it is
#: this many standard deviations off the prediction from the other points.
_STAIR_DEVIATIONS = 3.0
#: A larger size shows a stair if it needs less than this share of a smaller size's memory.
_LESS = 0.99


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One quantity of one point.

    Attributes:
        predicted: value and source.
        curve: curve behind the value; None without a curve.
        diagnostics: reasons to distrust the value.
    """

    predicted: Predicted
    curve: MeasuredCurve | None
    diagnostics: tuple[Diagnostic, ...]


def look_up(
    key: Key, quantity: str, plan: Mapping[str, Any], corpus: Corpus, installed: Mapping[str, str]
) -> Answer:
    """Return a point's quantity from curves with the same settings.

    Model, algorithm, mode, precision, execution and data must agree. A measured value is preferred
    to an interpolated value, and a newer record to an older record. `perfexp predict` calls it for
    each point and quantity.

    Args:
        key: the point.
        quantity: one of `corpus.QUANTITIES`.
        plan: resolved plan. The device comes from the corpus instead.
        installed: versions on this machine, to compare with the records' versions.
    """
    pair = key.input_size, key.batch_size
    wanted_curve = quantity, key.phase, identity(plan, key.phase)
    matching = []
    for curve in corpus.curves:
        if (curve.quantity, curve.phase, curve.identity) == wanted_curve:
            matching.append(curve)
    answers = [(_predicted(pair, curve, matching, corpus), curve) for curve in matching]
    for source in (MEASURED, INTERPOLATED, REFUSED):
        for predicted, curve in answers:
            if predicted.source == source:
                doubts = [*outside(predicted, curve), *stale(curve, corpus.curves, installed)]
                if source == INTERPOLATED:
                    doubts += stairs(curve)
                else:
                    curve = replace(curve, folder=curve.folders.get(pair, curve.folder))
                return Answer(predicted=predicted, curve=curve, diagnostics=tuple(doubts))
    reason = (
        "no record of these settings of model, algorithm, mode, precision, execution and data has "
        "it"
    )
    nothing = Predicted(pair=pair, source=REFUSED, value=None, nearest=pair, reason=reason)
    return Answer(predicted=nothing, curve=None, diagnostics=())


@dataclass(frozen=True, kw_only=True)
class PredictedLayer:
    """Seconds of a layer's pass, for example of `layer1.0.conv1` and `forward`."""

    layer: str
    pass_type: str
    seconds: Interval


def layers_at(key: Key, record: Record) -> list[PredictedLayer]:
    """Return the layers of a point, predicted by those of a record's other sizes.

    Between two sizes the logarithm of a layer's time is a line over the logarithm of the pixels.
    The 90 % interval is the quantile of all layers' errors where an inner size is left out. Sizes
    with layers are predicted as well. `perfexp predict --layers` prints them.

    Raises:
        UserError: the record lacks layers at smaller and larger sizes.
    """
    tables = dict[int, dict[str, Mapping[str, Any]]]()
    for point in record.points:
        timed = timed_key(point.key)
        is_alike = (timed.phase, timed.batch_size) == (key.phase, key.batch_size)
        if is_alike and (lines := (point.facts.get("layers") or {}).get("lines")):
            tables[timed.pixels] = {str(line["key"]): line for line in lines if seconds_of(line)}
    pixels = sorted(tables)
    shared = sorted(set.intersection(*map(set, tables.values()))) if tables else []
    if len(pixels) < LEAST_ANCHORS or not shared or not pixels[0] <= key.pixels <= pixels[-1]:
        closures = (point.metric(CLOSURE) for point in record.points)
        reasons = (metric.reason for metric in closures if metric and metric.reason)
        advice = "Measure with sweep=sparse probes.layers=true."
        if reason := next(reasons, None):
            advice = f"A size has none: {reason}."
        raise UserError(
            f"{record.name} has layers at {len(pixels)} sizes of this batch; a prediction needs "
            f"{LEAST_ANCHORS} sizes around its own. {advice}"
        )
    times = [[seconds_of(tables[size][name]) for size in pixels] for name in shared]
    middle, half_width = rows_between(np.log(pixels), np.log(times), float(np.log(key.pixels)))
    layers = []
    for name, mean in zip(shared, middle, strict=True):
        low, value, high = np.exp([mean - half_width, mean, mean + half_width]).tolist()
        line = tables[pixels[0]][name]
        seconds = Interval(value=value, low=low, high=high)
        layers.append(PredictedLayer(layer=name_of(line), pass_type=pass_of(line), seconds=seconds))
    return layers


def rows_between(x: Samples, y: Samples, position: float) -> tuple[Samples, float]:
    """Return rows of values at a position on lines between their points.

    `layers_at` uses it for logarithms of times, `validation/prediction.py` to test it.

    Args:
        x: positions of the points, increasing, at least three.
        y: values, shape (rows, points).

    Returns:
        The values, shape (rows,), and the half-width of their 90 % intervals: the quantile of all
        rows' errors where an inner point is left out.
    """

    def on_line(first: int, last: int, at: float) -> Samples:
        share = (at - x[first]) / (x[last] - x[first])
        return np.asarray((1 - share) * y[:, first] + share * y[:, last])

    errors = [
        on_line(inner - 1, inner + 1, x[inner]) - y[:, inner] for inner in range(1, len(x) - 1)
    ]
    last = min(max(int(np.searchsorted(x, position)), 1), len(x) - 1)
    return on_line(last - 1, last, position), float(np.quantile(np.abs(errors), LEVEL))


def _predicted(
    pair: Pair, curve: MeasuredCurve, matching: Sequence[MeasuredCurve], corpus: Corpus
) -> Predicted:
    """Return a point's value by one curve.

    It is refused if the same work ran out of memory there on this device.

    Args:
        matching: all curves for the same work.
    """
    out_of_memory = set[Pair]()
    for other in matching:
        if other.about.device == curve.about.device:
            out_of_memory |= other.out_of_memory
    calibration = corpus.calibration(curve)
    [point] = forecast(curve, [pair], calibration, out_of_memory=out_of_memory).points
    if point.value is None:
        return point
    own, stated = curve.values[point.nearest], curve.stated.get(point.nearest)
    return replace(point, value=_for_other_runs(point.value, own, stated))


def _for_other_runs(value: Interval, own: Interval, stated: Interval | None) -> Interval:
    """Widen a 90 % interval, which holds for the curve's run, by what varies between runs.

    Args:
        own: nearest measured value with its 95 % interval for the run.
        stated: the same with the record's interval.
    """
    half, of_run, of_runs = map(_half_width, (value, own, stated or own))
    if half is None or of_run is None or of_runs is None:
        return value
    between_runs = NARROWER * math.sqrt(max(0.0, of_runs**2 - of_run**2))
    return around(value.value, math.hypot(half, between_runs))


def _half_width(value: Interval) -> float | None:
    """Return an interval's half-width as a difference of logarithms; None without an interval."""
    return None if value.high is None else math.log(value.high / value.value)


def outside(predicted: Predicted, curve: MeasuredCurve) -> list[Diagnostic]:
    """Return a warning if a point is outside its curve's measured range; otherwise nothing.

    `lookup` adds it to the answer's doubts.
    """
    if predicted.reason != OUTSIDE:
        return []
    range_text, count = _range_text(curve), len(curve.values)
    why = (
        f"{pair_text(predicted.pair)} is outside the {count} measured points, {range_text}: "
        "no time and no energy"
    )
    return [diagnostics.make("corpus_unfit", why=why)]


def stale(
    curve: MeasuredCurve, corpus: Sequence[MeasuredCurve], installed: Mapping[str, str]
) -> list[Diagnostic]:
    """Return a warning if software or device have changed since the record; otherwise nothing.

    The reference is this machine if its versions are known, otherwise the device's newest record.
    """
    newest = next((other for other in corpus if other.about.device == curve.about.device), curve)
    now, changes = {**newest.conditions, **installed}, []
    for name, value in curve.conditions.items():
        if now.get(name, value) != value:
            changes.append(f"{name} {value}, now {now[name]}")
    if not changes:
        return []
    why = f"those in {curve.folder} are of another state: {'; '.join(changes)}"
    return [diagnostics.make("corpus_unfit", why=why)]


def stairs(curve: MeasuredCurve) -> list[Diagnostic]:
    """Return a note if neighboring points are far from a smooth curve; otherwise nothing.

    Other kernels may run there.
    """
    # by batch size first, so that neighbors have the same batch size
    pairs = sorted(curve.values, key=lambda pair: (pair[1], pair[0][0] * pair[0][1]))
    if len(pairs) < LEAST_MEASURED + 1:
        return []
    scores = leave_one_out(curve.curve())
    problem = ""
    if scores.size and np.max(scores) > _STAIR_DEVIATIONS:
        problem = "a point is far off"
    more = {"memory": "needs more memory", "energy": "needs more energy"}
    words = more.get(curve.quantity, "takes longer")
    for smaller, larger in pairwise(pairs):
        if smaller[1] == larger[1] and _falls(curve, smaller, larger):
            problem = f"{pair_text(smaller)} {words} than {pair_text(larger)}"
            break
    if not problem:
        return []
    return [diagnostics.make("stairs", curve=curve.name, where=problem)]


def _falls(curve: MeasuredCurve, smaller: Pair, larger: Pair) -> bool:
    """Return whether a larger size has a clearly smaller value than a smaller size."""
    before, after = curve.values[smaller], curve.values[larger]
    if curve.quantity == "memory":  # counted, without an interval
        return (
            larger[0][0] * larger[0][1] > smaller[0][0] * smaller[0][1]
            and after.value < _LESS * before.value
        )
    return before.low is not None and after.high is not None and after.high < before.low


def pair_text(pair: Pair) -> str:
    """Return a size and a batch size in words, for example `224 · batch 8`.

    Messages about points use it.
    """
    (height, width), batch = pair
    return f"{height if height == width else f'{height}x{width}'} · batch {batch}"


def _range_text(curve: MeasuredCurve) -> str:
    """Return the smallest and the largest measured point in words."""
    pairs = sorted(curve.values, key=lambda pair: (pair[0][0] * pair[0][1], pair[1]))
    return f"{pair_text(pairs[0])} to {pair_text(pairs[-1])}"
