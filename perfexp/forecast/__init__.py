"""Forecasts: times and energies from records, measured or predicted, each with its source."""
