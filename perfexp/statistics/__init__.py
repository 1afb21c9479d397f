"""Statistics: pure functions for raw samples, scaling and prediction; no clock, no device.

May import: no other room.
Used by: commands, comparison, convolution, devices, measuring, plan, prediction, records, report,
    run, timing, worker.
"""
