"""Sentences: what a place below the roofs means, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records.units import digits, format_seconds
from perfexp.roofline.placement import DRAM, L2, NEAR, Row

#: Launches shorter than this are mostly ramp-up and ramp-down.
_SHORT_SECONDS = 5e-6
#: Above a roof by more than what clocks and rounding explain.
_ABOVE = 1.02
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def pretty(value: float, unit: str, *, stated: bool = False) -> str:
    """A quantity with a decimal prefix: `8.10 TFLOP/s`.

    Args:
        value: in the unit.
        unit: `FLOP`, `B`, `FLOP/s`, `B/s`.
        stated: whether it is a figure of a data sheet, with its own digits (up to four) and no zeros behind them.
    """
    factor, prefix = next(
        ((factor, prefix) for factor, prefix in _PREFIXES if abs(value) >= factor * 0.9995), (1.0, "")
    )
    number = value / factor
    return f"{f'{number:.4g}' if stated else digits(number)} {prefix}{unit}"


def meaning(row: Row, *, analytic: bool = False, percentages: bool = False) -> str:
    """One sentence on where a row stands.

    Args:
        row: of any level but the total.
        analytic: whether FLOPs and bytes are those that the layer takes by definition.
        percentages: whether its FLOPs are a part of peak that the busiest part of the SM had.
    """
    standing, load = row.standing, row.load
    binds, share = standing.binds, standing.share
    of_memory, of_compute = shares(row)
    if binds is None or share is None:
        return _unknown(row)
    if share > _ABOVE:
        reached = {DRAM: of_memory, L2: _percent(share)}.get(binds, of_compute)
        return _above(binds, reached, analytic=analytic)
    if share < NEAR and load.seconds / load.launches < _SHORT_SECONDS:
        return (
            f"A launch takes {format_seconds(load.seconds / load.launches)}: too short to fill the device, so neither "
            "roof matters; fewer, larger kernels (fusion, a graph) do."
        )
    if share < NEAR:
        reached = f"{of_memory} of DRAM, {of_compute} of compute"
        if row.level == "range":
            return f"As a whole it is near neither roof ({reached}): its parts differ, or wait; they say more."
        if analytic:
            return (
                f"It reaches {reached} by the work that it takes by definition; what it waits for, "
                "only the counters of a profiler show (profiler=ncu)."
            )
        return (
            f"Neither roof holds it back ({reached}): latency does, as with too few threads, dependent instructions or "
            "scattered access."
        )
    if binds == DRAM:
        return f"Memory holds it back ({of_memory} of DRAM's bandwidth): it gets faster by moving fewer bytes only."
    if binds == L2:
        return f"The L2 cache holds it back ({_percent(share)} of its bandwidth): reuse in shared memory is left."
    if percentages:
        return f"The SM holds it back: its busiest part is {of_compute} used, which may be another than the FLOPs."
    return f"Compute holds it back ({of_compute} of {binds}): only fewer or cheaper operations make it faster."


def whole(total: Row, parts: Sequence[Row], *, noun: str, analytic: bool = False, percentages: bool = False) -> str:
    """One sentence on all of it.

    Args:
        total: row.
        parts: its kernels or layers.
        noun: what the parts are called, in the plural.
        analytic: see `meaning`.
        percentages: likewise.
    """
    kinds = {
        "near the memory roof": 0.0,
        "near the compute roof": 0.0,
        "near neither roof": 0.0,
        "without both figures": 0.0,
    }
    for part in parts:
        binds, share = part.standing.binds, part.standing.share
        if binds is None or share is None:
            kinds["without both figures"] += part.time_share
        elif share < NEAR:
            kinds["near neither roof"] += part.time_share
        else:
            kinds[f"near the {'memory' if binds in (DRAM, L2) else 'compute'} roof"] += part.time_share
    parted = ", ".join(f"{_percent(share)} are {kind}" for kind, share in kinds.items() if round(100 * share) > 0)
    compute = "compute roof" + (" by the SM's busiest part" if percentages else "")
    known = (total.standing.memory_share, total.standing.compute_share)
    reached = " and ".join(
        f"{text} of the {name}"
        for name, text, share in zip(("memory roof", compute), shares(total), known, strict=True)
        if share is not None
    )
    said = f"; as a whole it reaches {reached}" if reached else ""
    return f"Of {format_seconds(total.load.seconds)} in {noun}, {parted}{said}."


def shares(row: Row) -> tuple[str, str]:
    """The parts of the memory roof and of the compute roof as words, `≈` before what is estimated.

    Args:
        row: of any level.
    """
    found = (
        (row.standing.memory_share, row.memory_is_estimated),
        (row.standing.compute_share, row.compute_is_estimated),
    )
    memory, compute = (
        f"{'≈ ' if estimated and share is not None else ''}{_percent(share)}" for share, estimated in found
    )
    return memory, compute


def short(kernel: str) -> str:
    """A kernel's name without its types: what it is called, and the functor that makes a general one special.

    Args:
        kernel: as the profiler gives it.
    """
    bare = _without(kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", ""), "(", ")")
    called = _without(bare, "<", ">").strip()
    name = called.split(" ")[-1].rsplit("::", 1)[-1] or kernel.strip()
    special = _functor(kernel) if name.endswith(("elementwise_kernel", "apply_kernel", "reduce_kernel")) else ""
    return f"{special} · {name}" if special else name


def _functor(kernel: str) -> str:
    """What a kernel of torch's is made for, by the names in its template arguments."""
    inside = kernel[kernel.find("<") :] if "<" in kernel else ""
    words = "".join(character if character.isalnum() or character == "_" else " " for character in inside).split()
    hints = [word for word in words if _is_hint(word)]
    return hints[0].removeprefix("launch_") if hints else ""


def _is_hint(word: str) -> bool:
    general = ("TensorListMetadata", "elementwise_kernel", "ReduceOp", "func_wrapper_t", "OffsetCalculator")
    telling = (
        "Functor" in word or word.startswith("launch_") or word.endswith(("_kernel_cuda", "_kernel_impl", "Ops", "Op"))
    )
    return telling and not word.startswith(general)


def _without(text: str, opening: str, closing: str) -> str:
    """A text without what stands in brackets, nested ones too."""
    kept, depth = [], 0
    for character in text:
        depth += character == opening
        if not depth:
            kept.append(character)
        depth -= character == closing and depth > 0
    return "".join(kept)


def _above(roof: str, share: str, *, analytic: bool) -> str:
    if analytic and roof not in (DRAM, L2):
        return (
            f"It lies above the roof ({share} of {roof}), counted in FLOPs of direct convolution: Winograd "
            "and FFT need fewer, so that is no error."
        )
    if analytic:
        return f"It lies above the roof ({share} of {roof}): its data stays in a cache."
    return f"It lies above the roof ({share} of {roof}): the peak is another device's or clock's."


def _unknown(row: Row) -> str:
    if not row.load.seconds:
        return "It took no time."
    missing = [
        name
        for name, value in (("FLOPs", row.standing.compute_share), ("bytes", row.standing.memory_share))
        if value is None
    ]
    return f"Its {' and '.join(missing)}, or their roof, are not known: it has no place in the picture."


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}" if 0 < share < 0.0095 else f"{share:.0%}"
