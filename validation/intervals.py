"""What the interval and the stopping rule are worth, on simulated calls of known truth.

    python validation/intervals.py

For each kind of noise and each target: how many calls the rule takes (median over 1,000 runs, warm-up of 3 calls left
out) and how often the reported 95 % interval holds the true median. And what an interval is worth where time ran out
first, as `brisk` lets it: of so few samples their correlation can't be told. Seeds are fixed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.statistics import blockwise, estimators
from perfexp.timing.stopping import Precision
from tests.support.simulation import (
    SERIES,
    autoregressive,
    iid,
    nvbench_stdrel_calls,
    take,
    true_median,
)

RUNS = 1000


def row(name: str, target: float) -> tuple[float, float]:
    """Median number of calls, and the share of intervals that hold the truth."""
    rng, truth, calls, covered = np.random.default_rng(21), true_median(name), [], 0
    for _ in range(RUNS):
        samples, monitor = take(
            Precision(target=target, max_seconds=1e9, warmup_seconds=0), SERIES[name](rng, 20_000)
        )
        interval = blockwise.block_median(
            blockwise.split(samples, monitor.starts, monitor.warmup(samples))
        )
        calls.append(samples.size - monitor.warmup(samples))
        covered += interval.low is not None and interval.low <= truth <= interval.high
    return float(np.median(calls)), covered / RUNS


def cut_short(
    source: Callable[[np.random.Generator, int], NDArray[np.float64]], calls: float
) -> tuple[float, ...]:
    """Shares of series that have an interval, of intervals that hold the truth, and of such three times as wide."""
    rng, has, held, widely = np.random.default_rng(21), 0, 0, 0
    for _ in range(RUNS):
        rule = Precision(target=1e-9, max_seconds=calls, warmup_seconds=0)
        samples, monitor = take(rule, source(rng, int(4 * calls) + 10))
        interval = blockwise.block_median(
            blockwise.split(samples, monitor.starts, monitor.warmup(samples))
        )
        if interval.low is not None and interval.high is not None:
            has += 1
            held += interval.low <= 1 <= interval.high
            below, above = interval.value - interval.low, interval.high - interval.value
            widely += (
                -estimators.FEW_TOO_NARROW * above
                <= interval.value - 1
                <= estimators.FEW_TOO_NARROW * below
            )
    return has / RUNS, held / has, widely / has


def main() -> None:
    print("| noise | ±2 % (coarse) | ±1 % (normal) | ±0.5 % (fine) |\n|---|---|---|---|")
    for name in SERIES:
        cells = [
            f"{calls:.0f} calls, {covered:.1%}"
            for calls, covered in (row(name, e) for e in (0.02, 0.01, 0.005))
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\n| noise | 20 calls | 40 calls |\n|---|---|---|")
    noises = {
        "iid": iid(0.01),
        **{f"AR(1) {rho}": autoregressive(rho) for rho in (0.5, 0.7, 0.9, 0.95)},
    }
    for name, source in noises.items():
        shares = [cut_short(source, calls) for calls in (20.0, 40.0)]
        cells = [
            f"{has:.0%} have one, {held:.0%} hold, {wide:.0%} three times as wide"
            for has, held, wide in shares
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    theirs = [
        nvbench_stdrel_calls(1 + 0.01 * np.random.default_rng(seed).standard_normal(5000))
        for seed in range(100)
    ]
    print(
        f"\nnvbench's stdrel rule at 1 % noise, without its minimum of 0.5 s: {np.median(theirs):.0f} calls"
    )


if __name__ == "__main__":
    main()
