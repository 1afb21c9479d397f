"""Gaussian process: predicts the time or energy at input and batch sizes that were not measured.

It is exact, over the few measured points of one model (a curve), and averaged over a grid of
hyperparameters. `perfexp predict` and sparse sweeps use it. A curve is modeled in two steps:

Values are first divided by a line over batch size, constant + growing part. Logarithms of pixels
and batch size are the coordinates, and the logarithm of the remaining value has three parts: a
plane, a smooth part (Matérn 3/2), and stairs.

Stairs are steps in time, because other sizes get other kernels. There are two kinds. Some kernel
choices last for several sizes (a step process with exponential covariance). Other kernel choices
change from size to size (white). White stairs belong to the curve, not to the measurement:
predictions include them.

Letters in shapes: n measured points, m predicted points, d coordinates (1 or 2), g hyperparameters
in GRID.

A curve with few points, such as energy, can borrow from a related curve, such as time. Both share a
part of their deviations from their own planes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from perfexp.statistics.estimators import Samples

#: Hyperparameters, shape (g, 4): standard deviation and length of the smooth part, then standard
#: deviations of lasting and white stairs. Deviations are relative; lengths are shares of the
#: measured range.
GRID = np.array(
    list(
        product(
            (0.01, 0.03, 0.1, 0.3),
            (0.16, 0.4, 1.0),
            (0.003, 0.01, 0.03, 0.1),
            (0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
        )
    )
)
#: Correlations between the deviations of a curve and of its related curve.
_SHARES = (0.0, 0.5, 0.8, 0.95, 0.99)
#: Length over which a kernel choice lasts, as a share of the measured range.
_STAIR_LENGTH = 0.3
#: Vague prior variances for the plane's level and slope.
_LEVEL_VARIANCE, _SLOPE_VARIANCE = 100.0, 9.0
#: Constant parts of the line over batch size, since time is constant while a device is not full.
#: They are relative to the growing part at the largest batch.
_FLOORS = np.geomspace(1e-3, 10, 41)
#: Smallest relative standard error of a measured value.
_LEAST_ERROR = 0.001
#: Predictions leave out grid points below this share of the largest weight.
_NEGLIGIBLE = 1e-4
#: Number of points predicted together: more would need much memory.
_CHUNK = 256
#: Weight of a uniform prior when learning a prior, in curves, and the number of learning steps.
_UNIFORM_CURVES, _LEARNING_STEPS = 2, 5


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One model's measured times or energies over coordinates.

    Attributes:
        x: point coordinates as shares of the measured range, shape (n, d): size and, if it varies,
            batch size.
        spans: log ratios between the ends of the measured range, shape (d,).
        y: log values, shape (n,).
        errors: relative standard errors of the values, shape (n,).
        related: curve over the same coordinates to borrow from; None for a curve that stands alone.
    """

    x: Samples
    spans: Samples
    y: Samples
    errors: Samples
    related: Curve | None = None

    @property
    def parts(self) -> list[Curve]:
        """Return the curve and its related curve, if any."""
        return [self] if self.related is None else [self, self.related]

    @property
    def stacked(self) -> tuple[Samples, NDArray[np.bool_]]:
        """Return the coordinates of all parts, and whether each point is of this curve."""
        x = np.concatenate([part.x for part in self.parts])
        return x, np.arange(len(x)) < len(self.y)

    def without(self, index: int) -> Curve:
        """Return the curve without the point at `index`, for `leave_one_out`."""
        return replace(
            self,
            x=np.delete(self.x, index, 0),
            y=np.delete(self.y, index),
            errors=np.delete(self.errors, index),
        )

    def batch(self, at: Samples) -> Samples:
        """Return batch sizes relative to the largest measured, shape (m,); 1 if it does not vary.

        Args:
            at: coordinates, shape (m, d).
        """
        shares: Samples = np.exp(((at - 1) * self.spans)[:, 1:].sum(axis=1))
        return shares


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted log values and their standard deviations, shape (m,) each."""

    mean: Samples
    deviation: Samples


def predict(curve: Curve, at: Samples, prior: Samples | None = None) -> Prediction:
    """Predict measured values at other coordinates, including a typical measurement error.

    The prediction is a mixture over GRID, each hyperparameter weighted by its posterior.

    Args:
        curve: measured curve with at least two points.
        at: coordinates, shape (m, d).
        prior: log weights for GRID, shape (g,); None for equal weights.
    """
    evidence, lower, alpha, level = _fit(curve)
    grid, floor, (x, is_own) = _grid(curve), _floor(curve), curve.stacked
    repeated = None if prior is None else np.tile(prior, len(grid) // len(GRID))
    # hyperparameters of negligible weight are left out, which saves most of the time
    weights = _posterior(evidence, repeated)
    chosen = np.flatnonzero(weights > _NEGLIGIBLE * weights.max())
    weights = weights[chosen] / weights[chosen].sum()
    error = max(float(np.median(curve.errors)), _LEAST_ERROR)
    parts = []
    for part in np.split(at, range(_CHUNK, len(at), _CHUNK)):
        cross = _covariance(x, part, grid[chosen], is_own[:, None])
        line = level + np.log(floor + curve.batch(part))
        means = line + np.einsum("gnm,gn->gm", cross, alpha[chosen])
        # variance before any measurement, minus what the measured points explain
        plane = _LEVEL_VARIANCE + _SLOPE_VARIANCE * (part**2).sum(axis=1)
        unexplained = (grid[chosen][:, [0, 2, 3]] ** 2).sum(axis=1)[:, None] + plane
        unexplained -= (np.linalg.solve(lower[chosen], cross) ** 2).sum(axis=1)
        mean = weights @ means
        variance = weights @ (np.maximum(unexplained, 0.0) + means**2) - mean**2
        parts.append((mean, np.sqrt(np.maximum(variance, 0.0) + error**2)))
    means, deviations = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Prediction(mean=means, deviation=deviations)


def leave_one_out(curve: Curve, prior: Samples | None = None) -> Samples:
    """Return the errors of predicting each inner point from all other points, for calibration.

    Points at the ends of the range are left out, because predicting them is extrapolation.

    Returns:
        absolute errors in predicted standard deviations, shape (inner points,); empty for up to
        three points.
    """
    is_inner = (curve.x > curve.x.min(axis=0)) & (curve.x < curve.x.max(axis=0))
    errors = []
    for index in map(int, np.flatnonzero(is_inner.any(axis=1)) if len(curve.y) > 3 else ()):
        predicted = predict(curve.without(index), curve.x[index : index + 1], prior)
        errors.append(abs(curve.y[index] - predicted.mean[0]) / predicted.deviation[0])
    return np.array(errors)


def learn_prior(curves: list[Curve]) -> Samples | None:
    """Learn a hyperparameter prior from other models' curves, by empirical Bayes.

    Each step sets the prior to a mean of the curves' posteriors and a uniform prior, which counts
    as two curves.

    Returns:
        log weights for GRID, shape (g,); None without curves.
    """
    if not curves:
        return None
    evidences = []
    for curve in curves:
        by_share = _fit(curve)[0].reshape(-1, len(GRID))
        evidences.append(np.logaddexp.reduce(by_share))
    uniform: Samples = np.full(len(GRID), 1 / len(GRID))
    prior = uniform
    for _ in range(_LEARNING_STEPS):
        posteriors = [_posterior(evidence, np.log(prior)) for evidence in evidences]
        prior = np.mean([*posteriors, *[uniform] * _UNIFORM_CURVES], axis=0)
    logarithms: Samples = np.log(prior)
    return logarithms


def _floor(curve: Curve) -> float:
    """Return the constant part of the line over batch size.

    It is relative to the growing part at the largest batch. From `_FLOORS` it takes the value with
    the smallest squared residuals after a fit by level and size.
    """
    without_line = curve.y - np.log(_FLOORS[:, None] + curve.batch(curve.x))
    level_and_size = np.column_stack([np.ones(len(curve.y)), curve.x[:, 0]])
    projection = level_and_size @ np.linalg.pinv(level_and_size)
    residuals = without_line - without_line @ projection
    return float(_FLOORS[(residuals**2).sum(axis=1).argmin()])


def _grid(curve: Curve) -> Samples:
    """Return the hyperparameters, with a share as fifth column: GRID once for each share."""
    shares = (0.0,) if curve.related is None else _SHARES
    return np.vstack([np.insert(GRID, 4, share, axis=1) for share in shares])


def _fit(curve: Curve) -> tuple[Samples, Samples, Samples, float]:
    """Fit the curve for each hyperparameter (Rasmussen and Williams, 2006, algorithm 2.1).

    The fitted values are the log values minus the log line over batch size.

    Returns:
        log evidence (g,), Cholesky factor of the covariance (g, n, n), weights of the measured
        points in a prediction (g, n), mean of the fitted values. Points of the related curve follow
        the curve's.
    """
    grid, (x, is_own) = _grid(curve), curve.stacked
    covariance = _covariance(x, x, grid, is_own[:, None] == is_own)
    errors = np.concatenate([part.errors for part in curve.parts])
    places = np.arange(len(errors))
    covariance[:, places, places] += np.maximum(errors, _LEAST_ERROR) ** 2 + grid[:, 3, None] ** 2
    lower = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    rests = [part.y - np.log(_floor(part) + part.batch(part.x)) for part in curve.parts]
    centered = np.concatenate([residual - residual.mean() for residual in rests])[:, None]
    whitened = np.linalg.solve(lower, np.broadcast_to(centered, (len(grid), len(errors), 1)))
    alpha = np.asarray(
        np.linalg.solve(np.swapaxes(lower, 1, 2), whitened)[..., 0], dtype=np.float64
    )
    log_root_determinant = np.log(np.diagonal(lower, axis1=1, axis2=2)).sum(axis=1)
    evidence: Samples = -0.5 * (whitened[..., 0] ** 2).sum(axis=1) - log_root_determinant
    return evidence, lower, alpha, float(rests[0].mean())


def _covariance(
    first: Samples, second: Samples, grid: Samples, is_same: NDArray[np.bool_]
) -> Samples:
    """Return the covariance of plane, smooth part and lasting stairs, shape (g, n, m).

    Args:
        first: coordinates, shape (n, d).
        second: coordinates, shape (m, d).
        is_same: whether two points are of the same curve. Otherwise they have no common plane, but
            a share of the rest, and of white stairs at equal coordinates.
    """
    distance = np.sqrt(((first[:, None] - second[None]) ** 2).sum(axis=-1))
    smooth, length, lasting, white, share = (grid[:, column, None, None] for column in range(5))
    ratio = np.sqrt(3) * distance / length
    covariance: Samples = smooth**2 * (1 + ratio) * np.exp(-ratio) + lasting**2 * np.exp(
        -distance / _STAIR_LENGTH
    )
    plane = _LEVEL_VARIANCE + _SLOPE_VARIANCE * (first @ second.T)
    shared = share * (covariance + white**2 * (distance == 0))
    return np.where(is_same, covariance + plane, shared)


def _posterior(evidence: Samples, prior: Samples | None) -> Samples:
    """Return the weights of the hyperparameters, shape (g,), which add up to 1.

    Args:
        evidence: log evidence, shape (g,).
        prior: log prior weights, shape (g,); None for equal weights.
    """
    logarithms = evidence if prior is None else evidence + prior
    weights: Samples = np.exp(logarithms - logarithms.max())
    weights /= weights.sum()
    return weights
