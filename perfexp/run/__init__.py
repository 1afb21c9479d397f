"""Run: from plan to record; single runs, sweeps, replicates, and their supervision.

May import: comparison, devices, doctor, host, measuring, plan, prediction, records, report,
    statistics.
Used by: api, cli, commands, main, perfexp.

This is the parent process: it starts workers, waits and reports, and never measures. `driver` has
the order of several runs. `job` is one run: it extends `supervisor`, which has workers measure all
points, and writes the record. A *replicate* is one process's measurement of all points.
"""
