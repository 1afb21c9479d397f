"""Measuring: one point, from its first call to its diagnostics. Start in `procedure`.

A point is phase, input size, batch size and precision; a call is a forward pass (inference) or a
training step. A pass is a series of calls made to measure one thing, such as energy.

May import: convolution, cost, data, devices, doctor, host, models, records, roofline, statistics,
    timing.
Used by: commands, perfexp, plan, report, run, worker.
"""
