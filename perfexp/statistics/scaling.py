"""Scaling: a model of how times grow with input size, a constant and a power, and the points that are far from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from perfexp.statistics.distributions import student95
from perfexp.statistics.estimators import MAD_TO_SIGMA, Interval, Samples

#: Largest exponent of a fit, and the steps of the coarse and of the fine grid of exponents.
_EXPONENT_MOST, _EXPONENT_STEP, _EXPONENT_FINE = 3.0, 0.05, 0.005
#: Least number of sizes of a fit, and of one that distinguishes the two models and flags points.
LEAST_SIZES, SIZES_TO_JUDGE = 4, 6
#: Powers in which the constant and the growing part are added: 1 for one after the other, 4 for overlapped.
_ADDED, _OVERLAPPED = 1, 4
#: Share of the first model's residuals below which those of the second model have to be for it to be chosen.
_CLEARLY_BETTER = 0.7
#: Share of the points' errors above which the first model's residuals have to be for the second to be chosen.
_GOOD_ENOUGH = 0.1
#: Least relative error of a time in a fit: the model itself is not more exact.
_SIZE_ERROR_FLOOR = 0.01
#: Robust standard deviations beyond which a residual has no weight (Tukey's biweight, 95 % efficient).
_BIWEIGHT = 4.685
#: Robust standard deviations beyond which a point is far from a fit, and the least relative distance.
_FAR_SIGMAS, _FAR_FLOOR = 4.0, 0.15
#: Relative rise of a fitted curve, besides 2σ, below which it counts as flat.
_FLAT = 0.05


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """Scaling model of a time: a + b·xᶜ, or the larger of the two where they overlap.

    Attributes:
        a: constant part, in the unit of the times.
        b: growing part at x = 1, in the unit of the times.
        exponent: c with its 95 % interval; None where the time does not rise with the size.
        overlapped: whether the model is (a⁴ + (b·xᶜ)⁴)^¼, the larger part with a rounded corner, instead of the sum.
        deviations: deviation of each point from the model, as a fraction of the model's value.
        tolerance: largest deviation that is not far; infinite with too few sizes.
        far: indices of the points that deviate by more than the tolerance and their own error.
        scatter: robust standard deviation of the deviations.
    """

    a: float
    b: float
    exponent: Interval | None
    overlapped: bool
    deviations: tuple[float, ...]
    tolerance: float
    far: tuple[int, ...]
    scatter: float

    def at(self, x: float) -> float:
        """Return the model's time at a size x > 0, in the unit of the fit."""
        power, c = (
            _OVERLAPPED if self.overlapped else _ADDED,
            self.exponent.value if self.exponent else 0.0,
        )
        return float((self.a**power + (self.b * x**c) ** power) ** (1 / power))


def fit_scaling(sizes: ArrayLike, times: ArrayLike, errors: ArrayLike) -> ScalingFit:
    """Fit time ≈ a + b·xᶜ with a, b ≥ 0 and 0 ≤ c ≤ 3, or the larger of a and b·xᶜ where that is clearly better.

    Curves have steps (another kernel, another tile) and outliers, so residuals are relative and the fit is robust. For
    each c of a grid, (a, b) is found in closed form with weights that minimize the sum of absolute residuals. One pass
    of least squares follows, weighted by each point's error, the scatter of all, and Tukey's biweight. The scale is
    Hill and Holland's ("Two robust alternatives to least-squares regression", 1977): the median of the n - 2 largest
    absolute residuals, because three parameters make the smallest ones zero. The interval of c is the profile's: where
    the weighted squares exceed their least value by at most t²/(degrees of freedom) of it.

    Args:
        sizes: shape (n,), > 0, at least 4 different ones; b is the time at x = 1 of their unit.
        times: shape (n,), > 0.
        errors: shape (n,), relative half-widths of the times' intervals; smaller ones count as 1 %.

    Raises:
        ValueError: there are fewer than 4 different sizes.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(times, dtype=np.float64)
    error = np.maximum(np.asarray(errors, dtype=np.float64), _SIZE_ERROR_FLOOR)
    different = np.unique(x).size
    if different < LEAST_SIZES:
        raise ValueError(f"{different} sizes are too few for a fit")
    judge = different >= SIZES_TO_JUDGE
    power, weights = _choose_model(x, y, error, judge=judge)
    exponent: Interval | None
    a, b, exponent, fitted = _least_squares(x, y, weights, power, parameters=4 if judge else 3)
    if np.ptp(fitted) <= max(_FLAT, 2 * _residual_scale(y / fitted - 1)) * float(fitted.min()):
        a, b, exponent, fitted = float(np.median(y)), 0.0, None, np.full_like(y, np.median(y))
    deviations = y / fitted - 1
    scatter = _residual_scale(deviations)
    tolerance = max(_FAR_FLOOR, _FAR_SIGMAS * scatter) if judge else math.inf
    return ScalingFit(
        a=a,
        b=b,
        exponent=exponent,
        overlapped=power == _OVERLAPPED and exponent is not None,
        deviations=tuple(map(float, deviations)),
        tolerance=tolerance,
        far=tuple(map(int, np.flatnonzero(np.abs(deviations) > tolerance + error))),
        scatter=scatter,
    )


def _choose_model(x: Samples, y: Samples, error: Samples, *, judge: bool) -> tuple[int, Samples]:
    """Return the power in which the parts are added, and robust weights of the relative residuals, shape (n,)."""
    residuals_of = {power: _least_absolute(x, y, error, power) for power in (_ADDED, _OVERLAPPED)}
    added, overlapped = (
        float((np.abs(residuals) / error).mean()) for residuals in residuals_of.values()
    )
    better = overlapped < _CLEARLY_BETTER * added and added > _GOOD_ENOUGH
    power = _OVERLAPPED if judge and better else _ADDED
    residuals = residuals_of[power]
    scale = _residual_scale(residuals)
    cut = _BIWEIGHT * max(scale, _SIZE_ERROR_FLOOR)
    # with the scatter, because the most exact point must not decide alone
    return power, np.clip(1 - (residuals / cut) ** 2, 0, 1) ** 2 / (error**2 + scale**2)


def _least_absolute(x: Samples, y: Samples, error: Samples, power: int) -> Samples:
    """Return the relative residuals, shape (n,), of the model with the least sum of absolute ones over their errors."""
    grid = np.arange(0.0, _EXPONENT_MOST + _EXPONENT_STEP / 2, _EXPONENT_STEP)
    weights = np.broadcast_to(1 / error**2, (grid.size, x.size))
    for _ in range(20):
        fitted, _, _ = _models(x, y, weights, grid, power)
        weights = 1 / (error * np.maximum(np.abs(fitted / y - 1), 1e-4 * error))
    residuals = fitted / y - 1
    best: Samples = residuals[np.argmin((np.abs(residuals) / error).sum(axis=1))]
    return best


def _models(
    x: Samples, y: Samples, weights: Samples, exponents: Samples, power: int
) -> tuple[Samples, Samples, Samples]:
    """Return the best a, b ≥ 0 for each exponent, by weighted least squares of the relative residuals.

    yᵖ = aᵖ + (b·xᶜ)ᵖ is linear in aᵖ and bᵖ for any power p; its relative residuals are about p times those of y.

    Args:
        x: shape (n,).
        y: shape (n,).
        weights: shape (m, n).
        exponents: shape (m,).
        power: p.

    Returns:
        The models' values at x, shape (m, n), and a and b, shape (m,).
    """
    largest, level = x.max(), np.median(y)
    target = (y / level) ** power
    z = (x / largest) ** (power * exponents[:, None])
    w = weights / target**2
    ones, zs, zzs = w.sum(axis=1), (w * z).sum(axis=1), (w * z * z).sum(axis=1)
    targets, products = (w * target).sum(axis=1), (w * z * target).sum(axis=1)
    determinant = ones * zzs - zs * zs
    steep = determinant > 1e-12 * ones * zzs
    b = np.maximum(
        np.divide(
            ones * products - zs * targets, determinant, out=np.zeros_like(ones), where=steep
        ),
        0,
    )
    a = (targets - b * zs) / ones
    b, a = np.where(a < 0, products / zzs, b), np.maximum(a, 0)
    fitted = level * (a[:, None] + b[:, None] * z) ** (1 / power)
    return fitted, level * a ** (1 / power), level * b ** (1 / power) / largest**exponents


def _least_squares(
    x: Samples, y: Samples, weights: Samples, power: int, *, parameters: int
) -> tuple[float, float, Interval, Samples]:
    """Return a, b, the exponent with its interval, and the model's values, shape (n,), of least weighted squares.

    The interval holds the outermost exponents that the profile allows, and one step more on each side.

    Args:
        x: shape (n,).
        y: shape (n,).
        weights: weights of the relative residuals, shape (n,).
        power: power in which the parts are added.
        parameters: degrees of freedom that are used up; at least one is left.
    """
    grid = np.arange(0.0, _EXPONENT_MOST + _EXPONENT_FINE / 2, _EXPONENT_FINE)
    fitted, a, b = _models(x, y, np.broadcast_to(weights, (grid.size, x.size)), grid, power)
    squares = (weights * (fitted / y - 1) ** 2).sum(axis=1)
    best = int(np.argmin(squares))
    degrees = max(float(weights.sum() / weights.max()) - parameters, 1.0)
    allowed = np.flatnonzero(squares <= squares[best] * (1 + student95(degrees) ** 2 / degrees))
    low, high = max(int(allowed[0]) - 1, 0), min(int(allowed[-1]) + 1, grid.size - 1)
    exponent = Interval(value=float(grid[best]), low=float(grid[low]), high=float(grid[high]))
    return float(a[best]), float(b[best]), exponent, fitted[best]


def _residual_scale(residuals: Samples) -> float:
    """Return the robust standard deviation of residuals that three parameters were fitted to."""
    return MAD_TO_SIGMA * float(np.median(np.sort(np.abs(residuals))[2:]))
