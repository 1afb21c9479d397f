"""Proof: the kernels that cuDNN's calls launched while a model ran, told apart by markers in the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from perfexp.algorithms import convolution_plan as plans
from perfexp.algorithms.convolution_plan import Plan
from perfexp.algorithms.coverage import LayerStatus, PassReport
from perfexp.algorithms.families import judge

#: A kernel that torch has for spinning, of which a few cycles mark a place in the queue.
_MARKER = "spin_kernel"
_MARKER_CYCLES = 1


@dataclass
class Seen:
    """Kernels of each plan that ran, in the order in which it launched them.

    Attributes:
        kernels: names by plan.
    """

    kernels: dict[Plan, tuple[str, ...]] = field(default_factory=dict)

    def proven(self, report: PassReport, plan: Plan | None) -> PassReport:
        """A pass with what was seen of it: whether the kernels are those of the algorithm that cuDNN was handed.

        Args:
            report: of a pass, which is returned as it is where nothing was seen.
            plan: that computed it, or None.
        """
        if plan is None or report.status is not LayerStatus.ok:
            return report
        kernels = self.kernels.get(plan, ())
        if not kernels:
            return replace(report, status=LayerStatus.unproven, reason="its kernels were not seen")
        return judge(report, kernels)


def watch(call: Callable[[], Any]) -> Seen:
    """Run a call once and see which kernels each of its plans launched.

    Args:
        call: on an NVIDIA GPU, on one stream; not a captured graph.
    """
    order: list[Plan] = []

    def around(plan: Plan, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        order.append(plan)
        _mark()
        outputs = run()
        _mark()
        return outputs

    plans.watcher = around
    try:
        names = kernel_names(call)
    finally:
        plans.watcher = None
    between = _between_markers(names)
    return Seen(dict(zip(order, between, strict=True)) if len(between) == len(order) else {})


def kernel_names(call: Callable[[], Any]) -> list[str]:
    """Names of what a call has the device do, in the order in which it ran.

    Copies and fills of memory on other streams than the markers' are left out: those are not of the call. Kernels are,
    since cuDNN has streams of its own for some, which it joins to the caller's.

    Args:
        call: on an NVIDIA GPU.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    assert profiler.profiler is not None
    events = [
        (event.start_ns(), event.device_resource_id(), event.name())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA
    ]
    streams = {stream for _, stream, name in events if _MARKER in name}
    return [name for _, stream, name in sorted(events) if stream in streams or not name.startswith("Mem")]


def _mark() -> None:
    torch.cuda._sleep(_MARKER_CYCLES)  # type: ignore[no-untyped-call]


def _between_markers(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The names between each first and second marker."""
    found: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for name in names:
        if _MARKER in name:
            if inside is not None:
                found.append(tuple(inside))
            inside = [] if inside is None else None
        elif inside is not None:
            inside.append(name)
    return found
