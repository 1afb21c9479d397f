"""Results of runs and sweeps: records, their files, units, and the diagnostics of points."""
