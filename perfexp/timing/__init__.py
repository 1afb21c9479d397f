"""Timing: clocks, launch queue, blocks, and stopping rules."""
