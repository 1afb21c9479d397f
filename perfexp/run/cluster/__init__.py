"""Clusters: sweep runs as SLURM jobs, or on all GPUs of this machine.

`main` adds each composed run of a sweep to a `Campaign`, which starts a process for it. That
process is again `perfexp`, with the flag --of-sweep; it finds its run as an `Element`.
"""
