"""Report: which algorithm computed each convolution of a model, and how much of the work ran as asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from perfexp.record import Doubt, Metric

#: Layers that a doubt names before it counts the rest.
_NAMED = 3


class LayerStatus(StrEnum):
    """Whether a layer was computed by what was asked for."""

    ok = "ok"
    fallback = "fallback"
    unseen = "unseen"


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What one layer did with inputs of one shape.

    Attributes:
        name: as the model calls it.
        requested: algorithm that was asked for.
        used: algorithm that computed it; `default` is torch's own choice, None where nothing was computed.
        status: whether they are the same.
        reason: why not.
        input_shape: of the inputs.
        flops: two for each multiplication that the definition of a convolution has.
    """

    name: str
    requested: str
    used: str | None
    status: LayerStatus
    reason: str | None = None
    input_shape: tuple[int, ...] = ()
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class AlgorithmReport:
    """What all 2-D convolutions of a model did.

    A layer has an entry for each shape of its inputs; calls with the same shape are one.

    Attributes:
        name: algorithm that was asked for.
        backend: whose code computes it.
        layers: in the order in which the model names them.
    """

    name: str
    backend: str
    layers: tuple[LayerReport, ...]

    @property
    def share(self) -> float | None:
        """Share of the convolutions' FLOPs that ran as asked; None where none ran."""
        total = sum(layer.flops for layer in self.layers)
        asked = sum(layer.flops for layer in self.layers if layer.status is LayerStatus.ok)
        return asked / total if total else None

    def metric(self) -> Metric:
        """The share as a metric of a point."""
        reason = None if self.share is not None else "no 2-D convolution ran"
        return Metric(name="algorithm/flops_share", value=self.share, unit="1", reason=reason)

    def facts(self) -> dict[str, Any]:
        """Everything as JSON values."""
        layers = [{**asdict(layer), "status": layer.status.value} for layer in self.layers]
        return {"name": self.name, "backend": self.backend, "flops_share": self.share, "layers": layers}

    def doubt(self) -> Doubt | None:
        """What to say where not all of the work ran as asked."""
        others = [layer for layer in self.layers if layer.status is LayerStatus.fallback]
        if not others:
            return None
        named = [f"{layer.name}: {layer.reason}" for layer in others[:_NAMED]]
        rest = [f"{len(others) - _NAMED} more"] if len(others) > _NAMED else []
        share = "none" if self.share is None else f"{self.share:.1%}"
        return Doubt(
            code="algorithm_fallback",
            detail=f"{share} of the convolutions' FLOPs ran as asked ({self.name}); not so {'; '.join(named + rest)}",
            remedy="read the time as that of a mix, give these layers another algorithm by algorithm.layers, or refuse "
            "such a model by algorithm.on_unsupported=error",
        )
