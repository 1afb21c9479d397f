"""Conformal calibration of prediction intervals: how wide they must be to hold in 9 of 10 cases.

`gaussian_process` predicts the time at sizes that were not measured. Its intervals assume normal
errors. `calibrate` tries them on curves measured earlier (for other models and algorithms): each
inner point is predicted from the others, and the errors show by how much to widen the intervals.
Used by `perfexp predict` and its skill table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfexp.statistics.estimators import Samples
from perfexp.statistics.gaussian_process import Curve, learn_prior, leave_one_out

#: Probability of every prediction interval, and its normal quantile.
LEVEL, NORMAL_FACTOR = 0.9, 1.645
#: Weight of the normal distribution relative to the curves, in curves: few curves prove little.
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
    Without other curves the result assumes normal errors.
    """
    from scipy import special

    if not others:
        return Calibration()
    prior = learn_prior(list(others))
    scores = [errors for curve in others if (errors := leave_one_out(curve, prior)).size]
    probabilities = np.arange(1, _NORMAL_VALUES + 1) / (_NORMAL_VALUES + 1)
    normal = special.ndtri((1 + probabilities) / 2)  # quantiles of a normal variable's size
    factor = _weighted_quantile([*scores, *[normal] * _NORMAL_CURVES], LEVEL)
    return Calibration(factor=factor, prior=prior, curves=len(scores))


def _weighted_quantile(groups: Sequence[Samples], level: float) -> float:
    """Return the `level` quantile of the pooled values, with equal weight for each group.

    It is the smallest value such that the values up to it have that share of the total weight.
    """
    values = np.concatenate(groups)
    weights = np.concatenate(
        [np.full(group.size, 1 / group.size / len(groups)) for group in groups]
    )
    order = np.argsort(values)
    index = np.searchsorted(np.cumsum(weights[order]), level)
    return float(values[order][min(int(index), values.size - 1)])
