"""Plain sentences on a roofline: what limits each row, and the notes below it.

The notes name estimates, missing figures, foreign peaks and incomplete training steps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.units import format_seconds, pretty
from perfexp.roofline.counters import Counted
from perfexp.roofline.placement import (
    ABOVE,
    DRAM,
    L2,
    NEAR,
    PROCESS,
    THREAD,
    Basis,
    Limit,
    Roofline,
    RooflineRow,
)

#: Shorter launches are mostly ramp-up and ramp-down.
_SHORT_SECONDS = 5e-6
#: Reasons of limits in the sentence on all parts.
_WHY = {
    Limit.unclear.value: " (Winograd and FFT multiply less than counted)",
    Limit.cached.value: " (their data stays in a cache)",
}
#: Smallest share of the memory peak at which a launch shows that peak.
_BUSY = 0.2
#: Largest relative difference between a memory ceiling and the peak behind the file's percentages.
_CONTRADICTION = 0.1
#: Smallest share of the time that a note reports.
_MIN_TIME_SHARE = 0.005
_FORWARD = re.compile(r"forward|fwd", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd", re.IGNORECASE)
_TRAINING = re.compile(r"train|backward|bwd|optimi[sz]er", re.IGNORECASE)
#: A backward pass has about twice as many kernels as its forward pass. With less than half as many
#: it is incomplete.
_MIN_BACKWARD = 0.5
#: Fewer forward kernels are inconclusive.
_MIN_FORWARD = 5


def meaning(roofline: Roofline, row: RooflineRow) -> str:
    """Return a sentence on what limits a roofline row, for its line in a table or report."""
    if row is roofline.total:
        return _summary(roofline)
    binds, share = row.binds, row.share
    if binds is None or share is None:
        return _without_place(row)
    seconds = row.load.seconds / row.load.launches
    memory = _percent(row, DRAM)
    compute = _percent(row, row.fullest_pipe)
    reached = _percent(row, binds)
    if share > ABOVE:
        return f"It lies above the ceiling ({reached} of {binds}){_reason_above(roofline, binds)}"
    if share < NEAR and seconds < _SHORT_SECONDS:
        return (
            f"A launch takes {format_seconds(seconds)}: too short to fill the device, "
            "so neither ceiling matters; use fewer, larger kernels (fusion, a graph)."
        )
    if share < NEAR:
        reached = f"{memory} of DRAM, {compute} of compute"
        if row.level == "range":
            return (
                f"As a whole it is near neither ceiling ({reached}): "
                "its parts differ, or wait; see them instead."
            )
        if roofline.analytic:
            return (
                f"It reaches {reached} by its analytic work; "
                "only the counters of a profiler show what it waits for (profiler=ncu)."
            )
        return (
            f"Neither ceiling limits it ({reached}): latency does, as with too few threads, "
            "dependent instructions or scattered access."
        )
    if binds == DRAM:
        return (
            f"Memory limits it ({memory} of DRAM's bandwidth): "
            "only moving fewer bytes makes it faster."
        )
    if binds == L2:
        return f"The L2 cache limits it ({reached} of its bandwidth): reuse data in shared memory."
    if row.limit is Limit.unclear:
        return (
            f"It reaches {compute} of {binds} by the FLOPs of direct convolution; Winograd and "
            "FFT multiply less: only the counters of a profiler show what limits it (profiler=ncu)."
        )
    if roofline.percentages:
        return (
            f"The SM limits it: its busiest part, which may not compute FLOPs, is {compute} used."
        )
    return (
        f"Compute limits it ({compute} of {binds}): "
        "only fewer or cheaper operations make it faster."
    )


def _reason_above(roofline: Roofline, ceiling: str) -> str:
    """Return why work lies above a ceiling, which should be impossible."""
    if not roofline.analytic:
        return ": the peak is another device's or clock's."
    if ceiling in (DRAM, L2):
        return ": its data stays in a cache."
    return (
        ", counted in FLOPs of direct convolution: "
        "Winograd and FFT need fewer, so this is not an error."
    )


def _without_place(row: RooflineRow) -> str:
    """Return why a row cannot be placed in the plot."""
    if not row.load.seconds:
        return "It took no time."
    shares = (("FLOPs", row.compute_share), ("bytes", row.memory_share))
    missing = [name for name, share in shares if share is None]
    return (
        f"Its {' and '.join(missing)}, or their ceiling, are unknown: it has no place in the plot."
    )


def _summary(roofline: Roofline) -> str:
    """Return a sentence on the whole: what limits which share of the time."""
    total = roofline.total
    kinds: defaultdict[str, float] = defaultdict(float)
    for part in roofline.parts:
        kinds["without both figures" if part.share is None else part.limit.value] += part.time_share
    spent = []
    for kind in (*(limit.value for limit in Limit), "without both figures"):
        if round(100 * kinds[kind]) > 0:
            spent.append(f"{kinds[kind]:.0%} are {kind}{_WHY.get(kind, '')}")
    names = {DRAM: "memory ceiling", total.fullest_pipe: "compute ceiling"}
    if roofline.percentages:
        names[total.fullest_pipe] += " by the SM's busiest part"
    reached = []
    for name, words in names.items():
        if name in total.shares:
            reached.append(f"{_percent(total, name)} of the {words}")
    overall = f"; as a whole it reaches {' and '.join(reached)}" if reached else ""
    seconds = format_seconds(total.load.seconds)
    return f"Of {seconds} in {roofline.noun}, {', '.join(spent)}{overall}."


def _percent(row: RooflineRow, ceiling: str) -> str:
    """Return a ceiling's share as a percentage, after `≈` if estimated; a dash if unknown."""
    share = row.shares.get(ceiling)
    if share is None:
        return "–"
    sign = "≈ " if row.is_estimated(ceiling) else ""
    if 0 < share < 0.0095:
        return f"{sign}{share:.1%}"
    return f"{sign}{share:.0%}"


def of_counters(roofline: Roofline, counted: Sequence[Counted], launches: int) -> Iterator[str]:
    """Yield the notes on a roofline from an ncu file.

    `perfexp.roofline` adds them to the roofline.

    Args:
        counted: work of the launches that have time, FLOPs and bytes.
        launches: number of all launches.
    """
    yield from _foreign(roofline)
    yield from _contradictions(roofline, counted)
    # ranges of the process include other threads, so they decide where there are any
    owner = PROCESS if any(row.where == PROCESS for row in roofline.ranges) else THREAD
    ranges = {row.name: row.load.launches for row in roofline.ranges if row.where == owner}
    if incomplete := missing_backward(ranges):
        yield incomplete
    if roofline.percentages:
        peak = pretty((roofline.peaks.reference or ("", 0.0))[1], "FLOP/s")
        yield (
            "FLOPs are estimates: the file has percentages of peak only, and sm__throughput is "
            "the busiest part of the SM (any pipe, also loads and stores), not FLOPs; "
            f"the estimate is its share of {peak}."
        )
    if any(row.load.bytes_basis is Basis.percentage for row in roofline.launches):
        yield "Bytes are estimates: dram__throughput × peak bandwidth × time."
    if any(work.estimated for work in counted):
        yield (
            "FLOPs of the tensor cores are estimates: counted instructions times their usual size "
            "on this chip; sm__ops_path_tensor_src_*.sum counts operations."
        )
    if roofline.estimated:
        yield "≈ marks estimates and figures derived from them; times are measured."
    if lacking := sorted(set(chain.from_iterable(work.lacking for work in counted))):
        verb = "is" if len(lacking) == 1 else "are"
        yield f"FLOPs are too low: {', '.join(lacking[:4])} {verb} not in the file."
    if moves := sum(work.moves for work in counted):
        yield (
            f"{pretty(moves, 'FLOP')} of half precision in kernels of single precision are left "
            "out: they move constants."
        )
    if left := launches - len(counted):
        yield (
            f"{left} of {launches} launches lack metrics that others have, and are left out. "
            "Is the file complete?"
        )
    yield from _without_ceiling(roofline)


def of_definitions(roofline: Roofline, diagnostics: Sequence[Diagnostic]) -> Iterator[str]:
    """Yield the notes on a roofline from a record's layers.

    `perfexp.roofline` adds them to the roofline.

    Args:
        diagnostics: doubts about the layers' times.
    """
    yield from _foreign(roofline)
    yield from map(str, diagnostics)
    yield (
        "FLOPs and bytes are analytic: the definition of each layer (direct convolution, each "
        "operand moved once), not counts; ≈ marks them and figures derived from them. Times are "
        "measured. Winograd and FFT need fewer FLOPs and may lie above a ceiling: "
        "this is not an error."
    )
    unknown = sum(row.time_share for row in roofline.parts if row.binds is None)
    if unknown >= _MIN_TIME_SHARE:
        yield (
            f"{unknown:.0%} of the time is in rows without analytic FLOPs or bytes, "
            "such as backward passes."
        )
    yield from _without_ceiling(roofline)


def _foreign(roofline: Roofline) -> Iterator[str]:
    """Yield a note if the peaks belong to another device than the measured one."""
    peaks = roofline.peaks
    if peaks.foreign:
        yield (
            "The peaks belong to another device than the measured one: "
            f"{', '.join(peaks.sources)}; measured on {peaks.foreign}. Shares of a ceiling are "
            "shares of that device's, not the utilization of this one."
        )


def _contradictions(roofline: Roofline, counted: Sequence[Counted]) -> Iterator[str]:
    """Yield a note if a memory ceiling differs from the peak behind ncu's percentages.

    `dram__throughput` is the utilization of the busiest memory part. A launch's bandwidth divided
    by it is a lower bound for the peak, so the largest quotient is compared.
    """
    implied = 0.0
    for work in counted:
        share = work.dram_share or 0.0
        if work.dram_bytes and work.seconds and share >= _BUSY:
            implied = max(implied, work.dram_bytes / work.seconds / share)
    stated = roofline.peaks.dram_bytes_per_second
    if stated and implied and abs(implied / stated - 1) > _CONTRADICTION:
        sources = ", ".join(roofline.peaks.sources)
        yield (
            f"The memory ceiling ({pretty(stated, 'B/s')}, {sources}) contradicts the file: "
            f"its bytes and percentages imply a peak of {pretty(implied, 'B/s')}. "
            "Is --gpu the device that was profiled?"
        )


def _without_ceiling(roofline: Roofline) -> Iterator[str]:
    """Yield notes on FLOPs without a known peak, and on time without FLOPs."""
    flops = roofline.total.load.flops or {}
    if kinds := [kind for kind, amount in flops.items() if amount and not roofline.peaks.of(kind)]:
        yield (
            f"No peak is known for {', '.join(kinds)}: these FLOPs are counted and have no ceiling."
        )
    without = sum(row.time_share for row in roofline.parts if row.load.total_flops == 0)
    if without >= _MIN_TIME_SHARE:
        yield (
            f"{without:.0%} of the time is in {roofline.noun} without a FLOP, "
            "which have no place in the plot."
        )


def missing_backward(launches: Mapping[str, int]) -> str | None:
    """Return a warning if a training step lacks its backward pass; None if it is complete.

    NVTX push/pop ranges belong to the thread that pushed them (NVTX C API, "Push/Pop ranges").
    Autograd launches the backward pass from its own thread per device (PyTorch, "Autograd
    mechanics").

    Args:
        launches: number of kernels by range path, such as `step/forward`.
    """
    if not any(map(_TRAINING.search, launches)):
        return None
    forward = _launches_in(launches, _FORWARD)
    backward = _launches_in(launches, _BACKWARD)
    if forward < _MIN_FORWARD or backward >= _MIN_BACKWARD * forward:
        return None
    seen = "1 kernel" if backward == 1 else f"{backward or 'no'} kernels"
    return (
        f"This training step looks incomplete: {forward} kernels in its forward pass and {seen} "
        "in its backward one, which should have more. Autograd launches the backward pass from "
        "another thread, and push/pop ranges belong to the thread that pushed them, so a filter "
        "on such a range leaves it out. Use ranges of the process (torch.cuda.nvtx.range_start "
        "and range_end) or cudaProfilerStart/Stop with ncu --profile-from-start off."
    )


def _launches_in(launches: Mapping[str, int], name: re.Pattern[str]) -> int:
    """Return the number of kernels in the outermost ranges whose name matches.

    Args:
        launches: number of kernels by range path.
        name: pattern for the last part of a path, and for no part above it.
    """
    total = 0
    for path, count in launches.items():
        parent, _, range_name = path.rpartition("/")
        if name.search(range_name) and not name.search(parent):
            total += count
    return total
