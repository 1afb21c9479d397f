"""Report: what computed each convolution of a model, and how much of the work ran as asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from perfexp.algorithms.passes import Pass
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric

#: Layers that a diagnostic names before it counts the rest.
_NAMED = 3


class LayerStatus(StrEnum):
    """Whether a layer was computed by what was asked for.

    `fallback` is torch's own in its place, `substituted` a library that ran another algorithm than it was handed,
    `unproven` a kernel of which it is not known what it belongs to.
    """

    ok = "ok"
    fallback = "fallback"
    substituted = "substituted"
    unproven = "unproven"
    unseen = "unseen"


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """What one pass of a layer did.

    Attributes:
        which: pass.
        selected: what computed it (`cudnn.gemm`, `torch.fft`, `default`).
        status: whether that is what was asked for.
        reason: why not.
        flops: of all calls, two for each multiplication that the definition of a convolution has.
        workspace_bytes: memory that it took beside its tensors; None where nobody says.
        seconds: time of each engine that was tried, where `fastest` tried some.
        errors: relative L2 error of each against float64.
        kept_since: date and time when they were tried, ISO 8601, where an earlier process did.
        ran: the algorithm whose kernels were seen; None where nobody looked.
        kernels: that were seen.
    """

    which: Pass
    selected: str
    status: LayerStatus
    reason: str | None = None
    flops: int = 0
    workspace_bytes: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    kept_since: str | None = None
    ran: str | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What one layer did with inputs of one shape.

    Attributes:
        name: as the model calls it.
        requested: algorithm that was asked for.
        input_shape: of the inputs.
        calls: in one call of the model.
        dtype: in which it was computed.
        math: which products cuDNN was allowed (`default`, `tensor_op`, `fma`); None where it was not asked.
        passes: that ran; none where nothing was computed.
    """

    name: str
    requested: str
    input_shape: tuple[int, ...] = ()
    calls: int = 0
    dtype: str | None = None
    math: str | None = None
    passes: tuple[PassReport, ...] = ()

    @property
    def used(self) -> str | None:
        """What computed the outputs, without its backend: `gemm`, or `default` for torch's own; None for nothing."""
        return self.passes[0].selected.rpartition(".")[2] if self.passes else None

    @property
    def status(self) -> LayerStatus:
        """`ok` if all passes are, otherwise that of the first that is not."""
        others = [each.status for each in self.passes if each.status is not LayerStatus.ok]
        return others[0] if others else LayerStatus.ok if self.passes else LayerStatus.unseen

    @property
    def reason(self) -> str | None:
        """Why the status is not `ok`, with the passes that it is true of where it is not true of all."""
        if not self.passes:
            return "it computed no convolution"
        others = [each for each in self.passes if each.reason is not None]
        reasons = list(dict.fromkeys(str(each.reason) for each in others))
        if not reasons or (len(reasons) == 1 and len(others) == len(self.passes)):
            return reasons[0] if reasons else None
        return ", ".join(f"{each.which.replace('_', ' ')}: {each.reason}" for each in others)

    @property
    def flops(self) -> int:
        """Of all passes."""
        return sum(each.flops for each in self.passes)

    def facts(self) -> dict[str, Any]:
        """Everything as JSON values."""
        derived = {"used": self.used, "status": self.status.value, "reason": self.reason, "flops": self.flops}
        passes = [{**asdict(each), "which": each.which.value, "status": each.status.value} for each in self.passes]
        return {**asdict(self), **derived, "passes": passes}


@dataclass(frozen=True, kw_only=True)
class AlgorithmReport:
    """What all 2-D convolutions of a model did.

    A layer has an entry for each kind of inputs (shape, data type, memory format, gradients that are wanted).

    Attributes:
        name: algorithm that was asked for.
        layers: in the order in which the model names them.
    """

    name: str
    layers: tuple[LayerReport, ...]

    @property
    def _passes(self) -> list[PassReport]:
        return [each for layer in self.layers for each in layer.passes]

    @property
    def share(self) -> float | None:
        """Share of the convolutions' FLOPs, those of the backward passes included, that ran as asked; None for none."""
        total = sum(each.flops for each in self._passes)
        asked = sum(each.flops for each in self._passes if each.status is LayerStatus.ok)
        return asked / total if total else None

    @property
    def workspace_peak_bytes(self) -> int | None:
        """The largest workspace of any call; None where nobody says."""
        return max((each.workspace_bytes for each in self._passes if each.workspace_bytes is not None), default=None)

    def _with(self, status: LayerStatus) -> list[LayerReport]:
        """Layers of which a pass has a status."""
        return [layer for layer in self.layers if any(each.status is status for each in layer.passes)]

    def metrics(self) -> list[Metric]:
        """The share and the workspace as metrics of a point."""
        reason = None if self.share is not None else "no 2-D convolution ran"
        peak = self.workspace_peak_bytes
        unknown = None if peak is not None else "only cuDNN tells the workspace of an algorithm"
        return [
            Metric(name="algorithm/flops_share", value=self.share, unit="1", reason=reason),
            Metric(name="algorithm/workspace_peak_bytes", value=peak, unit="bytes", reason=unknown),
        ]

    def facts(self) -> dict[str, Any]:
        """Everything as JSON values."""
        backends = {each.selected.partition(".")[0] for each in self._passes if each.status is LayerStatus.ok}
        layers = [layer.facts() for layer in self.layers]
        return {"name": self.name, "backends": sorted(backends), "flops_share": self.share, "layers": layers}

    def doubts(self) -> list[Diagnostic]:
        """One for each way in which layers did not run as requested."""
        share = "none" if self.share is None else f"{self.share:.1%}"
        doubts = []
        if layers := _named(self._with(LayerStatus.fallback)):
            doubts.append(diagnostics.make("algorithm_fallback", share=share, algorithm=self.name, layers=layers))
        if layers := _named(self._with(LayerStatus.substituted)):
            doubts.append(diagnostics.make("algorithm_substituted", algorithm=self.name, layers=layers))
        if layers := _named(self._with(LayerStatus.unproven)):
            doubts.append(diagnostics.make("algorithm_unproven", algorithm=self.name, layers=layers))
        return doubts


def _named(layers: list[LayerReport]) -> str:
    rest = [f"{len(layers) - _NAMED} more"] if len(layers) > _NAMED else []
    return "; ".join([f"{layer.name}: {layer.reason}" for layer in layers[:_NAMED]] + rest)
