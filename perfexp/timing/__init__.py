"""Timing: clocks, the launch queue, blocks of calls, and stopping rules.

May import: devices, records, statistics.
Used by: convolution, measuring, plan.
"""
