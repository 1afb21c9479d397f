"""Gaussian process: exact, over the sizes of a few measured points, averaged over hyperparameters.

Values are first divided by a line over batch size. Logarithms of pixels and batch size are the
coordinates, and the logarithm of the remaining value has three parts: a plane, a smooth part
(Matérn 3/2), and stairs.

There are two kinds of stairs. Some kernel choices last for several sizes (a step process with
exponential covariance). Other kernel choices change from size to size (white). White stairs belong
to the curve, not to the measurement: predictions include them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from perfexp.statistics.estimators import Samples

#: Hyperparameters: standard deviation and length of the smooth part, then standard deviations of
#: lasting and white stairs. Deviations are relative; lengths are shares of the measured range.
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
    """Measured values over coordinates.

    Attributes:
        x: point coordinates as shares of the measured range, shape (n, d): size and, if it varies,
            batch size.
        spans: log ratios between the ends of the measured range, shape (d,).
        y: log values, shape (n,).
        errors: relative standard errors of the values, shape (n,).
    """

    x: Samples
    spans: Samples
    y: Samples
    errors: Samples

    def without(self, index: int) -> Curve:
        """Return the curve without the point at `index`."""
        return replace(
            self,
            x=np.delete(self.x, index, 0),
            y=np.delete(self.y, index),
            errors=np.delete(self.errors, index),
        )

    def batch(self, at: Samples) -> Samples:
        """Return batch sizes relative to the largest in the range, shape (m,).

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

    Args:
        curve: measured curve with at least two points.
        at: coordinates, shape (m, d).
        prior: log weights for GRID, shape (len(GRID),); None for equal weights.
    """
    floor = _floor(curve)
    evidence, lower, alpha, level = _fit(curve, floor)
    weights = _normalized(evidence, prior)
    chosen = np.flatnonzero(weights > _NEGLIGIBLE * weights.max())
    weights = weights[chosen] / weights[chosen].sum()
    error = max(float(np.median(curve.errors)), _LEAST_ERROR)
    parts = []
    for part in np.split(at, range(_CHUNK, len(at), _CHUNK)):
        cross = _covariance(curve.x, part)[chosen]
        means = (
            level
            + np.log(floor + curve.batch(part))
            + np.einsum("gnm,gn->gm", cross, alpha[chosen])
        )
        explained = (np.linalg.solve(lower[chosen], cross) ** 2).sum(axis=1)
        own = (GRID[chosen][:, [0, 2, 3]] ** 2).sum(axis=1)[:, None] + _plane(part)
        mean = weights @ means
        variance = weights @ (np.maximum(own - explained, 0.0) + means**2) - mean**2
        parts.append((mean, np.sqrt(np.maximum(variance, 0.0) + error**2)))
    means, deviations = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Prediction(mean=means, deviation=deviations)


def leave_one_out(curve: Curve, prior: Samples | None = None) -> Samples:
    """Return inner points' prediction errors in standard deviations, shape (m,).

    Each inner point is predicted from all other points.
    """
    inner = np.flatnonzero(
        ((curve.x > curve.x.min(axis=0)) & (curve.x < curve.x.max(axis=0))).any(axis=1)
    )
    scores = []
    for index in map(int, inner if len(curve.y) > 3 else ()):
        one = predict(curve.without(index), curve.x[index : index + 1], prior)
        scores.append(abs(curve.y[index] - one.mean[0]) / one.deviation[0])
    return np.array(scores)


def learn_prior(curves: list[Curve]) -> Samples | None:
    """Learn a hyperparameter prior from other models' curves, by empirical Bayes; None without.

    Each step sets the prior to a mean of the curves' posteriors and a uniform prior, which counts
    as two curves.
    """
    if not curves:
        return None
    evidences = [_fit(curve, _floor(curve))[0] for curve in curves]
    uniform: Samples = np.full(len(GRID), 1 / len(GRID))
    prior = uniform
    for _ in range(_LEARNING_STEPS):
        posteriors = [_normalized(evidence, np.log(prior)) for evidence in evidences]
        prior = np.mean([*posteriors, *[uniform] * _UNIFORM_CURVES], axis=0)
    logarithms: Samples = np.log(prior)
    return logarithms


def _floor(curve: Curve) -> float:
    """Return the part that is constant over batch size, relative to the rest at the largest."""
    around = curve.y - np.log(_FLOORS[:, None] + curve.batch(curve.x))
    known = np.column_stack([np.ones(len(curve.y)), curve.x[:, 0]])
    rest = around - around @ (known @ np.linalg.pinv(known))
    return float(_FLOORS[(rest**2).sum(axis=1).argmin()])


def _fit(curve: Curve, floor: float) -> tuple[Samples, Samples, Samples, float]:
    """Return the fit for each grid point, and the mean of the rest.

    The rest is the log values minus the log line over batch size.

    Returns:
        log evidence, shape (g,), Cholesky factor, shape (g, n, n), weights, shape (g, n), and the
        mean.
    """
    noise = np.maximum(curve.errors, _LEAST_ERROR) ** 2 + GRID[:, 3, None] ** 2
    covariance = _covariance(curve.x, curve.x)
    places = np.arange(len(curve.y))
    covariance[:, places, places] += noise
    lower = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    rest = curve.y - np.log(floor + curve.batch(curve.x))
    centered = np.broadcast_to((rest - rest.mean())[:, None], (len(GRID), len(rest), 1))
    whitened = np.linalg.solve(lower, centered)
    alpha = np.asarray(
        np.linalg.solve(np.swapaxes(lower, 1, 2), whitened)[..., 0], dtype=np.float64
    )
    evidence: Samples = -0.5 * (whitened[..., 0] ** 2).sum(axis=1) - np.log(
        np.diagonal(lower, axis1=1, axis2=2)
    ).sum(axis=1)
    return evidence, lower, alpha, float(rest.mean())


def _covariance(first: Samples, second: Samples) -> Samples:
    """Return the covariance of plane, smooth part and lasting stairs, shape (g, n, m)."""
    distance = np.sqrt(((first[:, None] - second[None]) ** 2).sum(axis=-1))
    smooth, length, lasting = (GRID[:, column, None, None] for column in range(3))
    ratio = np.sqrt(3) * distance / length
    covariance: Samples = smooth**2 * (1 + ratio) * np.exp(-ratio) + lasting**2 * np.exp(
        -distance / _STAIR_LENGTH
    )
    covariance += _LEVEL_VARIANCE + _SLOPE_VARIANCE * (first @ second.T)
    return covariance


def _plane(at: Samples) -> Samples:
    plane: Samples = _LEVEL_VARIANCE + _SLOPE_VARIANCE * (at**2).sum(axis=1)
    return plane


def _normalized(evidence: Samples, prior: Samples | None) -> Samples:
    logarithms = evidence if prior is None else evidence + prior
    weights: Samples = np.exp(logarithms - logarithms.max())
    weights /= weights.sum()
    return weights
