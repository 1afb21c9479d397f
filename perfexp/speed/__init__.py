"""Speed: the speed JSON of a training, from a run's record or from the log of mmengine or mmcv.

What others call: `of_record` after a run, `of_log` for what somebody else trained; `placing.put` writes one,
`Speed.file_name` and `Speed.to_json` are what is written.
"""

from __future__ import annotations

from perfexp.speed.facts import Facts
from perfexp.speed.logged import of_log
from perfexp.speed.recorded import of_record
from perfexp.speed.result import Mode, Speed

__all__ = ["Facts", "Mode", "Speed", "of_log", "of_record"]
