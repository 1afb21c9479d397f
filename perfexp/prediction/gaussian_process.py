"""Exact Gaussian process over the sizes of a few measured points, its hyperparameters averaged over a grid.

A value relative to a line over the batch size, in logarithms over those of pixels and batch size, is a plane, plus a
smooth part (Matérn 3/2), plus stairs. Stairs are of two kinds: choices of kernels that last for several sizes (a step
process, whose covariance is exponential), and choices that change from size to size (white). The white part belongs to
the curve, not to the measurement: predictions include it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from perfexp.statistics.estimators import Samples

#: Hyperparameters: standard deviation and length of the smooth part, standard deviations of the lasting and of the
#: white stairs. Deviations are relative; lengths are shares of the measured range.
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
#: Length over which a choice of kernels lasts, as a share of the measured range.
_STAIR_LENGTH = 0.3
#: Prior variances of level and slope of the plane: vague.
_LEVEL_VARIANCE, _SLOPE_VARIANCE = 100.0, 9.0
#: Constant parts of the line over the batch size that values are taken relative to: time while a device is not full.
#: They are relative to the part that grows, at the largest batch.
_FLOORS = np.geomspace(1e-3, 10, 41)
#: Least relative standard error of a measured value.
_LEAST_ERROR = 0.001
#: Grid points with less weight than this share of the largest are left out of predictions.
_NEGLIGIBLE = 1e-4
#: Points that are predicted together: more need much memory.
_CHUNK = 256
#: Weight of a uniform prior beside the curves from which a prior is learned, in curves; and steps of learning.
_UNIFORM_CURVES, _LEARNING_STEPS = 2, 5


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measured values over coordinates.

    Attributes:
        x: coordinates of the points as shares of the measured range, those of the size and,
            if it varies, of the batch size, shape (n, d).
        spans: logarithms of the ratios of the ends of the measured range, shape (d,).
        y: logarithms of the values, shape (n,).
        errors: relative standard errors of the values, shape (n,).
    """

    x: Samples
    spans: Samples
    y: Samples
    errors: Samples

    def without(self, index: int) -> Curve:
        """Return the curve without one of its points."""
        return replace(
            self,
            x=np.delete(self.x, index, 0),
            y=np.delete(self.y, index),
            errors=np.delete(self.errors, index),
        )

    def batch(self, at: Samples) -> Samples:
        """Return the batch sizes at coordinates of shape (m, d), relative to the largest of the range, shape (m,)."""
        shares: Samples = np.exp(((at - 1) * self.spans)[:, 1:].sum(axis=1))
        return shares


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Logarithms of predicted values and their standard deviations, shape (m,) each."""

    mean: Samples
    deviation: Samples


def predict(curve: Curve, at: Samples, prior: Samples | None = None) -> Prediction:
    """Predict the values that would be measured at other coordinates, with the typical error of a measurement.

    Args:
        curve: measured curve of at least two points.
        at: shape (m, d).
        prior: logarithms of weights of GRID, shape (len(GRID),); None for equal weights.
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
    """Return the errors of inner points, predicted from the others, in standard deviations, shape (m,)."""
    inner = np.flatnonzero(
        ((curve.x > curve.x.min(axis=0)) & (curve.x < curve.x.max(axis=0))).any(axis=1)
    )
    scores = []
    for index in map(int, inner if len(curve.y) > 3 else ()):
        one = predict(curve.without(index), curve.x[index : index + 1], prior)
        scores.append(abs(curve.y[index] - one.mean[0]) / one.deviation[0])
    return np.array(scores)


def learn_prior(curves: list[Curve]) -> Samples | None:
    """Learn the prior of the hyperparameters from curves of other models (empirical Bayes); None without curves.

    Each step makes the prior the mean of the curves' posteriors, and of a uniform one that counts as two curves.
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
    """Return the part of the values that does not grow with the batch size, relative to the rest at the largest."""
    around = curve.y - np.log(_FLOORS[:, None] + curve.batch(curve.x))
    known = np.column_stack([np.ones(len(curve.y)), curve.x[:, 0]])
    rest = around - around @ (known @ np.linalg.pinv(known))
    return float(_FLOORS[(rest**2).sum(axis=1).argmin()])


def _fit(curve: Curve, floor: float) -> tuple[Samples, Samples, Samples, float]:
    """Return log evidence, shape (g,), Cholesky factor, shape (g, n, n), weights, shape (g, n), and mean of the rest.

    The rest are the logarithms of the values over a line of the batch size.
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
    """Return the covariance of plane, smooth part and lasting stairs for each grid point, shape (g, n, m)."""
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
