"""Run: from plan to record; single runs, sweeps, replicates, and their supervision.

May import: comparison, devices, doctor, host, measuring, plan, prediction, records, report,
    statistics.
Used by: api, cli, commands, main, perfexp.
"""
