"""Timing: clocks, the launch queue, blocks of calls, and stopping rules.

A series is the list of samples of one time. It grows in blocks; a sample is the time of k calls
divided by k, and a call is a forward pass or a training step.

May import: devices, records, statistics.
Used by: convolution, measuring, plan.
"""
