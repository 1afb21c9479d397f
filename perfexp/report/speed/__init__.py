"""Speed files: a training's images/s as JSON, from a run's record or an mmengine or mmcv log.

`perfexp speed` and `perfexp train-speed` write them. The format is given: other tools read it.
"""

from __future__ import annotations

from perfexp.report.speed.facts import Facts
from perfexp.report.speed.logged import of_log
from perfexp.report.speed.result import Mode, Speed, of_record

__all__ = ["Facts", "Mode", "Speed", "of_log", "of_record"]
