"""From plan to record: single runs, sweeps, replicates, and supervision of worker processes."""
