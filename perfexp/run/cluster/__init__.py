"""Clusters: sweep runs as SLURM jobs, or on all GPUs of this machine."""
