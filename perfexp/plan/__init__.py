"""Plan: what to measure; configuration, schema, validation, overrides, sweeps, names.

May import: convolution, devices, host, measuring, models, records, statistics, timing.
Used by: __main__, api, cli, commands, comparison, main, prediction, report, run, worker.

Hydra composes a configuration from conf/ and the command line; `config` turns it into a `Plan`, the
resolved settings of one run. `validation` and `prerequisites` refuse impossible plans. `plan_file`
writes plan.yaml and reads it back.
"""
