"""Proof: find the kernels that each convolution or attention launched, with markers in the stream.

With `algorithm.verify=true` or `execution.attention_verify=true`, one model call runs under torch's
profiler. A marker is a spin kernel of one cycle before and after each cuDNN plan and attention; the
kernels between two markers belong to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from perfexp.convolution import convolution_plan as plans
from perfexp.convolution.convolution_plan import ConvolutionPlan
from perfexp.convolution.coverage import AlgorithmReport, LayerStatus, Pass, PassReport
from perfexp.convolution.families import judge
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import ATTENTION_COVERAGE, ATTENTION_PROVEN
from perfexp.records.record import Metric

#: Torch's spin kernel; a few cycles of it mark a place in the stream.
MARKER = "spin_kernel"
_MARKER_CYCLES = 1
#: Kernel names of each fused backend on a GPU, and operator names on a CPU; the first match counts,
#: because cuDNN's names contain `flash`, too.
_FUSED = {
    "cudnn": re.compile(r"cudnn\w*sdpa|_cudnn_attention", re.IGNORECASE),
    "efficient": re.compile(r"fmha_cutlass|efficient_attention", re.IGNORECASE),
    "flash": re.compile(r"flash(_fwd|_bwd|::|_attention)|FlashAttn", re.IGNORECASE),
}
#: Kernels of products and of softmax, by which `math` is composed.
_PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|bmm|xmma|matmul|splitK|mm$", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax", re.IGNORECASE)
#: Steps from an output to the backward node of a fused backend, which may lie behind a slice.
_MOST_STEPS = 4


@dataclass
class Seen:
    """Observed kernels of each plan, in launch order; empty if nothing was observed."""

    kernels: dict[ConvolutionPlan, tuple[str, ...]] = field(default_factory=dict)

    def proven(self, report: PassReport, plan: ConvolutionPlan | None) -> PassReport:
        """Return a pass report with observed kernels and a verdict on them.

        Args:
            report: report without a proof; only the status `requested` can be proven.
            plan: cuDNN plan that computed the pass; None for other engines.
        """
        if plan is None or report.status is not LayerStatus.requested:
            return report
        kernels = self.kernels.get(plan, ())
        if not kernels:
            return replace(report, status=LayerStatus.unproven, reason="its kernels were not seen")
        return judge(report, kernels)


def watch(call: Callable[[], Any]) -> Seen:
    """Run a call once, on one stream and not as a graph, and record each plan's kernels.

    The result is empty if the profiler did not see two markers per plan.
    """
    order: list[ConvolutionPlan] = []

    def run_between_marks(plan: ConvolutionPlan, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a plan between two markers, and note its place in the order."""
        order.append(plan)
        mark()
        outputs = run()
        mark()
        return outputs

    plans.watcher = run_between_marks
    try:
        names = kernel_names(call)
    finally:
        plans.watcher = None
    between = between_markers(names)
    if len(between) != len(order):
        return Seen()
    return Seen(dict(zip(order, between, strict=True)))


def kernel_names(call: Callable[[], Any], *, is_cuda: bool = True) -> list[str]:
    """Return the names of a call's activities on a GPU, or of its operators on a CPU, in order.

    Memory copies and fills on streams without markers do not belong to the call and are left out.
    Kernels on such streams are included: cuDNN runs some kernels on its own streams and joins them
    to the caller's. Proofs of convolution algorithms and attention backends profile with it.
    """
    kind = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    synchronize: Callable[[], Any] = torch.cuda.synchronize if is_cuda else bool
    synchronize()
    with profile(activities=[kind]) as profiler:
        call()
        synchronize()
    assert profiler.profiler is not None
    events = [
        (event.start_ns(), event.device_resource_id(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == (DeviceType.CUDA if is_cuda else DeviceType.CPU)
    ]
    marked = {stream for _, stream, name in events if MARKER in name}
    return [
        name
        for _, stream, name in sorted(events)
        if not is_cuda or stream in marked or not name.startswith("Mem")
    ]


def mark(device_type: str = "cuda") -> None:
    """Mark a place in the current stream, or among a CPU's operators."""
    if device_type == "cuda":
        torch.cuda._sleep(_MARKER_CYCLES)
    else:
        with torch.profiler.record_function(MARKER):
            pass


def between_markers(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the names between each pair of markers, an entry per pair.

    For example `[("a", "b"), ("c",)]` for `M a b M x M c M` with markers M.
    """
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for name in names:
        if MARKER in name and inside is None:
            inside = []
        elif MARKER in name:
            groups.append(tuple(inside or ()))
            inside = None
        elif inside is not None:
            inside.append(name)
    return groups


def fused_backend(kernel: str) -> str | None:
    """Return the fused backend that a kernel belongs to; None for other kernels."""
    return next((name for name, pattern in _FUSED.items() if pattern.search(kernel)), None)


def backend_of(kernels: Collection[str]) -> str | None:
    """Return the backend that a call's kernels belong to; None if it is not known.

    Without a fused kernel, a product and a softmax together are `math`.
    """
    fused = {name for name in map(fused_backend, kernels) if name is not None}
    if fused:
        return fused.pop() if len(fused) == 1 else None
    is_composed = any(map(_PRODUCT.search, kernels)) and any(map(_SOFTMAX.search, kernels))
    return "math" if is_composed else None


@dataclass
class AttentionSeen:
    """Kernels of a shape's passes in an observed call, and all kernels of that call.

    Attributes:
        everything: names of all kernels; None if nothing was observed.
    """

    kernels: dict[Pass, list[str]] = field(default_factory=dict)
    everything: Sequence[str] | None = None

    def add(self, pass_type: Pass, kernels: Sequence[str]) -> None:
        """Add the kernels of one attention call."""
        self.kernels.setdefault(pass_type, []).extend(kernels)

    def proven(self, report: PassReport) -> PassReport:
        """Return a pass report with the observed kernels and a verdict on them.

        Only the status `requested` changes: to `ok`, `substituted` or `unproven`.
        """
        if self.everything is None or report.status is not LayerStatus.requested:
            return report
        kernels = self.kernels.get(report.which, [])
        if not kernels:
            return self._of_call(report)
        backend = backend_of(kernels)
        status, reason = LayerStatus.ok, None
        if backend is None:
            unknown = ", ".join(dict.fromkeys(kernels))
            status, reason = LayerStatus.unproven, f"not known what {unknown[:200]} computes"
        elif backend != report.selected:
            status, reason = LayerStatus.substituted, f"torch ran {backend}"
        names = tuple(dict.fromkeys(kernels))
        return replace(report, status=status, reason=reason, ran=backend, kernels=names)

    def _of_call(self, report: PassReport) -> PassReport:
        """Judge a pass without kernels of its own by the whole call.

        That is a pass of a compiled call, or the backward pass of `math`, whose products are not
        marked.
        """
        everything = self.everything or ()
        fused = {name for name in map(fused_backend, everything) if name is not None}
        marked_names = {name for names in self.kernels.values() for name in names}
        if report.selected == "math":
            unmarked = [name for name in everything if name not in marked_names]
            is_ran = not any(map(fused_backend, unmarked)) and any(map(_PRODUCT.search, everything))
        else:
            is_ran = fused == {report.selected}
        if is_ran:
            return replace(report, status=LayerStatus.ok, ran=report.selected)
        reason = "its kernels were not seen"
        return replace(report, status=LayerStatus.unproven, reason=reason)


def watch_attention(
    call: Callable[[], Any], device: str
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Run a call under the profiler; return its kernels between markers, and all of them."""
    names = kernel_names(call, is_cuda=torch.device(device).type == "cuda")
    return between_markers(names), [name for name in names if MARKER not in name]


def mark_backward(outputs: torch.Tensor, begin: Callable[[], None]) -> None:
    """Mark the backward pass of a fused backend; `math` has none of its own.

    Args:
        outputs: outputs of attention, whose backward node is searched for.
        begin: called when the backward pass begins.
    """
    node: Any = outputs.grad_fn
    for _ in range(_MOST_STEPS):
        if node is None:
            return
        if "ScaledDotProduct" in node.name() or "Attention" in node.name():
            break
        node = node.next_functions[0][0] if node.next_functions else None
    else:
        return
    device = outputs.device.type

    def before(*_: Any) -> None:
        begin()
        mark(device)

    node.register_prehook(before)
    node.register_hook(lambda *_: mark(device))


class AttentionReport(AlgorithmReport):
    """Report on a model's attention, with an entry for each kind of inputs."""

    def metrics(self) -> list[Metric]:
        """Return FLOPs shares as metrics of a point; none for torch's own choice."""
        if self.name == "auto":
            return []
        proven = [
            attention_pass
            for attention_pass in self._passes
            if attention_pass.status is LayerStatus.ok
        ]
        return [
            Metric.of(ATTENTION_COVERAGE, self.share),
            Metric.of(ATTENTION_PROVEN, self._share_of(proven)),
        ]

    def doubts(self) -> list[Diagnostic]:
        """Return diagnostics about attention that another backend computed."""
        share, name, doubts = self.share or 0.0, self.name, []
        if shapes := self._named(LayerStatus.fallback):
            doubts.append(
                diagnostics.make("attention_fallback", share=share, backend=name, shapes=shapes)
            )
        if shapes := self._named(LayerStatus.substituted):
            doubts.append(diagnostics.make("attention_substituted", backend=name, shapes=shapes))
        if shapes := self._named(LayerStatus.unproven):
            doubts.append(diagnostics.make("attention_unproven", backend=name, shapes=shapes))
        return doubts
