"""Rooflines of the launches in a file of ncu and of the layers in a record."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_high
from typing import Any

from perfexp.errors import UserError
from perfexp.host.gpu_sheets import GpuFile
from perfexp.records.layer_lines import name_of, pass_of, seconds_of
from perfexp.records.number_formats import Formats, tf32_flags
from perfexp.records.record import USUAL_PRECISION, Point, Record, is_layers
from perfexp.roofline import caveats, kernel_names, listing
from perfexp.roofline.counters import COLLECT, Counted, count, recorded_peaks, wanted
from perfexp.roofline.listing import Listing
from perfexp.roofline.peaks import (
    ADD,
    Peaks,
    device_of,
    from_measured,
    from_source,
    matching,
    of_layers,
)
from perfexp.roofline.placement import (
    PROCESS,
    THREAD,
    Basis,
    Load,
    Roofline,
    Row,
    shares_of,
    together,
)

#: What a run can do for a device without a data sheet.
_MEASURE_CEILINGS = (
    "Or repeat the run with probes.ceilings=true in another output_dir: it measures what a matrix product and a copy "
    "reach on the device, which become the ceilings."
)
#: Passes with known bytes; data and kernels without a row occur in every pass.
_FORWARD = ("forward", "data", "unattributed")
_MAX_NAMED = 3
#: Algorithms of a plan by whose name nobody knows what computed a convolution.
_CHOSEN_BY_OTHERS = ("default", "fastest", "benchmark", "guess", "onednn")


def of_csv(
    path: Path,
    peaks: Peaks | None = None,
    *,
    text: str | None = None,
    sheets: Mapping[str, GpuFile] | None = None,
    title: str | None = None,
) -> Roofline:
    """The roofline of a CSV of ncu; raises `UserError` if it can't be read, or metrics or peaks are missing.

    Args:
        peaks: peaks that take precedence over those in the file.
        text: contents of the CSV, where `path` is the report that it was exported from.
        sheets: data sheets to search for the GPU in the file.
        title: title of the plot; by default the file's name.
    """
    table = listing.read(path, wanted) if text is None else listing.parse(text, str(path), wanted)
    own, product = recorded(table)
    peaks = (peaks or Peaks()).or_else(matching(product, sheets or {})).or_else(own)
    return of_listing(table, peaks.compared_with(product), title or path.stem)


def of_record(
    record: Record,
    peaks: Peaks | None = None,
    *,
    sheets: Mapping[str, GpuFile] | None = None,
    title: str | None = None,
) -> dict[str, Roofline]:
    """The rooflines of a record's layers, by phase (`inference`, `train`): the largest point of each.

    It raises `UserError` if the record has no layers, or peaks are missing. The arguments are those of `of_csv`; the
    plots have by default the title of the run and the point.
    """
    phases: dict[str, list[Point]] = {}
    for point in sorted(record.points, key=lambda point: (point.key.pixels, point.key.batch_size)):
        if is_layers(point.key) and (point.facts.get("layers") or {}).get("lines"):
            phases.setdefault(point.key.phase.removesuffix("_layers"), []).append(point)
    if not phases:
        raise UserError(
            f"The run {record.name} has no layers: measure it with probes.layers=true, or name a CSV of:\n  {COLLECT}"
        )
    (product, _), rooflines = device_of(record), {}
    for phase, (*smaller, point) in phases.items():
        own = of_layers(record, point)
        known = (
            (peaks or Peaks())
            .or_else(own)
            .or_else(matching(product, sheets or {}))
            .or_else(from_measured(own))
        )
        name = (
            title or f"{record.name} · {phase} {point.key.size_label}, batch {point.key.batch_size}"
        )
        roofline = _of_point(record, point, known.compared_with(product), name)
        rooflines[phase] = replace(roofline, notes=(*roofline.notes, *_not_drawn(smaller, point)))
    return rooflines


def _not_drawn(smaller: Sequence[Point], largest: Point) -> Iterator[str]:
    if smaller:
        names = ", ".join(
            f"{point.key.size_label} batch {point.key.batch_size}"
            for point in smaller[-_MAX_NAMED:]
        )
        more = f" and {len(smaller) - _MAX_NAMED} smaller ones" if len(smaller) > _MAX_NAMED else ""
        yield (
            f"Only the largest of {len(smaller) + 1} points with layers is drawn, {largest.key.size_label} batch "
            f"{largest.key.batch_size}: for {names}{more} measure a run of their own."
        )


def recorded(table: Listing) -> tuple[Peaks, str]:
    """The peaks that ncu recorded in a file (medians over launches), and its name of the GPU."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for launch in table.launches:
        for name, value in recorded_peaks(launch).items():
            values[name].append(value)
    peaks = {name: median_high(several) for name, several in values.items()}
    dram, l2 = peaks.pop("dram", None), peaks.pop("l2", None)
    return from_source("ncu's own, at its clocks", peaks, dram, l2), table.product


def of_listing(table: Listing, peaks: Peaks, title: str) -> Roofline:
    """The roofline of a parsed file of ncu; raises `UserError` if metrics or peaks are missing."""
    counted = [count(launch) for launch in table.launches]
    _check_metrics(table, counted)
    _check_peaks(table, peaks)
    works = zip(table.launches, counted, strict=True)
    complete = [(launch, work, load) for launch, work in works if (load := _load(work, peaks))]
    if not complete:
        raise UserError(
            f"{table.source}: no launch has its time, its FLOPs and its bytes. Is the file complete?"
        )
    kernels: defaultdict[str, list[Load]] = defaultdict(list)
    ranges: defaultdict[tuple[str, str], list[Load]] = defaultdict(list)
    for launch, _, load in complete:
        kernels[launch.kernel].append(load)
        for depth in range(len(launch.stack)):
            ranges["/".join(launch.stack[: depth + 1]), THREAD].append(load)
        for span in dict.fromkeys(launch.spans):
            ranges[span, PROCESS].append(load)
    parts = [(name, "", together(loads)) for name, loads in kernels.items()]
    roofline = _roofline(
        title,
        peaks,
        together(load for *_, load in complete),
        sorted(parts, key=lambda part: (-part[2].seconds, part[0])),
        [(path, owner, together(loads)) for (path, owner), loads in ranges.items()],
        [
            (launch.kernel, "/".join((*launch.stack, *launch.spans)), load)
            for launch, _, load in complete
        ],
    )
    notes = caveats.of_counters(roofline, [work for _, work, _ in complete], len(counted))
    return replace(roofline, notes=(*table.notes, *notes))


def _roofline(
    title: str,
    peaks: Peaks,
    total: Load,
    parts: Sequence[tuple[str, str, Load]],
    ranges: Iterable[tuple[str, str, Load]],
    launches: Iterable[tuple[str, str, Load]] = (),
    *,
    is_analytic: bool = False,
) -> Roofline:
    """A roofline without notes.

    Parts have name, place and load, the slowest first; ranges name, owner, load; launches kernel, ranges, load.
    """

    def row(level: str, number: str, label: str, name: str, where: str, load: Load) -> Row:
        return Row(
            level=level,
            number=number,
            label=label,
            name=name,
            where=where,
            load=load,
            shares=shares_of(load, peaks),
            time_share=load.seconds / total.seconds,
        )

    level, short = ("layer", str) if is_analytic else ("kernel", kernel_names.short)
    labels = kernel_names.numbered(short(name) for name, *_ in parts)
    rows = tuple(
        row(level, str(n), label, *part)
        for n, (label, part) in enumerate(zip(labels, parts, strict=True), 1)
    )
    part_of = {row.name: row for row in rows}
    return Roofline(
        title=title,
        peaks=peaks,
        parts=rows,
        ranges=tuple(row("range", f"R{n}", one[0], *one) for n, one in enumerate(ranges, 1)),
        total=row("total", "", "total", "total", "", total),
        launches=tuple(
            row("launch", part_of[one[0]].number, part_of[one[0]].label, *one) for one in launches
        ),
        analytic=is_analytic,
    )


def _load(work: Counted, peaks: Peaks) -> Load | None:
    """The work of a launch, shares of a peak as rates; None where a quantity is missing."""
    seconds, flops, moved = work.seconds, work.flops, work.dram_bytes
    if not seconds:
        return None
    flops_basis = Basis.instructions if work.estimated else Basis.counted
    bytes_basis = Basis.counted
    if flops is None and work.sm_share is not None and peaks.reference:
        flops_basis = Basis.percentage
        flops = {"fp32": work.sm_share * peaks.reference[1] * seconds}
    if moved is None and work.dram_share is not None and peaks.dram_bytes_per_second:
        bytes_basis = Basis.percentage
        moved = work.dram_share * peaks.dram_bytes_per_second * seconds
    if flops is None or moved is None:
        return None
    return Load(
        seconds=seconds,
        flops=flops,
        dram_bytes=moved,
        l2_bytes=work.l2_bytes,
        flops_basis=flops_basis,
        bytes_basis=bytes_basis,
    )


def _check_metrics(table: Listing, counted: Sequence[Counted]) -> None:
    missing = [] if any(work.seconds for work in counted) else ["gpu__time_duration.sum"]
    if all(work.flops is None and work.sm_share is None for work in counted):
        unsized = sorted({name for work in counted for name in work.lacking})
        missing += unsized[:1] or [
            "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum (and fadd, fmul, …)"
        ]
    if all(work.dram_bytes is None and work.dram_share is None for work in counted):
        missing.append(
            "dram__bytes.sum (or dram__bytes_read.sum and dram__bytes_write.sum, or dram__bytes_op_read.sum and …)"
        )
    if not missing and any(
        work.seconds and (work.flops or work.sm_share is not None) for work in counted
    ):
        return
    names, unavailable = sorted(table.names), sorted(table.unavailable)[:4]
    remarks = [f"ncu could not measure {', '.join(unavailable)} (n/a)."] if unavailable else []
    lacks = " ".join([f"{table.source} lacks {'; '.join(missing)}.", *remarks, *table.notes])
    without_dram = all(name.startswith("dram__") for name in missing)
    if without_dram and (
        any(work.l2_bytes for work in counted) or any("dram__" in name for name in unavailable)
    ):
        raise UserError(
            f"{lacks} Integrated GPUs (Jetson, GB10) have no DRAM counters. Draw the layers of a run on such a chip: "
            "measure it with probes.layers=true."
        )
    raise UserError(
        f"{lacks} It has: {', '.join(names[:6] + ['…'] * (len(names) > 6)) or 'none'}. Collect what is needed with:\n"
        f"  {COLLECT}"
    )


def _check_peaks(table: Listing, peaks: Peaks) -> None:
    if not peaks.flops_per_second or not peaks.dram_bytes_per_second:
        capability = next((launch.capability for launch in table.launches if launch.capability), "")
        device = table.product or (
            f"a GPU of compute capability {capability}" if capability else "an unnamed GPU"
        )
        raise UserError(f"{table.source}: {_unknown_peaks(device, peaks)}")


def _unknown_peaks(device: str, peaks: Peaks, *, is_gpu: bool = True) -> str:
    missing = [] if peaks.flops_per_second else ["FLOP/s"]
    missing += [] if peaks.dram_bytes_per_second else ["memory bandwidth"]
    reason = f"it was measured on {device}, whose peak {' and '.join(missing or ['in this precision'])} is unknown"
    if not is_gpu:
        return f"{reason}: there are data sheets of GPUs only. Give --peak-compute TFLOP/s and --peak-bw GB/s."
    return (
        f"{reason}. Name the GPU (--gpu t4, h100, …), give --peak-compute TFLOP/s and --peak-bw GB/s, or "
        f"add {ADD} and use --gpu NAME."
    )


def _of_point(record: Record, point: Point, peaks: Peaks, title: str) -> Roofline:
    formats, lines = _formats(record, point), point.facts["layers"]["lines"]
    algorithm = _algorithm_of_all(record)
    timed = sorted(
        (line for line in lines if seconds_of(line) > 0),
        key=lambda line: (-seconds_of(line), _layer(line)),
    )
    if not timed:
        raise UserError(f"{record.name}, {point.key}: no layer took measurable time.")
    if not (all(map(peaks.of, formats)) and peaks.dram_bytes_per_second):
        product, device_kind = device_of(record)
        unknown = _unknown_peaks(product or "an unknown device", peaks, is_gpu=device_kind != "cpu")
        raise UserError(f"{record.name}, {point.key}: {unknown} {_MEASURE_CEILINGS}")
    passes: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        passes[pass_of(line)].append(line)
    roofline = _roofline(
        title,
        peaks,
        _analytic(lines, formats, algorithm),
        [(_layer(line), pass_of(line), _analytic([line], formats, algorithm)) for line in timed],
        [(name, "pass", _analytic(own, formats, algorithm)) for name, own in passes.items()],
        is_analytic=True,
    )
    return replace(roofline, notes=tuple(caveats.of_definitions(roofline, point.doubts)))


def _formats(record: Record, point: Point) -> Formats:
    if point.key.precision == USUAL_PRECISION:
        return Formats.of_flags(tf32_flags(record.environment) or (False, False))
    name = point.key.precision.removeprefix("amp_")
    return Formats(name, name)


def _analytic(lines: Sequence[Mapping[str, Any]], formats: Formats, algorithm: str) -> Load:
    """The work of some lines: those with known work cover the whole call, so the others add nothing.

    Lines without time count too, since one operator may do the work of several. Only forward passes have known bytes.
    """
    timed = [line for line in lines if seconds_of(line) > 0]
    flops = Counter[str]()
    for line in lines:
        if line["flops"] is not None:
            flops[formats.convolutions if line.get("convolution") else formats.products] += line[
                "flops"
            ]
    moved = [line["bytes_min"] for line in lines if line["bytes_min"] is not None]
    has_bytes = moved and all(pass_of(line) in _FORWARD for line in timed)
    return Load(
        seconds=sum(map(seconds_of, lines)),
        launches=len(timed),
        flops={kind: float(amount) for kind, amount in flops.items()} or None,
        dram_bytes=float(sum(moved)) if has_bytes else None,
        flops_basis=Basis.analytic,
        bytes_basis=Basis.analytic,
        may_be_less=any(_may_multiply_less(line, algorithm) for line in timed),
    )


def _algorithm_of_all(record: Record) -> str:
    """The algorithm that a plan requests for every convolution; empty where torch or a race chooses, or for several."""
    node = record.plan.get("algorithm")
    name = str(node.get("name", "")) if isinstance(node, Mapping) and not node.get("layers") else ""
    return "" if name in _CHOSEN_BY_OTHERS else name


def _may_multiply_less(line: Mapping[str, Any], algorithm: str) -> bool:
    """Whether a layer's convolution ran Winograd or FFT, or nobody observed what it ran."""
    ran = str(line.get("ran") or algorithm)
    return bool(line.get("convolution")) and (not ran or "winograd" in ran or "fft" in ran)


def _layer(line: Mapping[str, Any]) -> str:
    """Name of a line, with the pass unless it is the forward pass."""
    name, which = name_of(line), pass_of(line)
    return (
        name
        if not isinstance(line["key"], Mapping) or which in ("forward", name)
        else f"{name} ({which})"
    )
