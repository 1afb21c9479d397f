"""Comparison of finished runs: pairs of points, whether they can be compared, ratios and verdicts."""
