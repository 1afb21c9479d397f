"""Speed JSON of a training, from Python: the names of `perfexp.report.speed`."""

from perfexp.report.speed import Facts, Mode, Speed, of_log, of_record, placing

__all__ = ["Facts", "Mode", "Speed", "of_log", "of_record", "placing"]
