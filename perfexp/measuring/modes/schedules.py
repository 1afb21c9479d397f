"""Learning rate schedules as factors per step, in closed form, so that resumed runs agree.

`Train.rates` builds a `Rates` for a training in epochs; the trainer asks it for each step's factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfexp.models import Schedule

#: For `one_cycle`, as in torch's OneCycleLR: share of rising steps, first rate over highest rate,
#: last rate over first rate.
_UP, _FIRST, _LAST = 0.3, 1 / 25, 1e-4


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates per step, relative to the optimizer's rate.

    Attributes:
        total: steps in the whole training.
        per_epoch: steps per epoch.
        warmup: steps with a linearly growing rate, before the schedule starts. For `one_cycle`,
            steps to the highest rate.
        decay_epochs: epochs between two decays by `decay_factor`, for `step`.
    """

    schedule: Schedule
    total: int
    per_epoch: int
    warmup: int = 0
    decay_epochs: int = 30
    decay_factor: float = 0.1

    def factor(self, step: int) -> float:
        """Return the learning rate of a step, relative to the optimizer's rate.

        Args:
            step: number of the step, from 0. Steps after the last use the schedule's end.
        """
        step = min(step, self.total)
        if self.schedule is Schedule.one_cycle:
            return self._one_cycle(step)
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule is Schedule.cosine:
            share = (step - self.warmup) / max(self.total - self.warmup, 1)
            return _cosine_between(1.0, 0.0, share)
        if self.schedule is Schedule.step:
            return self.decay_factor ** (step // self.per_epoch // self.decay_epochs)
        return 1.0

    def _one_cycle(self, step: int) -> float:
        """Return the factor for `one_cycle`: rising to 1 at the top step, then falling."""
        top = (self.warmup or _UP * self.total) - 1
        if step < top:
            return _cosine_between(_FIRST, 1.0, step / top)
        share = min((step - top) / max(self.total - 1 - top, 1), 1.0)
        return _cosine_between(1.0, _FIRST * _LAST, share)


def _cosine_between(start: float, end: float, share: float) -> float:
    """Return a value on half a cosine wave from start (`share` 0) to end (1)."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
