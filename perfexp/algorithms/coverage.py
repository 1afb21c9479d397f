"""Algorithm coverage: the engine of each convolution of a model, and the share of FLOPs that ran as requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import COVERAGE, PROVEN, WORKSPACE
from perfexp.records.races import is_own_choice
from perfexp.records.record import Metric

#: Layers that a diagnostic names before it counts the rest.
_NAMED = 3


class Pass(StrEnum):
    """One convolution of a layer: the outputs, the gradient of the inputs, or the gradient of the weights."""

    forward = "forward"
    backward_data = "backward_data"
    backward_filter = "backward_filter"


class LayerStatus(StrEnum):
    """Whether a layer was computed as requested.

    `ok`: yes, by code of perfexp or torch, or by a library whose kernels were observed. `requested`: a library was
    handed the algorithm, and its kernels were not observed. `fallback`: torch computed in the algorithm's place.
    `substituted`: the library ran another algorithm than requested. `unproven`: a kernel that ran is unknown.
    `unseen`: nothing was computed.
    """

    ok = "ok"
    requested = "requested"
    fallback = "fallback"
    substituted = "substituted"
    unproven = "unproven"
    unseen = "unseen"


#: Statuses of a pass that nothing speaks against, the weaker one first.
AS_REQUESTED = (LayerStatus.requested, LayerStatus.ok)


def _precedence(status: LayerStatus) -> int:
    return AS_REQUESTED.index(status) if status in AS_REQUESTED else -1


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Why and how an engine computes a pass.

    Attributes:
        reason: why it is not the requested one, or None if it is.
        workspace_bytes: memory beyond the tensors; None where unknown.
        seconds: time of each engine in the race of `fastest` that decided.
        launching: how the engines of that race were launched: `captured`, `eager`, or `clock` on a CPU.
        races: `seconds` and `speedup` over torch's choice, with the ends of their 95 % intervals (`_low`, `_high`), by
            launching and engine.
        errors: relative L2 error of each tried engine against float64.
        not_captured: reason why the engines were not captured.
        not_cached: reason why the choice is not stored for other processes.
        kept_since: date and time of the trial, ISO 8601, where an earlier process made it.
    """

    reason: str | None = None
    workspace_bytes: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    launching: str | None = None
    races: Mapping[str, Mapping[str, Mapping[str, float | None]]] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    not_captured: str | None = None
    not_cached: str | None = None
    kept_since: str | None = None


@dataclass(frozen=True, kw_only=True)
class PassReport(EngineFacts):
    """Report of one pass of a layer.

    Attributes:
        selected: engine that computed the pass (`cudnn.gemm`, `torch.fft`, `default`).
        flops: FLOPs of all calls, two per multiplication in the definition of a convolution.
        ran: algorithm of the observed kernels; None without profiling.
    """

    which: Pass
    selected: str
    status: LayerStatus
    flops: int = 0
    ran: str | None = None
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Report of one layer for inputs of one shape, with the calls and passes in one call of the model.

    `math` is cuDNN's math type (`default`, `tensor_op`, `fma`), None where cuDNN did not compute.
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
        """Algorithm of the outputs, without its backend: `gemm`, or `default` for torch's own; None for nothing."""
        return self.passes[0].selected.rpartition(".")[2] if self.passes else None

    @property
    def status(self) -> LayerStatus:
        """The status of the first pass that is not as requested, otherwise `requested` if any pass is, or `ok`."""
        statuses = sorted((report.status for report in self.passes), key=_precedence)
        return statuses[0] if statuses else LayerStatus.unseen

    @property
    def reason(self) -> str | None:
        """Why the status is not `ok`, with the affected passes where not all are affected."""
        if not self.passes:
            return "it computed no convolution"
        reasons = {report.reason for report in self.passes}
        if len(reasons) == 1:
            return reasons.pop()
        others = [report for report in self.passes if report.reason is not None]
        return ", ".join(f"{report.which.replace('_', ' ')}: {report.reason}" for report in others)

    @property
    def flops(self) -> int:
        """FLOPs of all passes."""
        return sum(report.flops for report in self.passes)

    def facts(self) -> dict[str, Any]:
        """All fields and derived values as JSON."""
        derived = {
            "used": self.used,
            "status": self.status,
            "reason": self.reason,
            "flops": self.flops,
        }
        return {**asdict(self), **derived}


@dataclass(frozen=True, kw_only=True)
class AlgorithmReport:
    """Report of all 2-D convolutions of a model: an entry for each layer and kind of its inputs.

    Attributes:
        foreign: origin of the table of kernels, if it was learned on another architecture or with another library.
    """

    name: str
    layers: tuple[LayerReport, ...]
    foreign: str | None = None

    @property
    def _passes(self) -> list[PassReport]:
        return [report for layer in self.layers for report in layer.passes]

    @property
    def share(self) -> float | None:
        """Share of the convolutions' FLOPs, backward passes included, that ran as requested; None without FLOPs."""
        return self._share_of([report for report in self._passes if report.status in AS_REQUESTED])

    @property
    def proven_share(self) -> float | None:
        """The part of `share` that is by code of perfexp or by observed kernels, without torch's own choice."""
        known = [report for report in self._passes if report.status is LayerStatus.ok]
        return self._share_of(
            [report for report in known if not is_own_choice(report.selected, report.status)]
        )

    def _share_of(self, reports: Sequence[PassReport]) -> float | None:
        total = sum(report.flops for report in self._passes)
        return sum(report.flops for report in reports) / total if total else None

    @property
    def workspace_peak_bytes(self) -> int | None:
        """Largest workspace of any call; None where unknown."""
        known = (
            report.workspace_bytes for report in self._passes if report.workspace_bytes is not None
        )
        return max(known, default=None)

    def _named(self, status: LayerStatus) -> str:
        layers = [
            layer
            for layer in self.layers
            if any(report.status is status for report in layer.passes)
        ]
        rest = [f"{len(layers) - _NAMED} more"] if len(layers) > _NAMED else []
        return "; ".join([f"{layer.name}: {layer.reason}" for layer in layers[:_NAMED]] + rest)

    def metrics(self) -> list[Metric]:
        """FLOPs shares and peak workspace as metrics of a point."""
        share, proven, peak = self.share, self.proven_share, self.workspace_peak_bytes
        reason = None if share is not None else "no 2-D convolution ran"
        unknown = None if peak is not None else "only cuDNN reports the workspace of an algorithm"
        return [
            Metric.of(COVERAGE, share, reason=reason),
            Metric.of(PROVEN, proven, reason=reason),
            Metric.of(WORKSPACE, peak, reason=unknown),
        ]

    def facts(self) -> dict[str, Any]:
        """All fields and derived values as JSON."""
        backends = {
            report.selected.partition(".")[0]
            for report in self._passes
            if report.status in AS_REQUESTED
        }
        layers = [layer.facts() for layer in self.layers]
        return {
            "name": self.name,
            "backends": sorted(backends),
            "flops_share": self.share,
            "layers": layers,
        }

    def doubts(self) -> list[Diagnostic]:
        """Diagnostics where not all of the work ran as requested."""
        share = self.share or 0.0
        doubts = []
        if layers := self._named(LayerStatus.fallback):
            doubts.append(
                diagnostics.make(
                    "algorithm_fallback", share=share, algorithm=self.name, layers=layers
                )
            )
        if layers := self._named(LayerStatus.substituted):
            doubts.append(
                diagnostics.make("algorithm_substituted", algorithm=self.name, layers=layers)
            )
        if layers := self._named(LayerStatus.unproven):
            doubts.append(diagnostics.make("algorithm_unproven", algorithm=self.name, why=layers))
        if self.foreign and any(report.ran for report in self._passes):
            why = f"the table of kernels was {self.foreign}, where names may mean something else"
            doubts.append(diagnostics.make("algorithm_unproven", algorithm=self.name, why=why))
        return doubts
