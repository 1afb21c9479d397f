"""How near kernels and layers come to device peaks, from ncu counters or layer definitions.

`of_csv` reads ncu's output, `of_record` a run's layers; `perfexp.plots.roofline_files` draws and
writes.
"""

from perfexp.roofline.assemble import of_csv, of_record
from perfexp.roofline.counters import COLLECT
from perfexp.roofline.listing import is_listing
from perfexp.roofline.peaks import Peaks, of_sheet
from perfexp.roofline.placement import Roofline

__all__ = ["COLLECT", "Peaks", "Roofline", "is_listing", "of_csv", "of_record", "of_sheet"]
