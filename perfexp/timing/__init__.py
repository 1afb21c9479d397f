"""Timing: clocks, the launch queue, blocks of calls, and stopping rules.

A series is the list of samples of one time, and grows in blocks. A sample is the time of k calls
divided by k. A call is a forward pass or a training step.

May import: devices, records, statistics.
Used by: convolution, measuring, plan.
"""
