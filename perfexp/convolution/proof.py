"""Proof: find the kernels that each cuDNN call launched, with markers in the stream.

With `algorithm.verify=true`, one model call runs under torch's profiler. A marker is a spin kernel
of one cycle before and after each plan; the kernels between two markers belong to the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from perfexp.convolution import convolution_plan as plans
from perfexp.convolution.convolution_plan import ConvolutionPlan
from perfexp.convolution.coverage import LayerStatus, PassReport
from perfexp.convolution.families import judge

#: Torch's spin kernel; a few cycles of it mark a place in the stream.
MARKER = "spin_kernel"
_MARKER_CYCLES = 1


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


def mark() -> None:
    """Mark a place in the current stream."""
    torch.cuda._sleep(_MARKER_CYCLES)


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
