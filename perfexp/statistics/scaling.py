"""Scaling model: time as a constant plus a power term in input size, and points far from it.

A sweep's report fits it to each model's times over input sizes (`records/growth`): the exponent
shows how time grows, and a point far from the curve deserves a look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from perfexp.statistics.distributions import student95
from perfexp.statistics.estimators import MAD_TO_SIGMA, Interval, Samples

#: Largest exponent of a fit, and the steps in the coarse and the fine grid of exponents.
_EXPONENT_MOST, _EXPONENT_STEP, _EXPONENT_FINE = 3.0, 0.05, 0.005
#: Different sizes that a fit needs, and sizes that it needs to choose a model and to flag points.
LEAST_SIZES, SIZES_TO_JUDGE = 4, 6
#: Powers for adding the constant and the growing part: 1 if sequential, 4 if overlapped.
_ADDED, _OVERLAPPED = 1, 4
#: The second model is chosen if its residuals are below this share of the first model's.
_CLEARLY_BETTER = 0.7
#: The first model's residuals must also exceed this share of the points' errors: below, it is good
#: enough.
_GOOD_ENOUGH = 0.1
#: Smallest relative error of a time in a fit: the model itself is no more exact than this.
_SIZE_ERROR_FLOOR = 0.01
#: Robust standard deviations beyond which a residual has no weight (Tukey's biweight, 95 %
#: efficient).
_BIWEIGHT = 4.685
#: Robust standard deviations beyond which a point is far from a fit, and its smallest relative
#: distance.
_FAR_SIGMAS, _FAR_FLOOR = 4.0, 0.15
#: A fitted curve is flat if it rises by less than this fraction or by less than 2σ.
_FLAT = 0.05


@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """Scaling model of a time: a + b·xᶜ, or the larger of the two parts if they overlap.

    Attributes:
        a: constant part, in the unit of the times.
        b: growing part at x = 1, in the same unit.
        exponent: c with its 95 % interval; None if the time does not rise with size.
        overlapped: whether the model is (a⁴ + (b·xᶜ)⁴)^¼ instead of the sum. It follows the larger
            part, with a rounded corner.
        deviations: each point's deviation from the model, as a fraction of the model's value.
        tolerance: largest deviation that does not count as far; infinite with too few sizes.
        far: indices of points that deviate by more than the tolerance plus their own error.
        scatter: robust standard deviation over all points' deviations.
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
        """Return the modeled time at a size x > 0, in the unit of the fitted times."""
        power = _OVERLAPPED if self.overlapped else _ADDED
        exponent = self.exponent.value if self.exponent else 0.0
        return float((self.a**power + (self.b * x**exponent) ** power) ** (1 / power))


def fit_scaling(sizes: ArrayLike, times: ArrayLike, errors: ArrayLike) -> ScalingFit:
    """Fit time ≈ a + b·xᶜ with a, b ≥ 0 and 0 ≤ c ≤ 3, or the overlapped model if clearly better.

    The overlapped model is the larger of a and b·xᶜ. Measured curves have outliers, and steps where
    another kernel or tile is chosen, so residuals are relative and the fit is robust:

    1. For each c in a grid, (a, b) follows in closed form, with weights that minimize summed
       absolute residuals.
    2. A least-squares pass follows. Its weights combine each point's error, the overall scatter and
       Tukey's biweight.
    3. The scale is the median over the n - 2 largest absolute residuals, because three parameters
       make the others zero. Source: Hill and Holland, "Two robust alternatives to least-squares
       regression" (1977).
    4. The interval for c comes from the profile: weighted squares may exceed their minimum by a
       fraction t²/(degrees of freedom).

    Args:
        sizes: shape (n,), > 0, at least 4 different sizes; b is the time at size 1.
        times: shape (n,), > 0.
        errors: shape (n,), relative half-widths of the times' intervals; values below 1 % count as
            1 %.

    Raises:
        ValueError: there are fewer than 4 different sizes.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(times, dtype=np.float64)
    error = np.maximum(np.asarray(errors, dtype=np.float64), _SIZE_ERROR_FLOOR)
    different = np.unique(x).size
    if different < LEAST_SIZES:
        raise ValueError(f"{different} sizes are too few for a fit")
    can_judge = different >= SIZES_TO_JUDGE
    power, weights = _choose_model(x, y, error, can_choose=can_judge)
    exponent: Interval | None
    # choosing the model counts as a fourth parameter
    a, b, exponent, fitted = _least_squares(x, y, weights, power, parameters=4 if can_judge else 3)
    least_rise = max(_FLAT, 2 * _residual_scale(y / fitted - 1)) * float(fitted.min())
    if np.ptp(fitted) <= least_rise:  # flat
        a, b, exponent, fitted = float(np.median(y)), 0.0, None, np.full_like(y, np.median(y))
    deviations = y / fitted - 1
    scatter = _residual_scale(deviations)
    tolerance = max(_FAR_FLOOR, _FAR_SIGMAS * scatter) if can_judge else math.inf
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


def _choose_model(
    x: Samples, y: Samples, error: Samples, *, can_choose: bool
) -> tuple[int, Samples]:
    """Return the model's power (`_ADDED` or `_OVERLAPPED`) and weights for its least squares.

    Args:
        x: sizes, shape (n,).
        y: times, shape (n,).
        error: relative errors of the times, shape (n,).
        can_choose: whether there are enough sizes; if not, the power is `_ADDED`.

    Returns:
        the power, and weights for the relative residuals, shape (n,), 0 for outliers.
    """
    residuals_of = {power: _least_absolute(x, y, error, power) for power in (_ADDED, _OVERLAPPED)}
    added, overlapped = (
        float((np.abs(residuals) / error).mean()) for residuals in residuals_of.values()
    )
    is_better = overlapped < _CLEARLY_BETTER * added and added > _GOOD_ENOUGH
    power = _OVERLAPPED if can_choose and is_better else _ADDED
    residuals = residuals_of[power]
    scale = _residual_scale(residuals)
    cut = _BIWEIGHT * max(scale, _SIZE_ERROR_FLOOR)
    # add the scatter, because the most exact point must not decide alone
    return power, np.clip(1 - (residuals / cut) ** 2, 0, 1) ** 2 / (error**2 + scale**2)


def _least_absolute(x: Samples, y: Samples, error: Samples, power: int) -> Samples:
    """Return the relative residuals, shape (n,), from the least-absolute fit.

    The fit minimizes the sum of absolute residuals, divided by the points' errors. It is found by
    iteratively reweighted least squares for each exponent in the coarse grid. Arguments as for
    `_choose_model`.
    """
    grid = np.arange(0.0, _EXPONENT_MOST + _EXPONENT_STEP / 2, _EXPONENT_STEP)
    weights = np.broadcast_to(1 / error**2, (grid.size, x.size))
    for _ in range(20):  # a weight of 1 / |residual| turns squares into absolute values
        fitted, _, _ = _models(x, y, weights, grid, power)
        weights = 1 / (error * np.maximum(np.abs(fitted / y - 1), 1e-4 * error))
    residuals = fitted / y - 1
    best: Samples = residuals[np.argmin((np.abs(residuals) / error).sum(axis=1))]
    return best


def _models(
    x: Samples, y: Samples, weights: Samples, exponents: Samples, power: int
) -> tuple[Samples, Samples, Samples]:
    """Return the best a, b ≥ 0 for each exponent, by weighted least squares on relative residuals.

    For any power p, yᵖ = aᵖ + (b·xᶜ)ᵖ is linear in aᵖ and bᵖ. Its relative residuals are about p
    times the residuals in y.

    Args:
        x: sizes, shape (n,).
        y: times, shape (n,).
        weights: weights for each exponent and point, shape (m, n).
        exponents: exponents c to try, shape (m,).
        power: p.

    Returns:
        modeled values at x, shape (m, n), and a and b, shape (m,).
    """
    # sizes and times are scaled to about 1, so that no power overflows
    largest, level = x.max(), np.median(y)
    target = (y / level) ** power
    z = (x / largest) ** (power * exponents[:, None])
    w = weights / target**2
    # normal equations of target = a + b·z: weighted sums of 1, z, z², target and z·target
    ones, zs, zzs = w.sum(axis=1), (w * z).sum(axis=1), (w * z * z).sum(axis=1)
    targets, products = (w * target).sum(axis=1), (w * z * target).sum(axis=1)
    determinant = ones * zzs - zs * zs
    is_solvable = determinant > 1e-12 * ones * zzs  # not if z is the same for all points
    numerator = ones * products - zs * targets
    b = np.divide(numerator, determinant, out=np.zeros_like(ones), where=is_solvable)
    b = np.maximum(b, 0)
    a = (targets - b * zs) / ones
    # a must not be negative: b alone is fitted then
    b, a = np.where(a < 0, products / zzs, b), np.maximum(a, 0)
    fitted = level * (a[:, None] + b[:, None] * z) ** (1 / power)
    return fitted, level * a ** (1 / power), level * b ** (1 / power) / largest**exponents


def _least_squares(
    x: Samples, y: Samples, weights: Samples, power: int, *, parameters: int
) -> tuple[float, float, Interval, Samples]:
    """Return a, b, the exponent with its interval, and modeled values (n,) by least squares.

    The interval holds the outermost exponents that the profile allows, plus one step on each side.

    Args:
        x: sizes, shape (n,).
        y: times, shape (n,).
        weights: weights for the relative residuals, shape (n,).
        power: `_ADDED` or `_OVERLAPPED`.
        parameters: degrees of freedom used up by the fit; at least one remains.
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
    """Return the robust standard deviation of residuals after fitting three parameters.

    The two smallest residuals are left out: see step 3 of `fit_scaling`.
    """
    return MAD_TO_SIGMA * float(np.median(np.sort(np.abs(residuals))[2:]))
