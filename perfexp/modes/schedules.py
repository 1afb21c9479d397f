"""Schedules of the learning rate: factors by the number of the step, in closed form, so that a resumed run agrees."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfexp.models import Schedule

#: Of `one_cycle`, as in torch's OneCycleLR: share of steps that go up; first over highest and last over first rate.
_UP, _FIRST, _LAST = 0.3, 1 / 25, 1e-4


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The learning rate of each step, relative to the optimizer's.

    Attributes:
        total: steps of the whole training.
        per_epoch: steps of an epoch.
        warmup: steps in which the rate grows linearly to its schedule's beginning; for `one_cycle`, those to its top.
        decay_epochs: epochs between two decays of `step`, each by `decay_factor`.
    """

    schedule: Schedule
    total: int
    per_epoch: int
    warmup: int = 0
    decay_epochs: int = 30
    decay_factor: float = 0.1

    def factor(self, step: int) -> float:
        """The factor of a step, from 0; steps after the last one are as the end of the schedule."""
        step = min(step, self.total)
        if self.schedule is Schedule.one_cycle:
            return self._one_cycle(step)
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule is Schedule.cosine:
            return _between(1.0, 0.0, (step - self.warmup) / max(self.total - self.warmup, 1))
        if self.schedule is Schedule.step:
            return self.decay_factor ** (step // self.per_epoch // self.decay_epochs)
        return 1.0

    def _one_cycle(self, step: int) -> float:
        top = (self.warmup or _UP * self.total) - 1
        if step < top:
            return _between(_FIRST, 1.0, step / top)
        return _between(1.0, _FIRST * _LAST, min((step - top) / max(self.total - 1 - top, 1), 1.0))


def _between(start: float, end: float, share: float) -> float:
    """A value on half a cosine wave from start to end."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))
