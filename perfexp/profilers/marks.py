"""Process-wide NVTX ranges, and the start and stop signals for CUDA tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from perfexp.errors import Unsupported
from perfexp.layers.events import Mark, Scope
from perfexp.profilers import Marks, why_not_cuda


class NvtxMarks:
    """Process-wide ranges, which include launches of other threads, above all the backward pass.

    A pushed range belongs to its thread, and autograd launches the backward pass from another one
    (https://docs.pytorch.org/docs/stable/generated/torch.cuda.nvtx.range_start.html).
    """

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        handle = torch.cuda.nvtx.range_start(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_end(handle)


class TorchMarks:
    """Ranges of torch's own profiler."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)


@contextmanager
def captured(device: Any) -> Iterator[Marks]:
    """While entered, tools that wait for cudaProfilerStart record; earlier work on the device is finished first.

    Raises:
        Unsupported: the device is not a CUDA device, or torch was built without NVTX.
    """
    if why := why_not_cuda(device.kind, device.name, rocm=torch.version.hip is not None):
        raise Unsupported(why)
    device.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield NvtxMarks()
    finally:
        device.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


class MarkedModules:
    """A range around each call of a module and of its operations; a `Watch` of `perfexp.layers.marking`."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def begin_overhead(self) -> None:
        """See `Watch`; marking takes host time, which a profile shows unchanged."""

    def end_overhead(self) -> None:
        """See `Watch`; nothing to do."""

    def around(self, mark: Mark | None) -> AbstractContextManager[Any]:
        if mark is None or mark.scope not in (Scope.module, Scope.operation):
            return nullcontext()
        return self._marks.range(mark.path or mark.kind)
