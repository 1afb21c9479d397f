"""Plots of records, layers, sweeps and rooflines."""
