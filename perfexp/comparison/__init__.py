"""Comparison of finished runs: paired points, comparability, ratios and verdicts."""
