"""Prior: how much a class of figures varies between processes, known before measuring.

A class is, for example, medians of device times. `records/priors` holds the priors that come with
perfexp, learned from many measured figures; a run stores the priors of its machine in its record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

#: Variance of log s₀² between machines: one machine in eight is at least three times as noisy as
#: the prior.
_BETWEEN_MACHINES = 2.0
#: Smallest variance of a figure (standard deviation 0.01 %): figures are rounded below it.
LEAST_VARIANCE = 1e-8
#: Limits for the degrees of freedom in `_degrees_of`.
_DEGREES = 0.05, 1e4
#: Largest number that a stored prior may contain.
_MOST = 1e6


@dataclass(frozen=True, kw_only=True)
class Component:
    """Estimated variance of a figure's logarithm, such as the variance between processes.

    Attributes:
        degrees: degrees of freedom in the estimate, n - 1 for n processes.
    """

    variance: float
    degrees: float

    @property
    def spread(self) -> float:
        """Return the standard deviation between processes, as a fraction of the figure."""
        return math.expm1(math.sqrt(self.variance))


class Prior(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Typical variance between processes for a class of figures, known before any is measured.

    Attributes:
        variance: typical variance of the logarithm between processes, s₀².
        degrees: degrees of freedom ν₀; few if figures in the class vary by different amounts.
        server: log variance between the servers that fork processes; more processes do not lower
            it.
        cells: how many figures the prior is based on, each measured by several processes.
        origin: devices that these figures were measured on.
    """

    variance: Annotated[float, msgspec.Meta(gt=0, le=_MOST)]
    degrees: Annotated[float, msgspec.Meta(gt=0, le=_MOST)]
    server: Annotated[float, msgspec.Meta(ge=0, le=_MOST)] = 0.0
    cells: Annotated[int, msgspec.Meta(ge=0)] = 0
    origin: str = ""

    def on(self, machine: Sequence[Component]) -> Prior:
        """Return the prior for one machine, refined by figures of this class measured on it.

        log s₀² becomes the precision-weighted mean over the prior and the machine's figures.
        Uncertainty in this mean lowers the degrees. The prior itself counts as one value with the
        variance `_BETWEEN_MACHINES`.

        Args:
            machine: variance of each figure measured on the machine; empty on a new machine.
        """
        from scipy import special

        # log s² of ν degrees has the mean log σ² + ψ(ν/2) - log(ν/2) and the variance ψ′(ν/2)
        bias = float(special.digamma(self.degrees / 2)) - math.log(self.degrees / 2)
        spread = float(special.polygamma(1, self.degrees / 2))
        logs, weights = [math.log(self.variance)], [1 / _BETWEEN_MACHINES]
        for figure in machine:
            half = figure.degrees / 2
            own_bias = float(special.digamma(half)) - math.log(half)
            logs.append(math.log(max(figure.variance, LEAST_VARIANCE)) - own_bias + bias)
            weights.append(1 / (float(special.polygamma(1, half)) + spread))
        center = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)
        degrees = _degrees_of(spread + 1 / sum(weights))
        return msgspec.structs.replace(
            self, variance=math.exp(center), degrees=degrees, cells=self.cells + len(machine)
        )


def _degrees_of(variance: float) -> float:
    """Return the degrees of freedom ν that give log s² this variance: ψ′(ν / 2) = `variance`.

    It is found by Newton's method on 1 / ψ′, which is nearly linear, starting from below, and is
    limited to `_DEGREES`. Source: Smyth 2004, appendix.
    """
    from scipy import special

    half, step = 0.5 + 1 / variance, 1.0
    while abs(step) > 1e-9 * half:
        slope = float(special.polygamma(1, half))
        step = slope * (1 - slope / variance) / float(special.polygamma(2, half))
        half += step
    return min(max(2 * half, _DEGREES[0]), _DEGREES[1])
