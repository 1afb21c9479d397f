"""Score predictions on measured values: errors, coverage and interval scores, beside baselines.

`score` scores a single curve. `score_all` shows how well a corpus predicts itself, by method and by
curve.

A baseline is a simple method, such as linear interpolation, that the Gaussian process has to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from perfexp.plan.sparse import standard_error
from perfexp.prediction.corpus import MOST_CURVES, MeasuredCurve, calibrates, place_of
from perfexp.records import units
from perfexp.records.grid import Column, Grid
from perfexp.statistics import scaling, selection
from perfexp.statistics.conformal import LEVEL, NORMAL_FACTOR, Calibration, calibrate
from perfexp.statistics.estimators import Samples
from perfexp.statistics.gaussian_process import Curve, predict

#: Name of the Gaussian process among the methods.
GAUSSIAN_PROCESS = "gaussian process"

#: Predicts log values at other amounts of work, from measured points' log work and log values.
_Method = Callable[[Samples, Samples, Samples], Samples]
#: Points that a curve needs to be scored by leaving out each point in turn.
_LEAST_POINTS = 6
#: Limit on listed curves.
_MOST_LISTED = 20
#: Columns, with their names in `pooled`.
_COLUMNS = {
    "median error": "median_error",
    "p90": "p90_error",
    "coverage": "coverage",
    "half-width": "half_width",
    "worst curve": "worst_coverage",
}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Curve with many measured points.

    Attributes:
        name: name for tables.
        group: curves in the same group, such as curves for the same model, never calibrate each
            other.
        x: log pixels and log batch size, shape (n, 2).
        values: measured values, shape (n,), > 0.
        errors: relative standard errors, shape (n,).
    """

    name: str
    group: str
    x: Samples
    values: Samples
    errors: Samples

    @classmethod
    def of(cls, measured: MeasuredCurve) -> Self:
        """Return a measured curve as known truth."""
        values = measured.values.values()
        return cls(
            name=measured.name,
            group=measured.about.model,
            x=selection.coordinates(list(measured.values)),
            values=np.array([value.value for value in values]),
            errors=np.array(list(map(standard_error, values))),
        )

    def curve(self, chosen: Collection[int]) -> Curve:
        """Return the chosen points as a curve over the range of all points.

        Methods see only these points.
        """
        places = sorted(chosen)
        x = selection.scaled(self.x, self.x)
        spans = np.ptp(self.x, axis=0)
        return Curve(
            x=x[places], spans=spans, y=np.log(self.values[places]), errors=self.errors[places]
        )

    def campaign(self, measured: int, target: float) -> list[int]:
        """Return the indices of the points that a sparse sweep measures.

        `score_all` scores predictions from these points.

        Args:
            measured: largest number of points.
            target: relative half-width of 90 % intervals that suffices.
        """
        x = selection.scaled(self.x, self.x)
        chosen = selection.initial(x, min(selection.INITIAL, measured))
        while len(chosen) < measured:
            index = selection.following(x, [self.curve(chosen)], chosen, target=target)
            if index is None:
                break
            chosen.append(index)
        return sorted(chosen)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A method's predictions for a curve, compared with the truth.

    Attributes:
        errors: absolute relative errors, shape (m,).
        is_covered: whether the 90 % interval contains the truth, shape (m,).
        half_widths: relative half-widths of the intervals, shape (m,).
        interval_scores: interval scores on log values (Winkler), lower is better, shape (m,).
    """

    errors: Samples
    is_covered: NDArray[np.bool_]
    half_widths: Samples
    interval_scores: Samples


def score(truth: Truth, chosen: Collection[int], calibration: Calibration) -> dict[str, Score]:
    """Score the Gaussian process and each baseline on the points that are not chosen.

    Args:
        truth: all points.
        chosen: indices of points that the methods see.
        calibration: calibration by other curves.

    Returns:
        Scores by the name of the method.
    """
    seen, unseen = (
        np.array(sorted(chosen)),
        np.setdiff1d(np.arange(len(truth.values)), list(chosen)),
    )
    actual = np.log(truth.values[unseen])
    predicted = predict(
        truth.curve(chosen), selection.scaled(truth.x, truth.x)[unseen], calibration.prior
    )
    scores = {
        GAUSSIAN_PROCESS: _score(actual, predicted.mean, calibration.factor * predicted.deviation)
    }
    work, y = truth.x.sum(axis=1), np.log(truth.values)
    for name, method in BASELINES.items():
        mean = method(work[seen], y[seen], work[unseen])
        scores[name] = _score(
            actual, mean, np.full(unseen.size, _own_half_width(method, work[seen], y[seen]))
        )
    fit = partial(_scaling_model, errors=truth.errors[seen])
    mean, scatter = fit(work[seen], y[seen], work[unseen])
    scores["scaling model"] = _score(actual, mean, np.full(unseen.size, NORMAL_FACTOR * scatter))
    return scores


def pooled(scores: Sequence[Score]) -> Mapping[str, float]:
    """Return pooled figures for a method over several curves, by name.

    Errors are pooled over all points. Coverage and interval score are means over curves.
    """
    errors = np.concatenate([score.errors for score in scores])
    coverages = np.array([score.is_covered.mean() for score in scores])
    half_widths = np.concatenate([score.half_widths for score in scores])
    return {
        "median_error": float(np.median(errors)),
        "mean_error": float(errors.mean()),
        "p90_error": float(np.quantile(errors, 0.9)),
        "coverage": float(coverages.mean()),
        "worst_coverage": float(coverages.min()),
        "curves_above_75": float((coverages >= 0.75).mean()),
        "half_width": float(np.median(half_widths)),
        "interval_score": float(np.mean([score.interval_scores.mean() for score in scores])),
    }


def _score(actual: Samples, mean: Samples, half_width: Samples) -> Score:
    """Return the score of predictions.

    Args:
        actual: logarithms of the true values, shape (m,).
        mean: predicted logarithms, shape (m,).
        half_width: half-widths of the 90 % intervals of these, shape (m,).
    """
    off = np.abs(actual - mean)
    return Score(
        errors=np.abs(np.expm1(mean - actual)),
        is_covered=off <= half_width,
        half_widths=np.expm1(half_width),
        interval_scores=2 * half_width + 2 / (1 - LEVEL) * np.maximum(off - half_width, 0),
    )


def _nearest(work: Samples, log_values: Samples, targets: Samples) -> Samples:
    """Predict the value of the point with the nearest amount of work."""
    nearest: Samples = log_values[np.abs(work[:, None] - targets[None]).argmin(axis=0)]
    return nearest


def _linear(work: Samples, log_values: Samples, targets: Samples) -> Samples:
    """Predict by a line over pixels and batch size, by relative least squares.

    Predictions never fall below half the smallest value.
    """
    amount, values = np.exp(work - work.max()), np.exp(log_values)
    design = np.column_stack([np.ones_like(amount), amount]) / values[:, None]
    (level, slope), *_ = np.linalg.lstsq(design, np.ones_like(amount), rcond=None)
    line: Samples = np.log(
        np.maximum(level + slope * np.exp(targets - work.max()), values.min() / 2)
    )
    return line


def _interpolated(work: Samples, log_values: Samples, targets: Samples) -> Samples:
    """Predict by linear interpolation of the logarithm over log work."""
    order = np.argsort(work)
    return np.asarray(np.interp(targets, work[order], log_values[order]), dtype=np.float64)


def _scaling_model(
    work: Samples, log_values: Samples, targets: Samples, *, errors: Samples
) -> tuple[Samples, float]:
    """Return the scaling model's predictions at `targets` and their scatter, as logarithms.

    If there are too few sizes to fit the model, it predicts the median, and the scatter is the
    standard deviation.

    Args:
        work: log work (pixels × batch size) of the points to fit.
        targets: log work of the points to predict.
        errors: relative standard errors of the points to fit.
    """
    top = work.max()
    try:
        fit = scaling.fit_scaling(
            np.exp(work - top), np.exp(log_values), np.maximum(1.96 * errors, 1e-6)
        )
    except ValueError:
        return np.full_like(targets, np.median(log_values)), float(np.std(log_values))
    return np.log(
        [fit.at(float(np.exp(coordinate - top))) for coordinate in targets], dtype=np.float64
    ), fit.scatter


#: Methods with intervals from their own leave-one-out errors.
BASELINES: dict[str, _Method] = {
    "nearest": _nearest,
    "linear in pixels": _linear,
    "log interpolation": _interpolated,
}


def _own_half_width(method: _Method, work: Samples, log_values: Samples) -> float:
    """Return the half-width of a baseline's 90 % intervals, from its own leave-one-out errors.

    It is the conformal quantile of the errors at inner points, each predicted from the others.
    """
    inner = np.flatnonzero((work > work.min()) & (work < work.max()))
    off = [
        abs(
            log_values[left_out]
            - method(np.delete(work, left_out), np.delete(log_values, left_out), work[[left_out]])[
                0
            ]
        )
        for left_out in inner
    ] or [0.0]
    return float(np.quantile(off, min(1.0, LEVEL * (1 + 1 / len(off)))))


@dataclass(frozen=True, kw_only=True)
class SkillTable:
    """Scores for a quantity.

    Attributes:
        quantity: `time` or `energy`.
        curves: scored curves.
        scores: each curve's scores by method, in the same order.
    """

    quantity: str
    curves: Sequence[MeasuredCurve]
    scores: Sequence[Mapping[str, Score]]

    @property
    def title(self) -> str:
        """Return the quantity with the numbers of curves and points."""
        points = sum(len(methods[GAUSSIAN_PROCESS].errors) for methods in self.scores)
        curves = units.counted(len(self.curves), "curve")
        return f"{self.quantity}: {curves}, {points} points that no method had seen"

    def methods(self) -> Grid:
        """Return a table with a line for each method.

        `perfexp predict check` prints it.
        """
        columns = [Column("method", is_key=True, prose=True), *map(Column, _COLUMNS)]
        columns.append(Column("interval score", rank=1))
        cells = []
        process_score = pooled([scores[GAUSSIAN_PROCESS] for scores in self.scores])[
            "interval_score"
        ]
        for name in self.scores[0]:
            figures = pooled([scores[name] for scores in self.scores])
            ratio = f"{figures['interval_score'] / process_score:.2f}" if process_score else ""
            cells.append([name, *map(_percent, _figures(figures)), ratio])
        note = (
            "coverage of 90 % intervals; interval score relative to the Gaussian process, more is "
            "worse"
        )
        return Grid.of_cells(columns, cells, [note])

    def worst(self) -> Grid:
        """Return a table with a line for each curve, lowest coverage first.

        `perfexp predict check` prints it.
        """
        lines = []
        for curve, scores in zip(self.curves, self.scores, strict=True):
            lines.append((curve, pooled([scores[GAUSSIAN_PROCESS]])))
        lines.sort(key=lambda line: (line[1]["coverage"], -line[1]["p90_error"]))
        columns = [
            Column("curve", is_key=True, prose=True),
            Column("device", is_key=True, prose=True),
            *map(Column, list(_COLUMNS)[:-1]),
        ]
        cells = []
        for curve, figures in lines[:_MOST_LISTED]:
            device = curve.about.device or "unknown"
            cells.append([curve.name, device, *map(_percent, _figures(figures)[:-1])])
        Grid.of_cells(columns, cells)  # fills the columns
        if len({*columns[1].cells}) == 1:
            del columns[1]
        notes = []
        if unlisted := lines[_MOST_LISTED:]:
            notes.append(f"and {units.counted(len(unlisted), 'more curve')}")
        return Grid(columns, notes)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values.

        `perfexp predict check --json` prints them.
        """
        methods, curves = {}, []
        for name in self.scores[0]:
            methods[name] = dict(pooled([scores[name] for scores in self.scores]))
        for curve, scores in zip(self.curves, self.scores, strict=True):
            facts = {
                "name": curve.name,
                "device": curve.about.device,
                "kind": curve.kind,
                "folder": str(curve.folder),
            }
            curves.append({**facts, **pooled([scores[GAUSSIAN_PROCESS]])})
        return {"methods": methods, "curves": curves}


def score_all(curves: Sequence[MeasuredCurve], *, measured: int, dense: int) -> list[SkillTable]:
    """Score predictions within each curve; return a table for each measured quantity.

    Curves with many points are sampled like a sparse sweep. In shorter curves, each inner point is
    predicted from all other points. Curves without inner points are left out. `perfexp predict
    check` calls it.

    Args:
        curves: curves in a corpus.
        measured: number of points that a sparse sweep measures.
        dense: least number of points for which a curve is sampled; at least `measured` + 1.
    """
    groups: dict[str, list[_Sampled]] = {}
    for curve in curves:
        group = groups.setdefault(curve.quantity, [])
        if len(curve.values) >= _LEAST_POINTS:
            sampled = _Sampled.of(curve, measured, max(dense, measured + 1))
            if sampled.seen is not None or _inner(sampled.truth):
                group.append(sampled)
    tables = []
    for quantity, scored in groups.items():
        if scored:
            measured_curves = [sample.measured for sample in scored]
            tables.append(
                SkillTable(quantity=quantity, curves=measured_curves, scores=_scores(scored))
            )
    return tables


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """A curve as known truth, with the points that a sparse sweep would measure.

    Attributes:
        seen: indices of these points; None if each point is left out in turn.
    """

    measured: MeasuredCurve
    truth: Truth
    seen: Sequence[int] | None

    @classmethod
    def of(cls, curve: MeasuredCurve, measured: int, dense: int) -> _Sampled:
        """Return a curve with its points.

        A curve with fewer points than `dense` leaves out each in turn.
        """
        truth = Truth.of(curve)
        seen = truth.campaign(measured, 0.0) if len(curve.values) >= dense else None
        return cls(measured=curve, truth=truth, seen=seen)

    def curve(self) -> Curve:
        """Return the seen points."""
        if self.seen is None:
            return self.measured.curve()
        return self.truth.curve(self.seen)


def _scores(sampled: Sequence[_Sampled]) -> list[dict[str, Score]]:
    """Score each curve, calibrated by other curves' seen points as in a corpus."""
    calibrations: dict[tuple[str | None, ...], Calibration] = {}
    scores = []
    for sample in sampled:
        curve_place = place_of(sample.measured)
        if curve_place not in calibrations:
            others = []
            for other in sampled:
                if calibrates(other.measured, sample.measured):
                    others.append(other.curve())
            calibrations[curve_place] = calibrate(others[:MOST_CURVES])
        scores.append(_scored(sample.truth, sample.seen, calibrations[curve_place]))
    return scores


def _scored(truth: Truth, seen: Sequence[int] | None, calibration: Calibration) -> dict[str, Score]:
    """Score a curve at unseen points, or at each inner point from all other points."""
    if seen is not None:
        return score(truth, seen, calibration)
    parts: dict[str, list[Score]] = {}
    for left_out in _inner(truth):
        others = [index for index in range(len(truth.values)) if index != left_out]
        for name, curve_score in score(truth, others, calibration).items():
            parts.setdefault(name, []).append(curve_score)
    return {name: _joined(curve_score) for name, curve_score in parts.items()}


def _inner(truth: Truth) -> list[int]:
    """Return the indices of the points with more work than the least and less than the most."""
    work = truth.x.sum(axis=1)
    inner: list[int] = np.flatnonzero((work > work.min()) & (work < work.max())).tolist()
    return inner


def _joined(parts: Sequence[Score]) -> Score:
    """Return the scores of several predictions as one."""
    fields: dict[str, Any] = {}
    for name in ("errors", "is_covered", "half_widths", "interval_scores"):
        fields[name] = np.concatenate([getattr(part, name) for part in parts])
    return Score(**fields)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _figures(pooled_scores: Mapping[str, float]) -> list[float]:
    """Return a method's figures in the order of the columns."""
    return list(map(pooled_scores.__getitem__, _COLUMNS.values()))
