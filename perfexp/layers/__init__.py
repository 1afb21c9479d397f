"""Where the time of a call goes, module by module and operation by operation, and whether the sum closes.

The results are described here, without torch; `perfexp.layers.profiling` measures on a GPU with torch's profiler,
`perfexp.layers.stamps` on a CPU with readings of the host's clock. Conventions:
* **Rows** have the keys of `perfexp.work`: a call of one of torch's own modules, or of a module without parts, is a row
  if no other module is called in it; otherwise each torch function that a module's code calls is one. The loss, the
  optimizer step and the data belong to no module and have rows of their own.
* **Passes**: kernels of the backward pass go to the row of the forward operator whose gradient they compute, by
  autograd's sequence numbers. The sum of gradients that meet at a tensor with several uses is the pass `accumulation`
  of the row whose gradient came last; the sum in a parameter's `.grad` is a row `AccumulateGrad` of the parameter's
  module. Recomputation for the backward pass is backward.
* **A call** on a GPU lasts from the end of the previous work to the end of its last kernel, so that successive calls
  partition the time. Every nanosecond of it is kernel time or a **gap** before a kernel, which belongs to that
  kernel's row. Kernels that run at once, on whatever streams, share that time equally; the remainder in nanoseconds
  goes to the one that began first.
* **Unattributed** time could not be joined to a row and is listed by kernel name. It is part of the sum.
* **Closure** compares the profiled call with the same call without profiling. The sum is the profiled call by
  construction, and is never made to fit the other one.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from perfexp.records.diagnostics import Diagnostic


class Pass(StrEnum):
    """Pass of a row."""

    forward = "forward"
    backward = "backward"
    accumulation = "accumulation"
    loss = "loss"
    optimizer_step = "optimizer_step"
    data = "data"
    other = "other"


class Method(StrEnum):
    """Source of the times: kernels in a pre-filled queue, of a graph in one, in another queue; or the host's clock."""

    queue = "queue"
    graph = "graph"
    unheld = "unheld"
    stamps = "stamps"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a row.

    Attributes:
        path: path of the module, as in `perfexp.work.Row`; None outside of the model's modules.
        operation: index of the operation in that call; None for a whole module, and for its code outside of operations.
        kind: class of the module or name of the operation; outside of the modules, the part of the call.
    """

    path: str | None
    call: int
    operation: int | None
    kind: str
    which: Pass


class Kernel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A kernel of a row, over all calls; concurrent kernels share their time."""

    name: str
    count: int
    seconds: float


class RowTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Times of a row.

    Attributes:
        key: key of the row; None for unattributed kernels.
        seconds: time per call; 0 where the row did not run.
        gap_seconds: idle time of the device before the row's kernels, per call; all 0 on a CPU.
    """

    key: Key | None
    seconds: list[float]
    gap_seconds: list[float]
    kernels: list[Kernel] = []


class Closure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The profiled call against the call without profiling (`device` on a GPU, `latency` on a CPU).

    It closes up to an absolute `relative` of `tolerance`.
    """

    clean_seconds: float
    profiled_seconds: float
    relative: float
    gap_share: float
    unattributed_share: float
    tolerance: float

    @property
    def closes(self) -> bool:
        """Whether the two times agree."""
        return abs(self.relative) <= self.tolerance

    @property
    def busy_seconds(self) -> float:
        """The profiled call without its gaps."""
        return self.profiled_seconds * (1 - self.gap_share)


class LayerTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where the time of a call goes; a few hundred rows as JSON.

    Attributes:
        method: how the times were measured; None without times.
        rows: rows in the order in which they first ran.
        call_seconds: time of each call: the sum of all rows, gaps and unattributed time.
        starved: number of discarded calls, which the device began before they were fully enqueued.
        no_backward: why there are rows of the forward pass only, or None.
        no_graph: why a graph of the call has no layer times, where the call is timed as a graph; else None.
        own_seconds: measuring overhead of a call that was subtracted, or None.
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
        """Number of profiled calls that were not discarded."""
        return len(self.call_seconds)

    @property
    def held(self) -> bool:
        """Whether the queue was pre-filled, so that gaps are the device's own."""
        return self.method in (Method.queue, Method.graph)
