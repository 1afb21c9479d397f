"""Plots from Python: `roofline_files` writes the plot and the table of a roofline."""

from perfexp.report.plots import roofline_files

__all__ = ["roofline_files"]
