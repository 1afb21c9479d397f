"""How much processes of one server differ, by class of time: typical variance and how much that varies between models.

    python benchmarks/process_components.py [process_medians.json]

The file has a cell per model, phase and batch size: the medians of its processes, in seconds. Each class of time
(device times, host times that the device limits, and others) gets the scale s₀ and the degrees ν₀ of the scaled F
distribution that its cells' variances follow, by maximum likelihood: Smyth, "Linear models and empirical Bayes methods
for assessing differential expression in microarray experiments" (2004), section 6.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import optimize, stats

#: Range of the degrees: variances that say nothing of each other, and equal ones.
DEGREES = 0.5, 100.0


def time_class(name: str, bound_by: str | None) -> str:
    if name == "device":
        return "device"
    return "host time, device-bound" if bound_by == "gpu" else "host time, host-bound"


def classes(cells: list[dict]) -> dict[str, list[tuple[float, int]]]:
    """Variance of log medians with its degrees, for each cell of a class."""
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for cell in cells:
        for name, seconds in cell["seconds"].items():
            if name != "throughput" and len(seconds) > 1:
                logs = [math.log(value) for value in seconds]
                found[time_class(name, cell["bound_by"])].append((statistics.variance(logs), len(logs) - 1))
    return found


def fit(variances: list[tuple[float, int]]) -> tuple[float, float]:
    """Scale s₀² and degrees ν₀ under which the variances are most likely: s² / s₀² is F distributed with (ν, ν₀)."""
    values = np.array([variance for variance, _ in variances])
    degrees = np.array([count for _, count in variances], dtype=float)

    def loss(parameters: np.ndarray) -> float:
        scale, prior = np.exp(parameters)
        ratio = np.maximum(values, 1e-12) / scale
        return float(-(stats.f.logpdf(ratio, degrees, prior) - np.log(scale)).sum())

    start = np.log([max(float(np.median(values)), 1e-8), 3.0])
    bounds = [(start[0] - 6, start[0] + 6), tuple(np.log(DEGREES))]
    best = optimize.minimize(loss, start, method="L-BFGS-B", bounds=bounds)
    return tuple(map(float, np.exp(best.x)))


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("process_medians.json")
    print(f"{'':24} {'cells':>5} {'sd s0':>8} {'degrees':>8}  {'median sd':>9}")
    for name, variances in classes(json.loads(path.read_text())).items():
        scale, degrees = fit(variances)
        middle = math.sqrt(statistics.median(variance for variance, _ in variances))
        print(f"{name:24} {len(variances):5} {math.sqrt(scale):8.2%} {degrees:8.1f}  {middle:9.2%}")


if __name__ == "__main__":
    main()
