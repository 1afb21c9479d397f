"""Steady state: the mean time of a step in the part of a log where it is steady."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from perfexp.speed.lines import Step
from perfexp.statistics import estimators

#: Lines that the rule needs to find the end of the warm-up.
_LEAST_WINDOWS = 4
#: Samples per mean of MSER-5.
_BATCH = 5
#: Longest plausible time of a step.
_LONGEST_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Steady part of a log.

    Attributes:
        seconds: mean time of a step; None if no line is left.
        windows: lines that it is the mean of.
        skipped: lines skipped before them.
        interrupted: lines left out because they time more than steps.
    """

    seconds: float | None
    windows: int
    skipped: int
    interrupted: int


def steady(steps: Sequence[Step], interrupted: Collection[int] = (), skip: int | None = None) -> Steady:
    """Skip lines until steps are steady, and return the mean of the others.

    Lines without a time are left out, and those that time more than steps if there are others. The cut is that of MSER
    (`estimators.mser5_cut`) on lines instead of on means of five samples, because a line is a mean itself. Of fewer
    than four lines the first is skipped, which holds the warm-up, if there is another.

    Args:
        steps: lines of a training about its steps.
        interrupted: indices of those that time more than steps.
        skip: first lines to skip instead of finding the cut.
    """
    timed = [index for index, step in enumerate(steps) if 0 <= step.seconds < _LONGEST_SECONDS and index >= (skip or 0)]
    used = [index for index in timed if index not in interrupted] or timed
    times = [steps[index].seconds for index in used]
    cut = _cut(times) if skip is None else 0
    return Steady(
        seconds=math.fsum(times[cut:]) / len(times[cut:]) if times else None,
        windows=len(times) - cut,
        skipped=cut if skip is None else min(skip, len(steps)),
        interrupted=len(timed) - len(used),
    )


def _cut(times: Sequence[float]) -> int:
    if len(times) < _LEAST_WINDOWS:
        return int(len(times) > 1)
    return estimators.mser5_cut(np.repeat(times, _BATCH)) // _BATCH
