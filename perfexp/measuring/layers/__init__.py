"""Layers: where a call's time goes, by module and operation, and whether the sum closes.

This module describes the results, without torch. `profiling` measures: on a GPU with torch's
profiler, on a CPU with host clock readings (stamps). `marking` names the modules in a profile, and
`events` reads the profile. `attribution` finds the row of each kernel, and `partition` divides the
time among kernels. `table` compares the sum with an unprofiled call and joins times and work.
Conventions:

* **Rows** have the keys of `perfexp.cost`. A call of one of torch's own modules, or of a module
  without parts, is a single row if it calls no other module. Otherwise each torch function that a
  module's code calls is a row. Loss, optimizer step and data belong to no module and have their own
  rows.
* **Passes**: backward kernels go to the row of the forward operator that they compute a gradient
  for, by autograd's sequence numbers. Gradients that meet at a tensor with several uses are summed.
  This sum is the pass `accumulation` of the row with the last gradient. The sum in a parameter's
  `.grad` is a row `AccumulateGrad` of the parameter's module. Recomputation for the backward pass
  counts as backward.
* **A call** on a GPU lasts from the end of previous work to the end of its last kernel. So
  successive calls partition the time. Every nanosecond is either kernel time or a **gap** before a
  kernel, which belongs to that kernel's row. Concurrent kernels, on whatever streams, share their
  time equally. The remaining nanoseconds go to the kernel that began first.
* **Unattributed** time could not be assigned to a row and is listed by kernel name. It is part of
  the sum.
* **Closure** compares the profiled call with the same call without profiling. The sum equals the
  profiled call by construction, and is never scaled to fit the unprofiled call.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from perfexp.records.diagnostics import Diagnostic


class Pass(StrEnum):
    """Part of a call that a row's time belongs to."""

    forward = "forward"
    backward = "backward"
    accumulation = "accumulation"
    loss = "loss"
    optimizer_step = "optimizer_step"
    data = "data"
    other = "other"


class TimeSource(StrEnum):
    """Source of the times.

    `queue` and `graph`: kernels in a pre-filled queue, launched individually or as a graph.
    `unheld`: kernels in a queue that was not pre-filled. `stamps`: host clock readings.
    """

    queue = "queue"
    graph = "graph"
    unheld = "unheld"
    stamps = "stamps"


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a row: a module's call or an operation in it, in one pass.

    Attributes:
        path: module path, as in `perfexp.cost.WorkRow`; None outside the model's modules.
        call: index of the module's call within the model's call, from 0.
        operation: index of the operation in that call; None for a whole module, and for its code
            outside operations.
        kind: module class or operation name; outside the modules, the part of the call, e.g.
            `loss`.
    """

    path: str | None
    call: int
    operation: int | None
    kind: str
    which: Pass


class Kernel(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A kernel in a row: runs and seconds over all calls; concurrent kernels share their time."""

    name: str
    count: int
    seconds: float


class RowTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Times of a row.

    Attributes:
        key: key of the row; None for unattributed kernels.
        seconds: seconds in each call; 0 if the row did not run.
        gap_seconds: device idle seconds before the row's kernels in each call; all 0 on a CPU.
    """

    key: Key | None
    seconds: list[float]
    gap_seconds: list[float]
    kernels: list[Kernel] = []


class Closure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The profiled call compared with an unprofiled call (`device` on a GPU, `latency` on a CPU).

    Attributes:
        clean_seconds: call time without profiling.
        profiled_seconds: median call time under the profiler, the sum of all rows.
        relative: profiled over clean, minus 1.
        gap_share: share of gaps in the profiled time.
        unattributed_share: share of kernels without a row in the profiled time.
        tolerance: largest absolute value of `relative` that counts as agreement.
    """

    clean_seconds: float
    profiled_seconds: float
    relative: float
    gap_share: float
    unattributed_share: float
    tolerance: float

    @property
    def closes(self) -> bool:
        """Return whether the two times agree."""
        return abs(self.relative) <= self.tolerance

    @property
    def busy_seconds(self) -> float:
        """Return the profiled call time without its gaps."""
        return self.profiled_seconds * (1 - self.gap_share)


class LayerTimes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Where a call's time goes; a few hundred rows as JSON.

    Attributes:
        method: how the times were measured; None without times.
        reason: why there are no times; None if there are.
        rows: rows in the order of their first run.
        unattributed: times of kernels without a row, one entry for each kernel name.
        call_seconds: time of each call: the sum of all rows, gaps and unattributed time.
        starved: number of discarded calls, which the device began before they were fully enqueued.
        no_backward: why there are only forward rows, or None.
        no_graph: for a call timed as a graph, why the layer times are not from a graph; otherwise
            None.
        own_seconds: measuring overhead per call that was subtracted, or None.
        closure: comparison with the unprofiled call; None if that was not timed.
        doubts: diagnostics about the times.
    """

    method: TimeSource | None = None
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
        """Return the number of profiled calls, discarded calls excluded."""
        return len(self.call_seconds)

    @property
    def held(self) -> bool:
        """Return whether the queue was pre-filled, so that gaps are the device's own."""
        return self.method in (TimeSource.queue, TimeSource.graph)
