"""Comparison: paired points, comparability, ratios and verdicts of finished runs.

A side is what the user names: a run, several runs, or a part of a sweep. The first side is the
baseline (`A`). Points of two sides that belong together form a pair (`pairing`). `comparability`
finds out what else differs between them, and `judging` gives each figure a verdict.

May import: host, plan, records, roofline, statistics.
Used by: commands, report, run.
"""
