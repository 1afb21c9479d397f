"""What fits over sizes and intervals across processes are worth, on simulated times of known truth.

    python validation/scaling.py

For each curve: how often a point of it is doubted, how often a point made 1.5 times as long is found, and how often the
interval of the exponent holds 1. For each number of processes: how often the interval holds the truth. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from perfexp.statistics import estimators, moderated, scaling

RUNS = 1000
Curve = Callable[[np.random.Generator, NDArray[np.float64]], NDArray[np.float64]]


def law(_: np.random.Generator, x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.3 + 0.7 * x / x.max()


def flat(_: np.random.Generator, x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.ones_like(x)


def corner(_: np.random.Generator, x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0, x / np.sqrt(x.min() * x.max()))


def stairs(amplitude: float) -> Curve:
    return lambda rng, x: law(rng, x) * (1 + rng.uniform(-amplitude, amplitude, x.size))


def step(factor: float) -> Curve:
    return lambda rng, x: (
        law(rng, x) * np.where(np.arange(x.size) >= rng.integers(1, x.size), factor, 1.0)
    )


CURVES: dict[str, Curve] = {
    "a + b·p": law,
    "stairs of ±5 %": stairs(0.05),
    "stairs of ±8 %": stairs(0.08),
    "flat": flat,
    "flat, then b·p": corner,
    "one step of 1.2": step(1.2),
    "one step of 1.5": step(1.5),
}


def fits(name: str, count: int) -> str:
    rng, x = np.random.default_rng(1), np.round(np.linspace(224, 512, count)) ** 2 / 1e6
    doubted = found = others = covered = 0
    for _ in range(RUNS):
        y = CURVES[name](rng, x) * np.exp(0.01 * rng.standard_normal(count))
        fit = scaling.fit_scaling(x, y, np.full(count, 0.005))
        doubted += bool(fit.far)
        covered += fit.exponent is not None and fit.exponent.low <= 1 <= fit.exponent.high
        spike = int(rng.integers(count))
        y[spike] *= 1.5
        far = scaling.fit_scaling(x, y, np.full(count, 0.005)).far
        found += spike in far
        others += bool(set(far) - {spike})
    shares = " | ".join(f"{100 * each / RUNS:.1f} %" for each in (doubted, found, others, covered))
    return f"| {name} | {count} | {shares} |"


def processes(count: int) -> str:
    rng, covered, pooled, widths = np.random.default_rng(17), 0, 0, []
    for _ in range(RUNS):
        levels = np.exp(0.02 * rng.standard_normal(count))
        calls = levels[:, None] * np.exp(0.01 * rng.standard_normal((count, 200)))
        interval = moderated.geometric_mean(np.median(calls, axis=1))
        together = estimators.median_interval(calls.ravel(), tau=1.0)
        covered += interval.low <= 1 <= interval.high
        pooled += together.low <= 1 <= together.high
        widths.append(interval.relative_half_width)
    return f"| {count} | {covered / RUNS:.1%} | ±{np.median(widths):.1%} | {pooled / RUNS:.1%} |"


if __name__ == "__main__":
    print(
        "| curve, 1 % noise | sizes | doubted | a point × 1.5 found | others doubted with it | interval holds 1 |"
    )
    for name in CURVES:
        for count in (6, 10, 30):
            print(fits(name, count), flush=True)
    print("| processes | across holds the truth | half-width | pooled calls hold it |")
    for count in (2, 3, 5, 10):
        print(processes(count))
