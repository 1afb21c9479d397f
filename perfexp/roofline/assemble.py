"""Assemble: launches of a file, or layers of a record, as rows below their roofs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfexp.errors import UserError
from perfexp.records.record import Point, Record
from perfexp.roofline.below import Roofline
from perfexp.roofline.caveats import of_counters, of_definitions
from perfexp.roofline.counters import COLLECT, Counted, count, recorded_peaks
from perfexp.roofline.listing import Launch, Listing
from perfexp.roofline.peaks import ADD, Peaks, data_type
from perfexp.roofline.placement import PROCESS, THREAD, Basis, Load, Row, stand, together
from perfexp.roofline.sentences import short
from perfexp.roofline.short_names import marks, words_apart

#: What a run can do itself for a device without a data sheet.
_BY_MEASURING = (
    "Or repeat the run with probes.ceilings=true in another output_dir: it measures what a matrix product and a copy "
    "reach on the device, which are the roofs then."
)
#: Passes of which bytes are known; data and kernels of no row come in every pass.
_FORWARD = ("forward", "data", "unattributed")


def recorded(listing: Listing) -> tuple[Peaks, str]:
    """The peaks that a file itself says, and what it calls the GPU.

    Args:
        listing: of ncu.
    """
    known: defaultdict[str, list[float]] = defaultdict(list)
    for launch in listing.launches:
        for name, value in recorded_peaks(launch).items():
            known[name].append(value)
    middle = {name: sorted(values)[len(values) // 2] for name, values in known.items()}
    compute = {name: value for name, value in middle.items() if name not in ("dram", "l2")}
    peaks = Peaks(
        flops_per_second=compute,
        dram_bytes_per_second=middle.get("dram"),
        l2_bytes_per_second=middle.get("l2"),
        sources=("ncu's own, at its clocks",) if compute or "dram" in middle else (),
    )
    return peaks, next((launch.product for launch in listing.launches if launch.product), "")


def of_listing(listing: Listing, peaks: Peaks, title: str) -> Roofline:
    """The roofline of a file of ncu.

    Args:
        listing: with its launches.
        peaks: of the GPU.
        title: what was measured.

    Raises:
        UserError: metrics or peaks are missing.
    """
    counted = [count(launch) for launch in listing.launches]
    _refuse_missing(listing, counted)
    _refuse_unknown(listing, peaks)
    loads = [_load(each, peaks) for each in counted]
    known = [(launch, load) for launch, load in zip(listing.launches, loads, strict=True) if load]
    if not known:
        raise UserError(f"{listing.source}: no launch has its time, its FLOPs and its bytes. Is the file whole?")
    used = [each for each, load in zip(counted, loads, strict=True) if load]
    percentages = any(each.flops is None for each in used)
    whole = together(load for _, load in known)
    make = _Maker(peaks=peaks, seconds=whole.seconds)
    by_kernel: defaultdict[str, list[Load]] = defaultdict(list)
    for launch, load in known:
        by_kernel[launch.kernel].append(load)
    ranges = _ranges(known, make)
    parts = _told_apart(_slowest_first(make("kernel", name, together(each)) for name, each in by_kernel.items()))
    of_kernel = {row.name: row for row in parts}
    roofline = Roofline(
        title=title,
        peaks=peaks,
        parts=parts,
        launches=tuple(
            replace(
                make("launch", launch.kernel, load, where="/".join((*launch.stack, *launch.spans))),
                label=of_kernel[launch.kernel].label,
                mark=of_kernel[launch.kernel].mark,
            )
            for launch, load in known
        ),
        ranges=ranges,
        total=make("total", "total", whole),
        notes=(),
        percentages=percentages,
        estimated=percentages or any(each.estimated or each.dram_bytes is None for each in used),
    )
    return replace(roofline, notes=(*listing.notes, *of_counters(roofline, used, len(counted))))


def of_point(record: Record, point: Point, peaks: Peaks, title: str) -> Roofline:
    """The roofline of a record's layers: FLOPs and bytes by definition, times as they were measured.

    Args:
        record: of a run with probes.layers=true.
        point: of its layers.
        peaks: of the device.
        title: what was measured.

    Raises:
        UserError: no layer took time, or peaks are missing.
    """
    kind = data_type(point.key.precision)
    lines = point.facts["layers"]["lines"]
    timed = [line for line in lines if _seconds(line) > 0]
    where = f"{record.name}, {point.key}"
    if not timed:
        raise UserError(f"{where}: no layer took time that could be measured.")
    if not (peaks.of(kind) and peaks.dram_bytes_per_second):
        raise UserError(f"{where}: {_unknown_peaks(*_device(record), peaks)} {_BY_MEASURING}")
    whole = _sum(lines, kind)
    make = _Maker(peaks=peaks, seconds=whole.seconds)
    passes: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        passes[_pass(line)].append(line)
    roofline = Roofline(
        title=title,
        peaks=peaks,
        parts=_told_apart(
            _slowest_first(make("layer", _layer(line), _one(line, kind), where=_pass(line)) for line in timed)
        ),
        launches=(),
        ranges=tuple(make("range", name, _sum(each, kind), where="pass") for name, each in passes.items()),
        total=make("total", "total", whole),
        notes=(),
        analytic=True,
    )
    return replace(roofline, notes=tuple(of_definitions(roofline, point.doubts)))


def _one(line: Mapping[str, Any], kind: str) -> Load:
    """The work of one layer in one pass."""
    flops, moved = line["flops"], line["bytes_min"]
    return Load(
        seconds=_seconds(line),
        flops=None if flops is None else {kind: float(flops)},
        dram_bytes=None if moved is None else float(moved),
        flops_basis=Basis.analytic,
        bytes_basis=Basis.analytic,
    )


def _sum(lines: Sequence[Mapping[str, Any]], kind: str) -> Load:
    """The work of many: the rows whose work is known are the whole call, so that the others have none of their own.

    Rows that took no time count too, since one operator may do the work of several. What other passes than the forward
    pass move is not known.
    """
    flops = [line["flops"] for line in lines if line["flops"] is not None]
    moved = [line["bytes_min"] for line in lines if line["bytes_min"] is not None]
    forward = all(_pass(line) in _FORWARD for line in lines if _seconds(line) > 0)
    return Load(
        seconds=sum(map(_seconds, lines)),
        launches=sum(_seconds(line) > 0 for line in lines),
        flops={kind: float(sum(flops))} if flops else None,
        dram_bytes=float(sum(moved)) if moved and forward else None,
        flops_basis=Basis.analytic,
        bytes_basis=Basis.analytic,
    )


def _seconds(line: Mapping[str, Any]) -> float:
    return float(line["seconds"]["median"])


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes rows below the same roofs."""

    peaks: Peaks
    seconds: float

    def __call__(self, level: str, name: str, load: Load, *, where: str = "") -> Row:
        return Row(
            level=level,
            name=name,
            label=short(name) if level in ("kernel", "launch") else name,
            load=load,
            standing=stand(load, self.peaks),
            time_share=load.seconds / self.seconds,
            where=where,
        )


def _slowest_first(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.load.seconds, row.name)))


def _told_apart(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The same rows, no two of them with the same label, nor with the same one where it is cut."""
    marked = [
        replace(row, label=f"{row.label}{mark}", mark=mark)
        for row, mark in zip(rows, _marks_of_rows(rows), strict=True)
    ]
    words = words_apart([row.label for row in marked])
    return tuple(row if row.mark else replace(row, mark=word) for row, word in zip(marked, words, strict=True))


def _marks_of_rows(rows: Sequence[Row]) -> list[str]:
    """By name; rows of one name, as of a layer that is called twice, are numbered."""
    labels = {row.name: row.label for row in rows}
    ends, seen = marks([row.name for row in rows], labels.__getitem__), Counter[str]()
    found = []
    for row in rows:
        seen[row.name] += 1
        again = seen[row.name]
        found.append(f"{ends[row.name]} #{again}" if again > 1 else ends[row.name])
    return found


def _load(counted: Counted, peaks: Peaks) -> Load | None:
    """The work of a launch; parts of a peak become rates. None where something is missing."""
    seconds, flops, moved = counted.seconds, counted.flops, counted.dram_bytes
    reference, memory = peaks.reference, peaks.dram_bytes_per_second
    of_flops = Basis.instructions if counted.estimated else Basis.counted
    of_bytes = Basis.counted
    if seconds and flops is None and counted.sm_share is not None and reference:
        flops, of_flops = {"fp32": counted.sm_share * reference[1] * seconds}, Basis.percentage
    if seconds and moved is None and counted.dram_share is not None and memory:
        moved, of_bytes = counted.dram_share * memory * seconds, Basis.percentage
    if not seconds or flops is None or moved is None:
        return None
    return Load(
        seconds=seconds,
        flops=flops,
        dram_bytes=moved,
        l2_bytes=counted.l2_bytes,
        flops_basis=of_flops,
        bytes_basis=of_bytes,
    )


def _ranges(known: Sequence[tuple[Launch, Load]], make: _Maker) -> tuple[Row, ...]:
    """A row for each range and those around it; ranges of a process stand beside those of threads."""
    found: defaultdict[tuple[str, str], list[Load]] = defaultdict(list)
    for launch, load in known:
        for depth in range(len(launch.stack)):
            found["/".join(launch.stack[: depth + 1]), THREAD].append(load)
        for span in dict.fromkeys(launch.spans):
            found[span, PROCESS].append(load)
    return tuple(make("range", path, together(loads), where=kind) for (path, kind), loads in found.items())


def _refuse_missing(listing: Listing, counted: Sequence[Counted]) -> None:
    """Metrics that no launch has."""
    missing = []
    if not any(each.seconds for each in counted):
        missing.append("gpu__time_duration.sum")
    if all(each.flops is None and each.sm_share is None for each in counted):
        unsized = sorted({name for each in counted for name in each.lacking})
        missing.append(
            unsized[0] if unsized else "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum (and fadd, fmul, …)"
        )
    if all(each.dram_bytes is None and each.dram_share is None for each in counted):
        missing.append(
            "dram__bytes.sum (or dram__bytes_read.sum and dram__bytes_write.sum, or dram__bytes_op_read.sum and …)"
        )
    complete = (each.seconds and (each.flops or each.sm_share is not None) for each in counted)
    if not missing and any(complete):
        return
    has = ", ".join(sorted(listing.names)[:6]) + (", …" if len(listing.names) > 6 else "") or "none"
    refused = (
        f" ncu could not measure {', '.join(sorted(listing.unavailable)[:4])} (n/a)." if listing.unavailable else ""
    )
    refused = " ".join([refused, *listing.notes])
    raise UserError(
        f"{listing.source} lacks {'; '.join(missing)}.{refused} It has: {has}. "
        f"Collect what is needed with:\n  {COLLECT}"
    )


def _refuse_unknown(listing: Listing, peaks: Peaks) -> None:
    if not (peaks.reference or peaks.flops_per_second) or not peaks.dram_bytes_per_second:
        product = next((launch.product for launch in listing.launches if launch.product), "")
        capability = next((launch.capability for launch in listing.launches if launch.capability), "")
        device = product or (f"a GPU of compute capability {capability}" if capability else "a GPU that is not named")
        raise UserError(f"{listing.source}: {_unknown_peaks(device, True, peaks)}")


def _unknown_peaks(device: str, is_gpu: bool, peaks: Peaks) -> str:
    missing = [] if peaks.flops_per_second else ["FLOP/s"]
    missing += [] if peaks.dram_bytes_per_second else ["memory bandwidth"]
    told = f"it was measured on {device}, whose peak {' and '.join(missing or ['in this precision'])} is not known"
    if not is_gpu:
        return f"{told}: there are data sheets of GPUs only. Give --peak-compute TFLOP/s and --peak-bw GB/s."
    return (
        f"{told}. Say which GPU it was (--gpu t4, h100, …), give --peak-compute TFLOP/s and --peak-bw GB/s, or "
        f"add {ADD} and say --gpu NAME."
    )


def _device(record: Record) -> tuple[str, bool]:
    """The name of the device that a record was measured on, and whether it may be a GPU."""
    device = record.environment.get("device")
    known = device if isinstance(device, Mapping) else {}
    return str(known.get("name") or "a device that is not known"), known.get("kind") != "cpu"


def _pass(line: Mapping[str, Any]) -> str:
    key = line["key"]
    return str(key["which"]) if isinstance(key, Mapping) else "unattributed"


def _layer(line: Mapping[str, Any]) -> str:
    """The module's path, and the operation behind it that its code calls; the pass, unless it is the forward pass."""
    key = line["key"]
    if not isinstance(key, Mapping):
        return str(line["kind"])
    operation = line["kind"] if key.get("operation") is not None or not key.get("path") else ""
    name = ".".join(filter(None, (str(key.get("path") or ""), str(operation or ""))))
    return name if _pass(line) in ("forward", name) else f"{name} ({_pass(line)})"
