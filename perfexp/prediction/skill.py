"""Score predictions on measured values: errors, coverage and interval scores, beside baselines.

A baseline is a simple method, such as linear interpolation, that the Gaussian process has to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfexp.statistics import scaling, selection
from perfexp.statistics.conformal import LEVEL, NORMAL_FACTOR, Calibration
from perfexp.statistics.estimators import Samples
from perfexp.statistics.gaussian_process import Curve, predict

#: Name of the Gaussian process among the methods.
GAUSSIAN_PROCESS = "gaussian process"

#: Predicts log values at other amounts of work, from measured points' log work and log values.
_Method = Callable[[Samples, Samples, Samples], Samples]


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

        `skill_table` scores predictions from these points.

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
