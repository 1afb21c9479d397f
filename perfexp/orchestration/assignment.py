"""Assignment: the plan, folder and sweep of one run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfexp.plan import config
from perfexp.records.record import Key, SweepMembership
from perfexp.reports.progress import Whole
from perfexp.summaries.remaining import median_seconds, seconds_left


@dataclass(kw_only=True)
class Assignment:
    """One run to be measured, of a sweep or alone; `number` is its position in the sweep, from 1.

    Attributes:
        is_sent: whether the tracker has taken the record; valid after the run.
        overwrites: whether earlier results in the folder are removed first.
    """

    plan: config.Plan
    plain: dict[str, Any]
    folder: Path
    name: str
    sweep: SweepMembership | None = None
    is_sent: bool = True
    begun: Callable[[], None] = lambda: None
    whole: Whole | None = None
    number: int = 1
    overwrites: bool = False

    def seconds(self, left: Collection[Key], measured: Sequence[float] = ()) -> float | None:
        """Estimate the time of points without a result, from the wall times of measured ones; None if unknown."""
        return seconds_left(left, median_seconds(measured) if measured else self.plan.point_seconds)
