"""Plain sentences about the place of work below the ceilings, for console, tables and report."""

from __future__ import annotations

from collections import defaultdict

from perfexp.records.units import format_seconds
from perfexp.roofline.placement import ABOVE, DRAM, L2, NEAR, Limit, Roofline, RooflineRow

#: Shorter launches are mostly ramp-up and ramp-down.
_SHORT_SECONDS = 5e-6
#: Reasons of limits in the sentence on all parts.
_WHY = {
    Limit.unclear.value: " (Winograd and FFT multiply less than counted)",
    Limit.cached.value: " (their data stays in a cache)",
}


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
