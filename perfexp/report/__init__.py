"""Report: what a user sees; console, report.md, tables, plots, MLflow and speed files.

May import: comparison, host, measuring, plan, prediction, records, roofline, statistics.
Used by: api, commands, main, run.
"""
