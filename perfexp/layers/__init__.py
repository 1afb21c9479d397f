"""Layers: where the time of a call goes, module by module and operation by operation, and whether the sum closes.

What is measured is described here, free of torch; `perfexp.layers.profiling` measures it on a GPU, by torch's profiler,
`perfexp.layers.stamps` on a CPU, by stamps of the host's clock. Conventions:

* **Rows** are those of `perfexp.work`, with the same keys: a call of one of torch's own modules, or of a module without
  parts, is a row as long as no other module is called in it; otherwise each function of torch's that a module's code
  calls is one. What belongs to no module has rows of its own: the loss, the optimizer's step, the data.
* **Passes**: kernels of the backward pass go to the row of the forward operator that they are the gradient of, by
  autograd's sequence numbers. The sum of gradients that meet at a tensor that is used twice is the pass `accumulation`
  of the row whose gradient came last; the sum in a parameter's `.grad` is a row `AccumulateGrad` of the parameter's
  module. What is computed once more for the backward pass is backward.
* **A call** on a GPU reaches from the end of the work before it to the end of its last kernel, so that calls one after
  the other partition the time. Every nanosecond of it is the time of a kernel, or a **gap** before one, which belongs
  to the row of the kernel that ends it. While several kernels run at once, on whatever streams, each has an equal part
  of that time; what an equal part leaves over in nanoseconds goes to the one that began first.
* **Unattributed** is what could not be joined to a row, by the kernel's name. It is part of the sum.
* **Closure**: the call as it was profiled against the same call as it was timed without a profiler. The sum is the
  profiled call by construction, and is never made to fit the other one.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from perfexp.records.diagnostics import Diagnostic


class Pass(StrEnum):
    """What a row does during its time."""

    forward = "forward"
    backward = "backward"
    accumulation = "accumulation"
    loss = "loss"
    optimizer_step = "optimizer_step"
    data = "data"
    other = "other"


class Method(StrEnum):
    """How the times were taken.

    From kernels of a queue that was held full, of a CUDA graph in such a queue, or of a queue left to itself; or by
    stamps of the host.
    """

    queue = "queue"
    graph = "graph"
    unheld = "unheld"
    stamps = "stamps"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What identifies a row.

    Attributes:
        path: of the module, as in `perfexp.work.Row`; None for what is in no module of the model.
        call: which of the module's calls, from 0.
        operation: which of the operations of that call, from 0; None for a module, and for what a module's code does
            outside of any operation.
        kind: class of the module or name of the operation; of what is in no module, which part of the call it is.
        which: pass.
    """

    path: str | None
    call: int
    operation: int | None
    kind: str
    which: Pass


class Kernel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A kernel of a row, over all calls.

    Attributes:
        name: in full.
        count: how often it ran, in all calls together.
        seconds: in all calls together, its share where others ran at the same time.
    """

    name: str
    count: int
    seconds: float


class RowTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The times of a row.

    Attributes:
        key: of the row; None for kernels that could not be joined to one.
        seconds: in each call; 0 where it did not run.
        gap_seconds: for which the device was idle before the row's kernels, in each call; all 0 on a CPU.
        kernels: that ran; none on a CPU.
    """

    key: Key | None
    seconds: list[float]
    gap_seconds: list[float]
    kernels: list[Kernel] = []


class Closure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The call that was looked into against the one that was only timed.

    Attributes:
        clean_seconds: of a call that was only timed (`device` on a GPU, `latency` on a CPU).
        profiled_seconds: median of the calls that were looked into.
        relative: difference as a fraction of the clean time.
        gap_share: of the profiled time that is gaps.
        unattributed_share: of the profiled time.
        tolerance: largest difference that is taken for closed.
    """

    clean_seconds: float
    profiled_seconds: float
    relative: float
    gap_share: float
    unattributed_share: float
    tolerance: float

    @property
    def closes(self) -> bool:
        """Whether both tell the same story."""
        return abs(self.relative) <= self.tolerance

    @property
    def busy_seconds(self) -> float:
        """Of the call that was looked into, without its gaps."""
        return self.profiled_seconds * (1 - self.gap_share)


class LayerTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the time of a call goes; as JSON, a few hundred rows.

    Attributes:
        method: how the times were taken; None where there are none.
        reason: why there are no rows, or None.
        rows: in the order in which they first ran.
        unattributed: kernels that could not be joined to a row, each name once.
        call_seconds: of each call: the sum of all rows, gaps and of what is unattributed.
        starved: calls that were thrown away because the device did not find all of them in its queue.
        no_backward: why there are rows of the forward pass only, or None.
        no_graph: why a graph of the call tells nothing, where its time is that of a graph; else None.
        own_seconds: of a call, what looking into it costs and was taken off, or None where nothing was.
        closure: None where there is no clean time to compare with.
        doubts: about these times.
    """

    method: Method | None = None
    reason: str | None = None
    rows: list[RowTimes] = []
    unattributed: list[RowTimes] = []
    call_seconds: list[float] = []
    starved: int = 0
    no_backward: str | None = None
    no_graph: str | None = None
    own_seconds: float | None = None
    closure: Closure | None = None
    doubts: list[Diagnostic] = []

    @property
    def calls(self) -> int:
        """That were looked into and not thrown away."""
        return len(self.call_seconds)

    @property
    def held(self) -> bool:
        """Whether the device's queue was held full, so that gaps are the device's own."""
        return self.method in (Method.queue, Method.graph)
