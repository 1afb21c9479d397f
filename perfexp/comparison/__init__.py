"""Comparison: paired points, comparability, ratios and verdicts of finished runs.

May import: host, plan, records, roofline, statistics.
Used by: commands, report, run.
"""
