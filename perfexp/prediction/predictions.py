"""Predict all points in a sparse sweep, and write them to predicted.jsonl.

Predictions are never results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from perfexp.errors import UserError
from perfexp.plan.sparse import Pair, Sparse, exceeds_memory
from perfexp.prediction.corpus import QUANTITIES, Corpus, MeasuredCurve, digest
from perfexp.records.record import Key, Record
from perfexp.records.sizes import parse_batch_sizes, parse_sizes
from perfexp.statistics import selection
from perfexp.statistics.conformal import LEVEL, NORMAL_FACTOR, Calibration
from perfexp.statistics.estimators import Interval, Samples
from perfexp.statistics.gaussian_process import predict

#: Half-width of a 90 % interval over the half-width of a 95 % interval.
NARROWER = NORMAL_FACTOR / 1.96
#: Rounding tolerance at the ends of the measured range, as a share of the range.
_ROUNDING = 1e-9
#: Quantities that a sparse sweep predicts.
SPARSE = ("time", "energy")
MEASURED, INTERPOLATED, REFUSED = "measured", "interpolated", "refused"
#: Reason to refuse a point beyond the measured points.
OUTSIDE = "outside the measured range"


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Quantity at a point, measured or predicted.

    Attributes:
        pair: input size and batch size.
        source: `measured`, `interpolated` or `refused`.
        value: value with its 90 % interval; None if refused.
        nearest: input size and batch size of the nearest measured point.
        reason: reason for a refusal; None otherwise.
    """

    pair: Pair
    source: str
    value: Interval | None
    nearest: Pair
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predictions for all points on a measured curve.

    Attributes:
        curve: measured values.
        points: predictions for all points, in sweep order.
        calibration: interval calibration by other curves.
        corpus: SHA-256 of the curves behind calibration and predictions.
    """

    curve: MeasuredCurve
    points: tuple[Predicted, ...]
    calibration: Calibration
    corpus: str


def of_record(record: Record, curves: Sequence[MeasuredCurve], corpus: Corpus) -> list[Forecast]:
    """Predict the unmeasured points in a sparse sweep; empty for other records.

    A run with `sweep=sparse` calls it when its record is published.

    Args:
        curves: the record's own curves.
        corpus: curves from other runs, which calibrate the intervals.
    """
    forecasts = []
    for curve in curves:
        pairs = candidates(record.plan, curve.phase) if curve.quantity in SPARSE else []
        if pairs:
            calibration = corpus.calibration(curve)
            forecasts.append(
                forecast(curve, pairs, calibration, corpus.curves, curve.out_of_memory)
            )
    return forecasts


def candidates(plan: Mapping[str, Any], phase: str) -> list[Pair]:
    """Return all points for a phase in a plan with a sparse sweep; empty for other plans.

    The plan is read as data. They are those that were measured, and those to predict.
    """
    node, mode = plan.get("sweep"), plan.get("mode")
    phase_node = mode.get(phase) if isinstance(mode, Mapping) else None
    batch_sizes = phase_node.get("batch_size") if isinstance(phase_node, Mapping) else None
    if batch_sizes is None:
        batch_sizes = plan.get("batch_size")
    target = f"{Sparse.__module__}.{Sparse.__name__}"
    if not isinstance(node, Mapping) or node.get("_target_") != target:
        return []
    try:
        sweep = Sparse(**{name: value for name, value in node.items() if name != "_target_"})
        sizes = parse_sizes(plan.get("input_size"))
        return sweep.candidates(sizes, parse_batch_sizes(batch_sizes))
    except (UserError, TypeError):  # somebody else's record
        return []


def forecast(
    curve: MeasuredCurve,
    pairs: Sequence[Pair],
    calibration: Calibration,
    corpus: Iterable[MeasuredCurve] = (),
    out_of_memory: Collection[Pair] = (),
) -> Forecast:
    """Predict a curve at any points.

    Points are refused outside the curve's range, or if a smaller or equal point ran out of memory.
    `of_record` calls it for all points, `lookup` for a single one.

    Args:
        curve: measured values.
        pairs: points to predict.
        calibration: calibration of the intervals.
        corpus: curves behind the calibration, for its hash.
        out_of_memory: points that ran out of memory.
    """
    measured_pairs = list(curve.values)
    reference, at = selection.coordinates(measured_pairs), selection.coordinates(pairs)
    # as shares of the measured range, so that size and batch weigh alike in a distance
    measured, x = selection.scaled(reference, reference), selection.scaled(at, reference)
    values = _predicted(curve, x, calibration)
    points = []
    for pair, value, coordinates in zip(pairs, values, x, strict=True):
        nearest = measured_pairs[int(((measured - coordinates) ** 2).sum(axis=1).argmin())]
        reason = _refusal(curve, pair, coordinates)
        if exceeds_memory(pair, out_of_memory):
            reason = "a point of at most this size ran out of memory"
        if pair in curve.values:
            point = Predicted(
                pair=pair, source=MEASURED, value=_narrowed(curve.values[pair]), nearest=pair
            )
        elif reason is not None:
            point = Predicted(pair=pair, source=REFUSED, value=None, nearest=nearest, reason=reason)
        else:
            point = Predicted(pair=pair, source=INTERPOLATED, value=value, nearest=nearest)
        points.append(point)
    return Forecast(
        curve=curve,
        points=tuple(points),
        calibration=calibration,
        corpus=digest([curve, *filter(None, [curve.times]), *corpus]),
    )


def _predicted(
    curve: MeasuredCurve, x: Samples, calibration: Calibration
) -> Sequence[Interval | None]:
    """Return values with 90 % intervals at some coordinates.

    They are None if the curve is too short.

    Args:
        x: coordinates, shape (n, 2), as shares of the measured range.
    """
    if len(curve.values) < curve.least_points:
        return [None] * len(x)
    prediction = predict(curve.curve(), x, calibration.prior)
    half = calibration.factor * prediction.deviation
    return list(map(_interval, prediction.mean, half))


def _refusal(curve: MeasuredCurve, pair: Pair, x: Samples) -> str | None:
    """Return why a point is not predicted; None if it is predicted.

    Args:
        x: coordinates of the point, as shares of the measured range.
    """
    if len(curve.values) < curve.least_points:
        return f"{len(curve.values)} measured points; a prediction needs {curve.least_points}"
    (height, width), batch = pair
    batches, pixels = set(), set()
    for other, other_batch in curve.values:
        batches.add(other_batch)
        pixels.add(other[0] * other[1])
    is_batch = len(batches) > 1 or batch in batches
    is_size = len(pixels) > 1 or height * width in pixels
    is_inside = bool((x >= -_ROUNDING).all() and (x <= 1 + _ROUNDING).all())
    if is_batch and is_size and is_inside:
        return None
    return OUTSIDE


def _interval(mean: float, half_width: float) -> Interval:
    """Return a value and its interval from the mean and half-width of its logarithm."""
    low, value, high = np.exp([mean - half_width, mean, mean + half_width])
    return Interval(value=float(value), low=float(low), high=float(high))


def _narrowed(value: Interval) -> Interval:
    """Turn a 95 % interval into a 90 % interval."""
    if value.low is None or value.high is None:
        return value
    low = value.value + NARROWER * (value.low - value.value)
    high = value.value + NARROWER * (value.high - value.value)
    return Interval(value=value.value, low=low, high=high)


def summary(forecast: Forecast) -> str:
    """Return the number of predicted points and their uncertainty in a line.

    For example: `time: 88 of 100 points predicted, …`. A run with `sweep=sparse` prints it.
    """
    predicted = refused = 0
    widths = []
    for point in forecast.points:
        refused += point.source == REFUSED
        if point.source == INTERPOLATED and point.value:
            predicted += 1
            widths.append(point.value.relative_half_width)
    bounded = [width for width in widths if width is not None]
    curve = forecast.curve
    text = f"{curve.phase} {curve.quantity}: {predicted} of {len(forecast.points)} points predicted"
    if bounded:
        half = 100 * float(np.median(bounded))
        text += f" within ±{half:.1f} % (median of the 90 % intervals)"
    if refused:
        text += f", {refused} refused"
    return text


def to_lines(forecasts: Iterable[Forecast], precision: str) -> bytes:
    """Return the content of predicted.jsonl, a line for each point and quantity.

    No line can be read as a result. The report writes it beside the record.
    """
    lines = b""
    for forecast in forecasts:
        for point in forecast.points:
            (size, batch), (near_size, near_batch) = point.pair, point.nearest
            line = {
                "predicted": {
                    "phase": forecast.curve.phase,
                    "input_size": size,
                    "batch_size": batch,
                },
                "precision": precision,
                "quantity": forecast.curve.kind,
                "unit": QUANTITIES[forecast.curve.quantity],
                "source": point.source,
                "value": None,
                "low": None,
                "high": None,
                "level": LEVEL,
                "nearest": {"input_size": near_size, "batch_size": near_batch},
                "reason": point.reason,
                "calibration": {
                    "factor": forecast.calibration.factor,
                    "curves": forecast.calibration.curves,
                },
                "corpus_sha256": forecast.corpus,
            }
            if value := point.value:
                line |= {"value": value.value, "low": value.low, "high": value.high}
            lines += msgspec.json.encode(line) + b"\n"
    return lines


def key_of(pair: Pair, phase: str, precision: str) -> Key:
    """Return a predicted point's key.

    Plots and tables place predictions by it.
    """
    return Key(phase=phase, input_size=pair[0], batch_size=pair[1], precision=precision)
