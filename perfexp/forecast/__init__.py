"""Forecasts of times and energies from records: which were measured, which are predicted, and by what."""
