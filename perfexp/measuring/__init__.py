"""Measuring: one point, from its first call to its diagnostics. Start in `procedure`.

May import: convolution, cost, data, devices, doctor, host, models, records, roofline, statistics,
    timing.
Used by: commands, perfexp, plan, report, run, worker.
"""
