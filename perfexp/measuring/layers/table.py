"""Table: row times over several calls, joined with their work, with a line per row and pass.

The lines go into the layers point's facts and from there into reports and CSV files. Work (MACs,
FLOPs, bytes) is counted separately, by `perfexp.cost`; both number modules and operations in the
same way. `close` compares the sum of the rows with an unprofiled call: the layer times are
trustworthy if both take equally long. If not, diagnostics say how to read the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from perfexp.cost import Geometry, Work, WorkRow
from perfexp.measuring.layers import Closure, Kernel, Key, LayerTimes, Pass, RowTimes, TimeSource
from perfexp.measuring.layers.partition import CallTimes, Spent
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.layer_lines import READABLE
from perfexp.statistics import estimators

#: Position in a model call: module path, index of the module's call, index of the operation.
Place = tuple[str, int, int | None]
#: Tolerance for a device-bound call, and for a call dominated by gaps.
_TOLERANCE, _TOLERANCE_GAPS = 0.02, 0.05
#: Minimum share of kernel time in the unprofiled time, if the queue was not pre-filled.
_LEAST_BUSY = 0.6
#: Gaps above this share of the time dominate.
_GAPS_DOMINATE = 0.2
#: Tolerated share of unattributed time.
_UNATTRIBUTED = 0.001
#: Number of unattributed kernels that a diagnostic names.
_NAMED_KERNELS = 3


class Spread(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A median with its 95 % interval (None with too few calls), and the mean, in seconds."""

    mean: float
    median: float
    low: float | None
    high: float | None


class Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A row in a pass, with its time and work.

    Attributes:
        key: key of the row; None for unattributed kernels.
        kind: module class or operation name.
        seconds: time per call.
        gap_seconds: device idle time before its kernels, per call.
        share: share of the sum of all medians, gaps included; all shares sum to 1.
        macs: multiply-accumulates in the forward pass; None for other passes and unknown work.
        flops: FLOPs of this pass; None for unknown work.
        bytes_min: minimum bytes read and written; forward pass only.
        parameters: elements that no earlier row has read; forward pass only.
        arithmetic_intensity: FLOPs per byte in the forward pass.
        flops_per_second: FLOPs over the median time; None without time or work.
        inputs: shapes of the input tensors.
        outputs: shapes of the output tensors.
        convolution: geometry of a convolution; None for other rows.
        kernels: runs per call by kernel name.
        ran: cuDNN algorithm of a forward pass's kernels, or several, for example `fft or
            fft_tiling`; None for unknown kernels.
    """

    key: Key | None
    kind: str
    seconds: Spread
    gap_seconds: Spread
    share: float = 0.0
    macs: int | None = None
    flops: int | None = None
    bytes_min: int | None = None
    activation_bytes: int | None = None
    parameters: int | None = None
    arithmetic_intensity: float | None = None
    flops_per_second: float | None = None
    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()
    convolution: Geometry | None = None
    kernels: dict[str, float] = {}
    ran: str | None = None


def times_of(calls: Sequence[CallTimes], method: TimeSource, starved: int = 0) -> LayerTimes:
    """Return the times of all rows over several usable calls of the same step.

    Args:
        method: how the times were measured.
        starved: number of discarded calls.
    """
    keys = dict.fromkeys(key for call in calls for key in call.rows)
    names = dict.fromkeys(name for call in calls for name in call.unattributed)
    return LayerTimes(
        method=method,
        rows=[_times_of_row(key, [call.rows.get(key, Spent()) for call in calls]) for key in keys],
        unattributed=[
            _times_of_row(None, [call.unattributed.get(name, Spent()) for call in calls])
            for name in names
        ],
        call_seconds=[call.span_ns * 1e-9 for call in calls],
        starved=starved,
    )


def _times_of_row(key: Key | None, spent: Sequence[Spent]) -> RowTimes:
    """Return a row's times in seconds, from its time in each call."""
    names = dict.fromkeys(name for times in spent for name in times.kernels)
    kernels = [(name, [times.kernels.get(name, (0, 0)) for times in spent]) for name in names]
    return RowTimes(
        key=key,
        seconds=[times.busy_ns * 1e-9 for times in spent],
        gap_seconds=[times.gap_ns * 1e-9 for times in spent],
        kernels=[
            Kernel(
                name=name,
                count=sum(count for count, _ in ran),
                seconds=sum(busy for _, busy in ran) * 1e-9,
            )
            for name, ran in kernels
        ],
    )


def join(times: LayerTimes, work: Work | None) -> list[Line]:
    """Return a line for each row and pass: lines with times in execution order, then the others.

    Rows that were never seen on the device, for example a view or dropout in evaluation, have a
    line without time and kernels. Lines without a row in the work have times only. Examples are the
    loss, the optimizer, or a fused operator that replaces several modules.

    Args:
        work: work for the same inputs in the same mode, if known.
    """
    rows = _match_work(times, work.rows) if work else {}
    lines = [_line(row, rows, times.calls) for row in [*times.rows, *times.unattributed]]
    # medians: a disturbed call would shift means
    total_seconds = sum(line.seconds.median + line.gap_seconds.median for line in lines)
    for line in lines:
        line.share = (
            (line.seconds.median + line.gap_seconds.median) / total_seconds
            if total_seconds
            else 0.0
        )
    if not times.calls:
        return lines
    timed = {
        (key.path, key.call, key.operation)
        for row in times.rows
        if (key := row.key) and key.which is Pass.forward
    }
    for module_call, row in rows.items():
        if module_call not in timed:
            path, call, operation = row.path, row.call, row.operation
            key = Key(path=path, call=call, operation=operation, kind=row.kind, which=Pass.forward)
            untimed = RowTimes(key=key, seconds=[0.0], gap_seconds=[0.0])
            lines.append(_line(untimed, rows, times.calls))
    return lines


def _match_work(times: LayerTimes, counted: Sequence[WorkRow]) -> dict[Place, WorkRow]:
    """Return the counted rows by the place where each was timed.

    Timing and counting number a call's operations in the same order. Models that compute their own
    losses are the exception: work is counted without the losses, so later numbers differ.
    Operations in such a call are matched by name, in order. Operations without a counterpart never
    reached the device, or were not in the timed call.
    """
    timed: dict[tuple[str, int], dict[int, str]] = {}
    for key in (row.key for row in times.rows):
        if key is not None and key.path is not None and key.operation is not None:
            timed.setdefault((key.path, key.call), {})[key.operation] = key.kind
    operations: dict[tuple[str, int], dict[int, WorkRow]] = {}
    for row in counted:
        if row.operation is not None:
            operations.setdefault((row.path, row.call), {})[row.operation] = row
    placed = {(row.path, row.call, row.operation): row for row in counted}
    for call, kinds in timed.items():
        rows_of_call = operations.get(call, {})
        if all(
            number in rows_of_call and rows_of_call[number].kind == kind
            for number, kind in kinds.items()
        ):
            continue
        for number in rows_of_call:
            del placed[(*call, number)]
        timed_numbers, counted_numbers = sorted(kinds), sorted(rows_of_call)
        timed_kinds = [kinds[number] for number in timed_numbers]
        counted_kinds = [rows_of_call[number].kind for number in counted_numbers]
        for left, right in aligned(timed_kinds, counted_kinds):
            placed[(*call, timed_numbers[left])] = rows_of_call[counted_numbers[right]]
    return placed


def _line(row: RowTimes, rows: Mapping[Place, WorkRow], calls: int) -> Line:
    """Return the line of a row, with the work at its place, if that is known.

    Args:
        rows: counted rows by place.
        calls: number of calls that the row's kernels were counted over.
    """
    key = row.key
    line = Line(
        key=key,
        kind=key.kind if key else "unattributed",
        seconds=_spread(row.seconds),
        gap_seconds=_spread(row.gap_seconds),
        kernels={kernel.name: kernel.count / calls for kernel in row.kernels},
    )
    work = rows.get((key.path, key.call, key.operation)) if key and key.path is not None else None
    if work is None or key is None:
        return line
    if key.which in (Pass.forward, Pass.backward):
        line.flops = work.flops if key.which is Pass.forward else work.backward_flops
        if line.flops and line.seconds.median:
            line.flops_per_second = line.flops / line.seconds.median
    line.kind, line.convolution = work.kind, work.convolution
    line.inputs, line.outputs = work.inputs, work.outputs
    if key.which is Pass.forward:
        line.macs, line.bytes_min = work.macs, work.bytes_min
        line.activation_bytes, line.parameters = work.activation_bytes, work.parameters
        line.arithmetic_intensity = work.arithmetic_intensity
    return line


def _spread(seconds: list[float]) -> Spread:
    """Return the statistics of a row's seconds in each call."""
    samples = np.asarray(seconds)
    interval = estimators.median_interval(samples)
    return Spread(
        mean=float(samples.mean()), median=interval.value, low=interval.low, high=interval.high
    )


def aligned(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Match equal names in two sequences; return pairs of positions, as many as possible.

    `_match_work` aligns timed and counted operations by it. The result is the longest common
    subsequence (Needleman and Wunsch, "A general method applicable to the search for similarities",
    1970). Among several, it is the subsequence with the most contiguous neighbors, and then the
    latest. Positions increase in both sequences. This takes O(n · m) time and memory.
    """
    rows, columns = len(left), len(right)
    # score of a match; a contiguous neighbor scores 1, and all of them together less than a match
    match = rows + columns + 1
    # best score of the prefixes i and j; and best score that matches their last names (-2 if none)
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    ending = [[-2] * (columns + 1) for _ in range(rows + 1)]
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            if left[i - 1] == right[j - 1]:
                ending[i][j] = match + max(best[i - 1][j - 1], ending[i - 1][j - 1] + 1)
            best[i][j] = max(ending[i][j], best[i - 1][j], best[i][j - 1])
    # from the end back; `together`: the best score has a neighbor of the last match
    pairs: list[tuple[int, int]] = []
    i, j, together = rows, columns, False
    while i and j:
        if together or best[i][j] == ending[i][j]:
            pairs.append((i - 1, j - 1))
            together = ending[i][j] == match + ending[i - 1][j - 1] + 1
            i, j = i - 1, j - 1
        elif best[i][j] == best[i - 1][j]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def close(times: LayerTimes, clean_seconds: float | None) -> LayerTimes:
    """Compare the sum with the unprofiled time, add diagnostics, and return the same object.

    Args:
        times: layer times; `closure` and `doubts` are set. Without calls it is left unchanged.
        clean_seconds: call time without profiler or stamps (`device` on a GPU, `latency` on a CPU),
            or None.
    """
    if not times.call_seconds:
        return times
    if clean_seconds:
        profiled = float(np.median(times.call_seconds))
        gaps = np.sum([row.gap_seconds for row in (*times.rows, *times.unattributed)], axis=0)
        # one disturbed call would move a ratio of sums
        gap_share = float(np.median(gaps / np.asarray(times.call_seconds)))
        times.closure = Closure(
            clean_seconds=clean_seconds,
            profiled_seconds=profiled,
            relative=profiled / clean_seconds - 1,
            gap_share=gap_share,
            unattributed_share=unattributed_share(times),
            tolerance=_TOLERANCE_GAPS if gap_share > _GAPS_DOMINATE else _TOLERANCE,
        )
    checks = [_check_sum(times), _check_unattributed(times), _check_queue(times)]
    times.doubts = [*times.doubts, *(doubt for doubt in checks if doubt is not None)]
    return times


def _check_sum(times: LayerTimes) -> Diagnostic | None:
    """Return a diagnostic if the sum and the unprofiled call differ by more than the tolerance."""
    closure = times.closure
    if closure is None or closure.closes:
        return None
    if times.method is TimeSource.unheld:
        return _check_busy(closure)
    how = "with stamps" if times.method is TimeSource.stamps else "under the profiler"
    advice = (
        "ignore the layers: other work disturbed one of the two; "
        "measure again when the machine is idle"
    )
    if abs(closure.relative) <= READABLE:
        advice = (
            "read the layers as shares; less noise on the machine, or a larger batch, brings "
            "both closer"
        )
    return diagnostics.make(
        "layers_disagree",
        profiled_ms=closure.profiled_seconds * 1e3,
        how=how,
        clean_ms=closure.clean_seconds * 1e3,
        difference=closure.relative,
        details=f", tolerated ±{closure.tolerance:.0%}; {closure.gap_share:.0%} of it are gaps",
        advice=advice,
    )


def _check_busy(closure: Closure) -> Diagnostic | None:
    """Return a diagnostic if kernel time is implausible for the unprofiled call.

    Used if the queue was not pre-filled: gaps are the profiled host's then, so only kernels count.
    """
    share = closure.busy_seconds / closure.clean_seconds
    if _LEAST_BUSY <= share <= 1 + _TOLERANCE_GAPS:
        return None
    return diagnostics.make(
        "layers_disagree",
        profiled_ms=closure.busy_seconds * 1e3,
        how="under the profiler without gaps",
        clean_ms=closure.clean_seconds * 1e3,
        difference=share - 1,
        details="",
        advice="read the layers as shares, if at all: the profiler lost or slowed kernels, or "
        "the device was shared",
    )


def _check_unattributed(times: LayerTimes) -> Diagnostic | None:
    """Return a diagnostic that names kernels without a row, if they take more than 0.1 %."""
    share = unattributed_share(times)
    if share <= _UNATTRIBUTED:
        return None
    kernels = [kernel.name for row in times.unattributed for kernel in row.kernels]
    more = [f"{len(kernels) - _NAMED_KERNELS} more"] if len(kernels) > _NAMED_KERNELS else []
    names = ", ".join([*kernels[:_NAMED_KERNELS], *more])
    message = f"{share:.1%} of the time could not be assigned to a layer: {names}"
    return diagnostics.make(
        "layers_inexact", share=share, what=message, advice="the sum includes it; the rows do not"
    )


def _check_queue(times: LayerTimes) -> Diagnostic | None:
    """Return a diagnostic if the queue was not pre-filled, so that gaps are the host's."""
    if times.method is not TimeSource.unheld:
        return None
    details = f", and a CUDA graph of it does not help ({times.no_graph})" if times.no_graph else ""
    if closure := times.closure:
        share = closure.busy_seconds / closure.clean_seconds
        busy = f"{closure.busy_seconds * 1e3:.4g} ms, {share:.0%} of a call without profiling"
        details += f"; without gaps it takes {busy}"
    return diagnostics.make(
        "layers_inexact",
        share=None,
        what="the device started a call before it was queued: gaps between its kernels are the "
        "host's, which is slower "
        f"under a profiler{details}",
        advice="read the kernels' times, not the gaps; a smaller batch or execution=compile "
        "needs fewer launches",
    )


def unattributed_share(times: LayerTimes) -> float:
    """Return the share of kernels without a row, and of gaps before them, in all calls' time."""
    unattributed = sum(sum(row.seconds) + sum(row.gap_seconds) for row in times.unattributed)
    return unattributed / sum(times.call_seconds)
