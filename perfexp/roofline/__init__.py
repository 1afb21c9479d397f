"""Roofline: how near kernels and layers come to the peaks of a device.

May import: host, records.
Used by: commands, comparison, measuring, report.

A roofline compares work (FLOPs and bytes) and its time with a device's ceilings: peak FLOP/s and
memory bandwidth. `of_csv` reads kernels from the output of ncu (NVIDIA Nsight Compute), and
`of_record` a run's layers with their analytic work. Both return a `Roofline`;
`perfexp.report.plots.roofline_files` draws and writes it.
"""

from perfexp.roofline.assemble import of_csv, of_record
from perfexp.roofline.counters import COLLECT
from perfexp.roofline.listing import is_listing
from perfexp.roofline.peaks import Peaks, of_sheet
from perfexp.roofline.placement import Roofline

__all__ = ["COLLECT", "Peaks", "Roofline", "is_listing", "of_csv", "of_record", "of_sheet"]
