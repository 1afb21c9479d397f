"""Clusters: the runs of a sweep as jobs of SLURM, or on all GPUs of this machine."""
