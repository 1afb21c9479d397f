"""Notes: what has to be known to read a roofline: what is estimated, what is missing, and what has no place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfexp.records.diagnostics import Diagnostic
from perfexp.roofline.below import Roofline
from perfexp.roofline.completeness import missing_backward
from perfexp.roofline.counters import Counted
from perfexp.roofline.placement import PROCESS, THREAD
from perfexp.roofline.sentences import pretty

#: A launch tells the memory's peak where it uses this part of it or more.
_BUSY = 0.2
#: A roof this far from what the file's own percentages are of is not that of its device.
_CONTRADICTION = 0.1


def of_counters(roofline: Roofline, counted: Sequence[Counted], launches: int) -> Iterable[str]:
    """Of a file of ncu.

    Args:
        roofline: without notes.
        counted: what each launch did that is in it.
        launches: how many the file has.
    """
    yield from _foreign(roofline)
    yield from _contradicted(roofline, counted)
    backward = [missing_backward({row.name: row.load.launches for row in roofline.ranges if row.where == kind})
                for kind in (THREAD, PROCESS)]  # fmt: skip
    # a process-wide range that holds the backward pass holds it, whatever the threads' ranges lack
    spans = any(row.where == PROCESS for row in roofline.ranges)
    if told := backward[1] if spans else backward[0]:
        yield told
    if roofline.percentages:
        peak = pretty((roofline.peaks.reference or ("", 0.0))[1], "FLOP/s")
        yield (
            "FLOPs are estimates: the file has percentages of peak only, and sm__throughput is the busiest part of the "
            f"SM (any pipe, also loads and stores), not FLOPs; it is taken as a part of {peak}."
        )
    if any(each.flops is None and each.dram_bytes is None for each in counted):
        yield "Bytes are estimates: dram__throughput × peak bandwidth × time."
    if any(each.estimated for each in counted):
        yield (
            "FLOPs of the tensor cores are estimates: instructions were counted and taken for the usual size of this "
            "chip; sm__ops_path_tensor_src_*.sum counts operations."
        )
    if roofline.estimated:
        yield "≈ stands before what is estimated and what follows from that; times are measured."
    if lacking := sorted({name for each in counted for name in each.lacking}):
        yield f"FLOPs are too small: {', '.join(lacking[:4])} {'is' if len(lacking) == 1 else 'are'} not in the file."
    if moves := sum(each.moves for each in counted):
        yield (
            f"{pretty(moves, 'FLOP')} of half precision in kernels of single precision are left out: they move "
            "constants."
        )
    if left := launches - len(counted):
        yield f"{left} of {launches} launches lack metrics that others have, and are left out: is the file whole?"
    yield from _unroofed(roofline)


def _foreign(roofline: Roofline) -> Iterable[str]:
    """Of peaks that are not those of the device that was measured."""
    peaks = roofline.peaks
    if peaks.foreign:
        yield (
            f"The peaks are another device's than the one that was measured: {', '.join(peaks.sources)}; measured on "
            f"{peaks.foreign}. Parts of a roof say what of that device it would be, not how well this one is used."
        )


def _contradicted(roofline: Roofline, counted: Sequence[Counted]) -> Iterable[str]:
    """A memory roof that is not the one that ncu's percentages are of.

    `dram__throughput` is the busiest part of the memory, so bytes per second over it are the peak or less: the launch
    where they are most comes closest.
    """
    given = roofline.peaks.dram_bytes_per_second
    implied = max(
        (
            each.dram_bytes / each.seconds / each.dram_share
            for each in counted
            if each.dram_bytes and each.seconds and each.dram_share and each.dram_share >= _BUSY
        ),
        default=None,
    )
    if given and implied and abs(implied / given - 1) > _CONTRADICTION:
        yield (
            f"Warning: the memory roof ({pretty(given, 'B/s')}, {', '.join(roofline.peaks.sources)}) contradicts the "
            f"file: its bytes and percentages are those of a peak of {pretty(implied, 'B/s')}. Is --gpu the device "
            "that was profiled?"
        )


def _unroofed(roofline: Roofline) -> Iterable[str]:
    """FLOPs that have no roof, and work that has no place."""
    kinds = [kind for kind, flops in (roofline.total.load.flops or {}).items() if flops and not roofline.peaks.of(kind)]
    if kinds:
        yield f"No peak is known for {', '.join(kinds)}: these FLOPs are counted and have no roof."
    without = sum(row.time_share for row in roofline.parts if row.load.flops is not None and not row.load.total_flops)
    if without >= 0.005:
        yield f"{without:.0%} of the time is in {roofline.noun} without a FLOP, which have no place in the picture."


def of_definitions(roofline: Roofline, doubts: Sequence[Diagnostic]) -> Iterable[str]:
    """Of the layers of a record.

    Args:
        roofline: without notes.
        doubts: of the layers' times.
    """
    yield from _foreign(roofline)
    yield from map(str, doubts)
    yield (
        "FLOPs and bytes are analytic: what layers take by definition (direct convolution, each operand moved once), "
        "not counted ones; ≈ stands before them and what follows from them. Times are measured. Winograd and FFT do "
        "fewer FLOPs and may lie above a roof: that is no error."
    )
    unknown = sum(row.time_share for row in roofline.parts if row.standing.binds is None)
    if unknown >= 0.005:
        yield f"{unknown:.0%} of the time is in rows whose bytes or FLOPs no definition gives, as backward passes."
    yield from _unroofed(roofline)
