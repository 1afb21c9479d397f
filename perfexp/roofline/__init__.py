"""Roofline: how near kernels and layers come to the peaks of a device.

May import: host, records.
Used by: commands, comparison, measuring, report.

`of_csv` reads ncu's output, and `of_record` a run's layers, by the analytic work of each layer.
`perfexp.report.plots.roofline_files` draws and writes.
"""

from perfexp.roofline.assemble import of_csv, of_record
from perfexp.roofline.counters import COLLECT
from perfexp.roofline.listing import is_listing
from perfexp.roofline.peaks import Peaks, of_sheet
from perfexp.roofline.placement import Roofline

__all__ = ["COLLECT", "Peaks", "Roofline", "is_listing", "of_csv", "of_record", "of_sheet"]
