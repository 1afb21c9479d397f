"""Prediction: times and energies that were not measured, each with its source.

May import: plan, records, statistics.
Used by: commands, report, run.

A *curve* is one quantity (time, energy or memory) over input sizes and batch sizes. `corpus` reads
curves from records; a Gaussian process (`statistics.gaussian_process`) interpolates them. `lookup`
answers for one point (`perfexp predict`), `predictions` for all points of a sparse sweep. `skill`
scores predictions on measured values (`perfexp predict check`).
"""
