"""Closure: compare a call's profiled time with its time without profiling.

The layers' sum equals the profiled call, so the layer times are trustworthy if that takes as long
as an unprofiled call. Diagnostics say where it does not, and how to read the layers then.
"""

from __future__ import annotations

import numpy as np

from perfexp.measuring.layers import Closure, LayerTimes, TimeSource
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.layer_lines import READABLE

#: Tolerance for a device-bound call, and for a call dominated by gaps.
_TOLERANCE, _TOLERANCE_GAPS = 0.02, 0.05
#: Minimum share of kernel time in the unprofiled time, if the queue was not pre-filled.
_LEAST_BUSY = 0.6
#: Gaps above this share of the time dominate.
_GAPS_DOMINATE = 0.2
#: Tolerated share of unattributed time.
_UNATTRIBUTED = 0.001
#: Number of unattributed kernels that a diagnostic names.
_NAMED = 3


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
    rest = [f"{len(kernels) - _NAMED} more"] if len(kernels) > _NAMED else []
    names = ", ".join([*kernels[:_NAMED], *rest])
    what = f"{share:.1%} of the time could not be assigned to a layer: {names}"
    return diagnostics.make(
        "layers_inexact", share=share, what=what, advice="the sum includes it; the rows do not"
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
