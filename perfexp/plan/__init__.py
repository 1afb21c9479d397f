"""Plan: what to measure; configuration, schema, validation, overrides, sweeps, names.

May import: convolution, devices, host, measuring, models, records, statistics, timing.
Used by: __main__, api, cli, commands, comparison, main, prediction, report, run, worker.
"""
