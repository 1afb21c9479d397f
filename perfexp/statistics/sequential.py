"""Sequential tests: the error level for each look at results that decides when to stop.

`perfexp ab` adds processes to two sides in turn and compares them after each pair, a look. Testing
each look at 5 % would find a difference by chance sooner or later, so each look gets a smaller
level.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from perfexp.statistics.distributions import ALPHA

#: Processes per side at the first and at the last look; every pair in between is a look, too.
LEAST, MOST = 2, 32
#: Nodes for integrating the density between two boundaries, and bisection steps for a boundary.
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
    """Return the two-sided level of each look, by number of processes per side.

    The sum of as many standard normal differences as there are processes is a random walk, which
    stops where it crosses a boundary. Each look's boundary follows from the probability that the
    look may spend, by integrating the density of the walks that have not stopped yet.
    """
    from scipy import special

    levels: dict[int, float] = {}
    # the walks that go on: sums and their probabilities, shape (nodes,), at the previous look
    nodes, masses, before, spent = np.zeros(1), np.ones(1), 0, 0.0
    for count in range(LEAST, MOST + 1):
        deviation = math.sqrt(count - before)
        due = ALPHA * math.log1p((math.e - 1) * count / MOST) - spent
        low, high = 0.0, 10 * math.sqrt(count)
        for _ in range(_STEPS):
            boundary = (low + high) / 2
            beyond = special.ndtr((-boundary - nodes) / deviation)
            beyond += special.ndtr((nodes - boundary) / deviation)
            if float(masses @ beyond) > due:
                low = boundary
            else:
                high = boundary
        levels[count] = 2 * float(special.ndtr(-boundary / math.sqrt(count)))
        within = np.linspace(-boundary, boundary, _NODES)
        densities = np.exp(-0.5 * ((within[:, None] - nodes) / deviation) ** 2)
        densities /= deviation * math.sqrt(2 * math.pi)
        weights = np.full(_NODES, within[1] - within[0])  # trapezoidal rule
        weights[[0, -1]] /= 2
        nodes, masses, before, spent = within, (densities @ masses) * weights, count, spent + due
    return levels
