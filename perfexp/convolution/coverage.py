"""Algorithm coverage: the engine of each convolution, and the FLOPs share that ran as requested.

The reports become a point's facts, metrics and diagnostics in the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import COVERAGE, PROVEN, WORKSPACE
from perfexp.records.races import is_own_choice
from perfexp.records.record import Metric

#: Number of layers that a diagnostic names before it counts the rest.
_NAMED = 3


class Pass(StrEnum):
    """A convolution within a layer: its outputs, its input gradient or its weight gradient.

    Attention has a single backward pass.
    """

    forward = "forward"
    backward_data = "backward_data"
    backward_filter = "backward_filter"
    backward = "backward"


class LayerStatus(StrEnum):
    """Whether a layer was computed as requested.

    * `ok`: yes, by perfexp or torch code, or by a library with observed kernels.
    * `requested`: a library was given the algorithm, but its kernels were not observed.
    * `fallback`: torch computed instead.
    * `substituted`: the library ran another algorithm.
    * `unproven`: a kernel that ran is unknown.
    * `unseen`: nothing was computed.
    """

    ok = "ok"
    requested = "requested"
    fallback = "fallback"
    substituted = "substituted"
    unproven = "unproven"
    unseen = "unseen"


#: Statuses of a pass that ran as requested as far as known, the weaker status first.
AS_REQUESTED = (LayerStatus.requested, LayerStatus.ok)


def _precedence(status: LayerStatus) -> int:
    """Return the sort key of a status: the least favorable first."""
    return AS_REQUESTED.index(status) if status in AS_REQUESTED else -1


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Why and how an engine computes a pass.

    Attributes:
        reason: why the engine is not the requested engine; None if it is.
        workspace_bytes: memory beyond the tensors; None if unknown.
        seconds: time of each engine in the deciding race of `fastest`.
        launching: how that race launched the engines: `captured`, `eager`, or `clock` on a CPU.
        races: `seconds` and `speedup` over torch's choice, by launching and engine. Interval ends
            (95 %) have the suffixes `_low` and `_high`.
        errors: relative L2 error of each tried engine against float64.
        not_captured: why the engines were not captured.
        not_cached: why the choice is not stored for other processes.
        kept_since: date and time of the trial (ISO 8601), if an earlier process made it.
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
    """Report on a layer's pass.

    Attributes:
        selected: engine that computed the pass, for example `cudnn.gemm`, `torch.fft` or `default`.
        flops: FLOPs of all calls, counting two per multiplication in the analytic convolution.
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
    """Report on a layer for a given input shape, with its calls and passes in a single model call.

    Attributes:
        name: name of the module, for example `layer1.0.conv1`.
        requested: algorithm that the user requested for the layer.
        input_shape: (N, C, H, W), or (C, H, W) without a batch.
        dtype: data type of the computation, for example `float16`.
        math: cuDNN's math type (`default`, `tensor_op`, `fma`); None if cuDNN did not compute.
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
        """Return the algorithm of the forward pass without its backend, for example `gemm`.

        The result is `default` for torch's own choice and None if nothing was computed.
        """
        return self.passes[0].selected.rpartition(".")[2] if self.passes else None

    @property
    def status(self) -> LayerStatus:
        """Return the status of the first pass that is not as requested.

        If all passes are, return `requested` if any pass has that status, otherwise `ok`.
        """
        statuses = sorted((report.status for report in self.passes), key=_precedence)
        return statuses[0] if statuses else LayerStatus.unseen

    @property
    def reason(self) -> str | None:
        """Return why the status is not `ok`, with the affected passes unless all are affected."""
        if not self.passes:
            return "it computed no convolution"
        reasons = {report.reason for report in self.passes}
        if len(reasons) == 1:
            return reasons.pop()
        others = [report for report in self.passes if report.reason is not None]
        return ", ".join(f"{report.which.replace('_', ' ')}: {report.reason}" for report in others)

    @property
    def flops(self) -> int:
        """Return the FLOPs of all passes."""
        return sum(report.flops for report in self.passes)

    def facts(self) -> dict[str, Any]:
        """Return all fields and derived values as JSON, for a layer's entry in the record."""
        return {
            **asdict(self),
            "used": self.used,
            "status": self.status,
            "reason": self.reason,
            "flops": self.flops,
        }


@dataclass(frozen=True, kw_only=True)
class AlgorithmReport:
    """Report on a model's 2-D convolutions, with an entry for each layer and kind of inputs.

    Attributes:
        name: algorithm that the user requested.
        foreign: where the kernel table was learned, if on another architecture or with another
            library.
    """

    name: str
    layers: tuple[LayerReport, ...]
    foreign: str | None = None

    @property
    def _passes(self) -> list[PassReport]:
        """Return the reports on all passes of all layers."""
        return [report for layer in self.layers for report in layer.passes]

    @property
    def share(self) -> float | None:
        """Return the share of convolution FLOPs that ran as requested; None without FLOPs.

        Backward passes count, too.
        """
        return self._share_of(report for report in self._passes if report.status in AS_REQUESTED)

    @property
    def proven_share(self) -> float | None:
        """Return the part of `share` run by perfexp code or by observed kernels.

        Torch's own choice does not count.
        """
        return self._share_of(
            report
            for report in self._passes
            if report.status is LayerStatus.ok and not is_own_choice(report.selected, report.status)
        )

    def _share_of(self, reports: Iterable[PassReport]) -> float | None:
        """Return the share of all FLOPs that these passes compute; None without FLOPs."""
        total = sum(report.flops for report in self._passes)
        return sum(report.flops for report in reports) / total if total else None

    @property
    def workspace_peak_bytes(self) -> int | None:
        """Return the largest workspace of any call in bytes; None if unknown, as without cuDNN."""
        sizes = (
            report.workspace_bytes for report in self._passes if report.workspace_bytes is not None
        )
        return max(sizes, default=None)

    def _named(self, status: LayerStatus) -> str:
        """Return the first layers with a pass of this status, each with its reason.

        The others are counted. The text is for a diagnostic, and empty if there is no such layer.
        """
        reasons = [
            f"{layer.name}: {layer.reason}"
            for layer in self.layers
            if any(report.status is status for report in layer.passes)
        ]
        if len(reasons) > _NAMED:
            reasons[_NAMED:] = [f"{len(reasons) - _NAMED} more"]
        return "; ".join(reasons)

    def metrics(self) -> list[Metric]:
        """Return FLOPs shares and peak workspace as metrics of a point."""
        share, proven, peak = self.share, self.proven_share, self.workspace_peak_bytes
        reason = None if share is not None else "no 2-D convolution ran"
        unknown = None if peak is not None else "only cuDNN reports the workspace of an algorithm"
        return [
            Metric.of(COVERAGE, share, reason=reason),
            Metric.of(PROVEN, proven, reason=reason),
            Metric.of(WORKSPACE, peak, reason=unknown),
        ]

    def facts(self) -> dict[str, Any]:
        """Return all layers and derived values as JSON, for the point's `algorithm` facts."""
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
        """Return diagnostics about work that did not run as requested."""
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
