"""Steady: the mean time of a step in the part of a log where steps are steady."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from perfexp.speed.lines import Step
from perfexp.statistics import estimators

#: The rule needs so many windows to see where steps become steady.
_LEAST_WINDOWS = 4
#: MSER-5 looks at means of 5 samples.
_BATCH = 5
#: More is no time of a step.
_LONGEST_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class Steady:
    """What is left of a log.

    Attributes:
        seconds: mean time of a step; None where nothing is left.
        windows: how many lines that is the mean of.
        skipped: how many lines before them were skipped.
        interrupted: how many lines among them and before were left out, because they time more than steps.
    """

    seconds: float | None
    windows: int
    skipped: int
    interrupted: int


def steady(steps: Sequence[Step], interrupted: Collection[int] = (), skip: int | None = None) -> Steady:
    """Skip lines until steps are steady, and take the mean of the others.

    Left out at first are lines without a time and those that time more than steps, as long as there are others. The cut
    is MSER's (`stats.mser5_cut`), on lines instead of on means of five samples: a line is a mean itself. Of fewer than
    four lines, of which it can say nothing, the first is skipped if there is another: it holds the warm-up.

    Args:
        steps: the lines of a training about its steps.
        interrupted: numbers of those that time more than steps.
        skip: how many of the first lines to skip, instead of until steps are steady.
    """
    known = [index for index, step in enumerate(steps) if 0 <= step.seconds < _LONGEST_SECONDS and index >= (skip or 0)]
    clean = [index for index in known if index not in interrupted]
    kept = clean or known
    times = [steps[index].seconds for index in kept]
    cut = _cut(times) if skip is None else 0
    return Steady(
        seconds=math.fsum(times[cut:]) / len(times[cut:]) if times else None,
        windows=len(times) - cut,
        skipped=cut if skip is None else min(skip, len(steps)),
        interrupted=len(known) - len(kept),
    )


def _cut(times: Sequence[float]) -> int:
    if len(times) < _LEAST_WINDOWS:
        return int(len(times) > 1)
    return estimators.mser5_cut(np.repeat(times, _BATCH)) // _BATCH
