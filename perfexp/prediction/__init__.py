"""Prediction: times and energies at sizes that were not measured, with intervals."""
