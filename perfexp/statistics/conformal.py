"""Calibration of prediction intervals by curves for other models and algorithms.

The unit of calibration is the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfexp.statistics.distributions import half_normal
from perfexp.statistics.estimators import Samples
from perfexp.statistics.gaussian_process import Curve, learn_prior, leave_one_out

#: Probability of every prediction interval, and its normal quantile.
LEVEL, NORMAL_FACTOR = 0.9, 1.645
#: Weight of the normal distribution relative to the curves, in curves.
_NORMAL_CURVES = 3
#: Number of equally likely values that represent a normal variable.
_NORMAL_VALUES = 19


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Calibration for a curve, based on other curves.

    Attributes:
        factor: interval half-width in standard deviations of the Gaussian process.
        prior: prior for the hyperparameters in `gaussian_process.predict`; None for a uniform
            prior.
        curves: number of curves behind both.
    """

    factor: float = NORMAL_FACTOR
    prior: Samples | None = None
    curves: int = 0


def calibrate(others: Sequence[Curve]) -> Calibration:
    """Calibrate by the leave-one-out errors in other curves, with equal weight for each curve.

    Points on the same curve share its roughness and disturbances. So points are not exchangeable
    between curves, but whole curves are. A normal distribution counts as three further curves.
    """
    if not others:
        return Calibration()
    prior = learn_prior(list(others))
    scores = [errors for curve in others if (errors := leave_one_out(curve, prior)).size]
    normal = np.array(
        [half_normal(number / (_NORMAL_VALUES + 1)) for number in range(1, _NORMAL_VALUES + 1)]
    )
    factor = _weighted_quantile([*scores, *[normal] * _NORMAL_CURVES], LEVEL)
    return Calibration(factor=factor, prior=prior, curves=len(scores))


def _weighted_quantile(groups: Sequence[Samples], level: float) -> float:
    """Return a quantile of the pooled values, with equal weight for each group."""
    values = np.concatenate(groups)
    weights = np.concatenate(
        [np.full(group.size, 1 / group.size / len(groups)) for group in groups]
    )
    order = np.argsort(values)
    place = np.searchsorted(np.cumsum(weights[order]), level)
    return float(values[order][min(int(place), values.size - 1)])
