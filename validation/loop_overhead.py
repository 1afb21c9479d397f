"""What the timing loop adds to each call, against a bare loop over the same call, alternating within one run.

    python validation/loop_overhead.py

Prints the difference per call and the ratio for calls of different length. The claim: at most 1 µs or 1 %.
"""

from __future__ import annotations

import statistics
import time

from perfexp.devices.cpu import CpuDevice
from perfexp.timing.collecting import HostChain, undisturbed

ROUNDS = 31


def spin(nanoseconds: int):
    """A call that takes about so long; 0 is an empty one."""

    def call() -> None:
        end = time.perf_counter_ns() + nanoseconds
        while time.perf_counter_ns() < end:
            pass

    return (lambda: None) if nanoseconds == 0 else call


def bare(call, count: int) -> float:
    """Seconds per call of a loop that does nothing else."""
    start = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - start) * 1e-9 / count


def chained(call, count: int) -> float:
    """Seconds per call of perfexp's block, wall time of the whole block."""
    block = HostChain(call, CpuDevice())
    start = time.perf_counter_ns()
    block(count)
    return (time.perf_counter_ns() - start) * 1e-9 / count


def main() -> None:
    print("call           bare loop    perfexp      added per call   ratio")
    for nanoseconds, count in ((0, 100_000), (10_000, 5_000), (100_000, 500), (1_000_000, 100)):
        call, pairs = spin(nanoseconds), []
        with undisturbed():
            for _ in range(ROUNDS):
                pairs.append((bare(call, count), chained(call, count)))
        plain = statistics.median(pair[0] for pair in pairs)
        added = statistics.median(pair[1] - pair[0] for pair in pairs)
        name = "empty" if nanoseconds == 0 else f"{nanoseconds / 1000:.0f} µs"
        times = f"{plain * 1e6:10.3f} µs {(plain + added) * 1e6:10.3f} µs {added * 1e9:12.0f} ns"
        print(f"{name:<12} {times} {1 + added / plain:10.4f}")


if __name__ == "__main__":
    main()
