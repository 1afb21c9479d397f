"""Results of runs and sweeps: records, files, units and diagnostics."""
