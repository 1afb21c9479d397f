"""How well `perfexp check --history` finds changes, on simulated series with known change points.

    python validation/change_points.py

Each row is 300 series with fixed seeds. In half of the series with a change, the step is undone 10 to 30 commits later.
The last rows repeat a check at every commit, as a build does: an alarm is a commit at which it begins to fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perfexp.statistics.change_points import segments, shift
from perfexp.statistics.distributions import ALPHA

SERIES, COMMITS, NOISE, MARGIN, LEAST_RUNS = 300, 100, 0.01, 0.01, 10
#: Commits on both sides of a change, at least, and how far a found change may be from it.
EDGE, NEAR = 10, 2
Logs = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Logs]


def normal(rng: np.random.Generator, size: int) -> Logs:
    return NOISE * rng.standard_normal(size)


def heavy(rng: np.random.Generator, size: int) -> Logs:
    """Student's t with 4 degrees of freedom and the same standard deviation."""
    return NOISE * rng.standard_t(4, size) / math.sqrt(2)


NOISES: dict[str, Noise] = {"normal": normal, "heavy tails (t, ν = 4)": heavy}


def found(logs: Logs) -> list[int]:
    return list(np.cumsum([len(part) for part in segments(logs)])[:-1])


def steps(size: float, noise: Noise, *, undone: bool) -> str:
    """Shares of the changes found, and of the intervals that hold the step; further changes per 100 commits."""
    rng = np.random.default_rng(1)
    changes = hits = others = located = held = 0
    for _ in range(SERIES):
        logs, at = noise(rng, COMMITS), int(rng.integers(EDGE, COMMITS - EDGE + 1 - 30 * undone))
        ends = [at, at + int(rng.integers(EDGE, 31))] if undone else [at]
        logs[at : ends[-1] if undone else COMMITS] += math.log1p(size)
        starts, parts = found(logs), segments(logs)
        near = [any(abs(start - end) <= NEAR for start in starts) for end in ends]
        changes, hits, others = (
            changes + len(ends),
            hits + sum(near),
            others + len(starts) - sum(near),
        )
        for number, start in enumerate(starts):
            if abs(start - at) <= NEAR:
                located += 1
                interval = shift(parts[number], parts[number + 1]).interval()
                held += interval.low <= 1 + size <= interval.high
    return f"{hits / changes:.1%} | {100 * others / SERIES / COMMITS:.2f} | {held / located:.1%}"


def steady(noise: Noise) -> str:
    """False changes per 100 commits in whole series."""
    rng = np.random.default_rng(2)
    return f"{sum(len(found(noise(rng, COMMITS))) for _ in range(SERIES)) * 100 / SERIES / COMMITS:.3f}"


def at_each_commit(noise: Noise) -> str:
    """False changes and failing checks per 100 commits, if a check runs at each of them."""
    rng, reported, alarms = np.random.default_rng(3), 0, 0
    for _ in range(SERIES):
        logs, seen, failed = noise(rng, COMMITS), set[int](), False
        for count in range(LEAST_RUNS, COMMITS + 1):
            parts = segments(logs[:count])
            for start in np.cumsum([len(part) for part in parts])[:-1]:
                reported += not any(abs(start - other) <= NEAR for other in seen)
                seen.add(int(start))
            alarms += fails(logs[:count]) and not failed
            failed = fails(logs[:count])
    return f"{reported / SERIES:.3f} | {alarms / SERIES:.3f}"


def fails(logs: Logs) -> bool:
    """Whether a check of the last commit against the first fails."""
    parts = segments(logs)
    total = shift(parts[0], parts[-1])
    return len(parts) > 1 and total.value > 0 and total.p_beyond(MARGIN) <= ALPHA


def delay(size: float) -> str:
    """Commits after a step until it is found: median and 90 %."""
    rng, delays = np.random.default_rng(4), []
    for _ in range(SERIES):
        logs = normal(rng, 60)
        logs[30:] += math.log1p(size)
        seen = (
            count - 30
            for count in range(31, 61)
            if any(abs(one - 30) <= NEAR for one in found(logs[:count]))
        )
        delays.append(next(seen, 99))
    return f"{np.median(delays):.0f} | {np.quantile(delays, 0.9):.0f}"


def drift(per_commit: float) -> str:
    """Commits of a drift until a check against the first commit fails: median and 90 %."""
    rng, delays = np.random.default_rng(5), []
    for _ in range(SERIES):
        logs = normal(rng, COMMITS) + math.log1p(per_commit) * np.arange(COMMITS)
        delays.append(
            next(filter(lambda count: fails(logs[:count]), range(LEAST_RUNS, COMMITS)), COMMITS)
        )
    return f"{np.median(delays):.0f} | {np.quantile(delays, 0.9):.0f}"


if __name__ == "__main__":
    print(
        "| step | noise | undone | found within 2 commits | further changes per 100 commits | interval holds the step |"
    )
    for size in (0.02, 0.03, 0.05):
        for name, noise in NOISES.items():
            for undone in (False, True):
                print(
                    f"| {size:.0%} | {name} | {undone} | {steps(size, noise, undone=undone)} |",
                    flush=True,
                )
    print(
        "| no change | false changes per 100 commits | at each commit: changes | failing checks |"
    )
    for name, noise in NOISES.items():
        print(f"| {name} | {steady(noise)} | {at_each_commit(noise)} |", flush=True)
    print("| step | commits until found, median | 90 % |")
    for size in (0.02, 0.03, 0.05):
        print(f"| {size:.0%} | {delay(size)} |", flush=True)
    print("| drift per commit | commits until a check fails, median | 90 % |")
    for size in (0.0005, 0.001, 0.002):
        print(f"| {size:.2%} | {drift(size)} |", flush=True)
