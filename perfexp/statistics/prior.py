"""Prior: how much a class of figures differs between processes, before any of them measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from perfexp.statistics.moderated import Component

#: Variance of log s₀² between machines: one in eight is three times as noisy as the prior, or more.
_BETWEEN_MACHINES = 2.0
#: Least variance of a figure: of a standard deviation of 0.01 %, below which figures are rounded.
LEAST_VARIANCE = 1e-8
#: Range of the degrees of freedom of a variance of log s².
_DEGREES = 0.05, 1e4
#: Largest number of a stored prior.
_MOST = 1e6


class Prior(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Typical variance of a class of figures between processes, before any is measured.

    Attributes:
        variance: typical variance of the logarithm between processes, s₀².
        degrees: degrees of freedom ν₀ that this is worth: few if figures of the class differ much from each other.
        server: variance between the servers that processes are forked from, which more processes do not lower.
        cells: number of figures that show it, each measured by several processes.
        origin: devices of these figures.
    """

    variance: Annotated[float, msgspec.Meta(gt=0, le=_MOST)]
    degrees: Annotated[float, msgspec.Meta(gt=0, le=_MOST)]
    server: Annotated[float, msgspec.Meta(ge=0, le=_MOST)] = 0.0
    cells: Annotated[int, msgspec.Meta(ge=0)] = 0
    origin: str = ""

    def on(self, machine: Sequence[Component]) -> Prior:
        """Return the prior of one machine, by figures of this class that were measured on it.

        The logarithm of s₀² is the mean of that of all machines and of the machine's figures, weighted by their
        precisions. Its uncertainty lowers the degrees: without figures of the machine by `_BETWEEN_MACHINES`.
        """
        from scipy import special

        bias = float(special.digamma(self.degrees / 2)) - math.log(self.degrees / 2)
        spread = float(special.polygamma(1, self.degrees / 2))
        logs, weights = [math.log(self.variance)], [1 / _BETWEEN_MACHINES]
        for one in machine:
            half = one.degrees / 2
            logs.append(
                math.log(max(one.variance, LEAST_VARIANCE))
                - float(special.digamma(half))
                + math.log(half)
                + bias
            )
            weights.append(1 / (float(special.polygamma(1, half)) + spread))
        center = sum(weight * log for weight, log in zip(weights, logs, strict=True)) / sum(weights)
        degrees = _degrees_of(spread + 1 / sum(weights))
        return msgspec.structs.replace(
            self, variance=math.exp(center), degrees=degrees, cells=self.cells + len(machine)
        )


def _degrees_of(variance: float) -> float:
    """Return the degrees ν of a variance s² whose logarithm has this variance: ψ′(ν / 2).

    Source: Newton's method on 1 / ψ′, which is nearly linear, from below (Smyth 2004, appendix).
    """
    from scipy import special

    half, step = 0.5 + 1 / variance, 1.0
    while abs(step) > 1e-9 * half:
        slope = float(special.polygamma(1, half))
        step = slope * (1 - slope / variance) / float(special.polygamma(2, half))
        half += step
    return min(max(2 * half, _DEGREES[0]), _DEGREES[1])
