"""Statistics: pure functions for raw samples, scaling and prediction; no clock, no device.

A sample is one measured time. A series is split into blocks. A figure is a number with an
interval, such as a median, that one or more processes have measured.

May import: no other room.
Used by: commands, comparison, convolution, devices, measuring, plan, prediction, records, report,
    run, timing, worker.
"""
