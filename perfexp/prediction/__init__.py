"""Prediction: times and energies that were not measured, each with its source.

May import: plan, records, statistics.
Used by: commands, report, run.
"""
