"""Records: what runs and sweeps measured, their files, diagnostics, analysis and wording.

May import: host, statistics.
Used by: api, cli, commands, comparison, convolution, data, devices, doctor, main, measuring,
    models, perfexp, plan, prediction, report, roofline, run, timing, worker.
"""
