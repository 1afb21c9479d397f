"""From a plan to a record: one run, sweeps, replicates, and the supervision of worker processes."""
