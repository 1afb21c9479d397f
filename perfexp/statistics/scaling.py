"""Scaling: how times grow with the size of their inputs: a law with a constant and a power, and what is far from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from perfexp.statistics.distributions import student95
from perfexp.statistics.estimators import MAD_TO_SIGMA, Interval, Samples

#: Exponents that a fit over sizes may have, and the steps in which they are tried: at first, then at the end.
_EXPONENT_MOST, _EXPONENT_STEP, _EXPONENT_FINE = 3.0, 0.05, 0.005
#: Sizes that a fit over them needs, and those that it needs to tell the two laws apart and to doubt a point.
LEAST_SIZES, SIZES_TO_JUDGE = 4, 6
#: The powers in which a constant and a growing part are added: 1 for one after the other, 4 for side by side.
_ADDED, _OVERLAPPED = 1, 4
#: The second law is believed where it leaves less than this share of the first one's residuals.
_CLEARLY_BETTER = 0.7
#: … and where those of the first one are more than this share of the points' errors.
_GOOD_ENOUGH = 0.1
#: No time counts as more exact than this in a fit over sizes: the law itself is not.
_SIZE_ERROR_FLOOR = 0.01
#: A residual beyond so many robust standard deviations has no weight (Tukey's biweight, 95 % efficient).
_BIWEIGHT = 4.685
#: A point is far from a fit over sizes beyond so many robust standard deviations, but never below this fraction.
_FAR_SIGMAS, _FAR_FLOOR = 4.0, 0.15
#: A fitted curve that rises by less than this from the smallest size to the largest, or by 2σ, does not rise.
_FLAT = 0.05


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """How a time depends on the size of the input: a + b·xᶜ, or the larger of the two where they overlap.

    Attributes:
        a: the part that does not depend on the size, in the unit of the times.
        b: the part at x = 1, likewise.
        exponent: c with its 95 % interval; None where the time does not rise with the size.
        overlapped: whether the law is (a⁴ + (b·xᶜ)⁴)^¼, the larger of the two with a rounded corner, not the sum.
        deviations: of each point from the law, as a fraction of the law's value.
        tolerance: how far a point may deviate; infinite where there are too few sizes to say.
        far: indices of the points that deviate more, by more than their own error.
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
        """The law's value.

        Args:
            x: a size, in the unit of the fit, > 0.
        """
        power, c = _OVERLAPPED if self.overlapped else _ADDED, self.exponent.value if self.exponent else 0.0
        return float((self.a**power + (self.b * x**c) ** power) ** (1 / power))


def fit_scaling(sizes: ArrayLike, times: ArrayLike, errors: ArrayLike) -> ScalingFit:
    """Fit time ≈ a + b·xᶜ with a, b ≥ 0 and 0 ≤ c ≤ 3, or the larger of a and b·xᶜ where that is clearly better.

    Curves have steps (another kernel, another tile) and outliers, so residuals are relative and the fit is robust: for
    each c of a grid, (a, b) in closed form with weights that make the sum of absolute residuals least; then one pass of
    least squares, weighted by each point's error, the scatter of all, and Tukey's biweight. The scale is Hill and
    Holland's ("Two robust alternatives to least-squares regression", 1977): the median of the n - 2 largest absolute
    residuals, because three parameters make the smallest ones zero. The interval of c is the profile's: where the
    weighted squares exceed their least value by no more than t²/(degrees of freedom) of it.

    Args:
        sizes: shape (n,), > 0, at least 4 different ones; b is the time at x = 1 of their unit.
        times: shape (n,), > 0.
        errors: shape (n,), relative half-widths of the times' intervals; at least 1 % is taken.

    Raises:
        ValueError: there are fewer than 4 different sizes.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(times, dtype=np.float64)
    error = np.maximum(np.asarray(errors, dtype=np.float64), _SIZE_ERROR_FLOOR)
    different = np.unique(x).size
    if different < LEAST_SIZES:
        raise ValueError(f"{different} sizes are too few for a fit")
    judge = different >= SIZES_TO_JUDGE
    power, weights = _choose_law(x, y, error, judge=judge)
    a, b, found, fitted = _least_squares(x, y, weights, power, parameters=4 if judge else 3)
    exponent: Interval | None = found
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


def _choose_law(x: Samples, y: Samples, error: Samples, *, judge: bool) -> tuple[int, Samples]:
    """The power in which the parts are added, and robust weights of the relative residuals, shape (n,)."""
    found = {power: _least_absolute(x, y, error, power) for power in (_ADDED, _OVERLAPPED)}
    added, overlapped = (float((np.abs(residuals) / error).mean()) for residuals in found.values())
    better = overlapped < _CLEARLY_BETTER * added and added > _GOOD_ENOUGH
    power = _OVERLAPPED if judge and better else _ADDED
    residuals = found[power]
    scale = _residual_scale(residuals)
    cut = _BIWEIGHT * max(scale, _SIZE_ERROR_FLOOR)
    # points scatter around a law by more than their own errors: the most exact one does not decide alone
    return power, np.clip(1 - (residuals / cut) ** 2, 0, 1) ** 2 / (error**2 + scale**2)


def _least_absolute(x: Samples, y: Samples, error: Samples, power: int) -> Samples:
    """Relative residuals, shape (n,), of the law whose sum of absolute ones, each over its error, is least."""
    grid = np.arange(0.0, _EXPONENT_MOST + _EXPONENT_STEP / 2, _EXPONENT_STEP)
    weights = np.broadcast_to(1 / error**2, (grid.size, x.size))
    for _ in range(20):
        fitted, _, _ = _laws(x, y, weights, grid, power)
        weights = 1 / (error * np.maximum(np.abs(fitted / y - 1), 1e-4 * error))
    residuals = fitted / y - 1
    best: Samples = residuals[np.argmin((np.abs(residuals) / error).sum(axis=1))]
    return best


def _laws(x: Samples, y: Samples, weights: Samples, exponents: Samples, power: int) -> tuple[Samples, Samples, Samples]:
    """The best a, b ≥ 0 for each exponent, by weighted least squares of the relative residuals.

    yᵖ = aᵖ + (b·xᶜ)ᵖ is linear in aᵖ and bᵖ for any power p; its relative residuals are about p times those of y.

    Args:
        x: shape (n,).
        y: shape (n,).
        weights: shape (m, n).
        exponents: shape (m,).
        power: p.

    Returns:
        The laws' values at x, shape (m, n), and a and b, shape (m,).
    """
    largest, level = x.max(), np.median(y)
    target = (y / level) ** power
    z = (x / largest) ** (power * exponents[:, None])
    w = weights / target**2
    ones, zs, zzs = w.sum(axis=1), (w * z).sum(axis=1), (w * z * z).sum(axis=1)
    targets, products = (w * target).sum(axis=1), (w * z * target).sum(axis=1)
    determinant = ones * zzs - zs * zs
    steep = determinant > 1e-12 * ones * zzs
    b = np.maximum(np.divide(ones * products - zs * targets, determinant, out=np.zeros_like(ones), where=steep), 0)
    a = (targets - b * zs) / ones
    b, a = np.where(a < 0, products / zzs, b), np.maximum(a, 0)
    fitted = level * (a[:, None] + b[:, None] * z) ** (1 / power)
    return fitted, level * a ** (1 / power), level * b ** (1 / power) / largest**exponents


def _least_squares(
    x: Samples, y: Samples, weights: Samples, power: int, *, parameters: int
) -> tuple[float, float, Interval, Samples]:
    """a, b, the exponent with its interval, and the law's values, shape (n,), of the least weighted squares.

    The interval holds the outermost exponents that the profile allows, and one step more on each side.

    Args:
        x: shape (n,).
        y: shape (n,).
        weights: of the relative residuals, shape (n,).
        power: in which the parts are added.
        parameters: so many degrees of freedom are used up; at least one is left.
    """
    grid = np.arange(0.0, _EXPONENT_MOST + _EXPONENT_FINE / 2, _EXPONENT_FINE)
    fitted, a, b = _laws(x, y, np.broadcast_to(weights, (grid.size, x.size)), grid, power)
    squares = (weights * (fitted / y - 1) ** 2).sum(axis=1)
    best = int(np.argmin(squares))
    degrees = max(float(weights.sum() / weights.max()) - parameters, 1.0)
    allowed = np.flatnonzero(squares <= squares[best] * (1 + student95(degrees) ** 2 / degrees))
    low, high = max(int(allowed[0]) - 1, 0), min(int(allowed[-1]) + 1, grid.size - 1)
    exponent = Interval(value=float(grid[best]), low=float(grid[low]), high=float(grid[high]))
    return float(a[best]), float(b[best]), exponent, fitted[best]


def _residual_scale(residuals: Samples) -> float:
    """Robust standard deviation of residuals that three parameters were fitted to."""
    return MAD_TO_SIGMA * float(np.median(np.sort(np.abs(residuals))[2:]))
