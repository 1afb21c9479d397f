"""Speed JSON of a training, from a run's record or from an mmengine or mmcv log."""

from __future__ import annotations

from perfexp.report.speed.facts import Facts
from perfexp.report.speed.logged import of_log
from perfexp.report.speed.recorded import of_record
from perfexp.report.speed.result import Mode, Speed

__all__ = ["Facts", "Mode", "Speed", "of_log", "of_record"]
