"""Sequential tests: the error level for each look at results that decides when to stop."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from perfexp.statistics.distributions import ALPHA

#: Processes per side at the first and at the last look; every pair in between is a look, too.
LEAST, MOST = 2, 32
#: Nodes of the density between two boundaries, and bisection steps.
_NODES, _STEPS = 401, 50


def level(processes: int) -> float:
    """Return the two-sided level of the look at `processes` per side; 0 before the first look.

    All looks together give a false verdict in at most 5 % of comparisons. After a share t of the
    processes, α · ln(1 + (e - 1) t) is spent (Lan and DeMets, "Discrete sequential boundaries for
    clinical trials", 1983). This is close to Pocock's constant level, so a clear difference is
    decided after few processes. The levels assume normal means and are applied to p-values from
    Welch's test (Jennison and Turnbull, "Group sequential methods", 2000, section 3.8).
    """
    return 0.0 if processes < LEAST else _levels()[min(processes, MOST)]


@cache
def _levels() -> dict[int, float]:
    """Return levels by number of processes.

    They follow by integrating the density for sums that have not crossed a boundary yet.
    """
    from scipy import special

    levels: dict[int, float] = {}
    nodes, masses, before, spent = np.zeros(1), np.ones(1), 0, 0.0
    for count in range(LEAST, MOST + 1):
        deviation = math.sqrt(count - before)
        due = ALPHA * math.log1p((math.e - 1) * count / MOST) - spent
        low, high = 0.0, 10 * math.sqrt(count)
        for _ in range(_STEPS):
            boundary = (low + high) / 2
            beyond = special.ndtr((-boundary - nodes) / deviation) + special.ndtr(
                (nodes - boundary) / deviation
            )
            low, high = (boundary, high) if float(masses @ beyond) > due else (low, boundary)
        levels[count] = 2 * float(special.ndtr(-boundary / math.sqrt(count)))
        within = np.linspace(-boundary, boundary, _NODES)
        densities = np.exp(-0.5 * ((within[:, None] - nodes) / deviation) ** 2) / (
            deviation * math.sqrt(2 * math.pi)
        )
        weights = np.full(_NODES, within[1] - within[0])
        weights[[0, -1]] /= 2
        nodes, masses, before, spent = within, (densities @ masses) * weights, count, spent + due
    return levels
