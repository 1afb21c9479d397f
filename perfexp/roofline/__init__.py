"""Roofline: how near kernels and layers come to the peaks of a device.

May import: host, records.
Used by: commands, comparison, measuring, report.

A roofline compares work (FLOPs and bytes) and its time with a device's ceilings: peak FLOP/s and
memory bandwidth. `of_csv` reads kernels from the output of ncu (NVIDIA Nsight Compute), and
`of_record` a run's layers with their analytic work. Both return a `Roofline`;
`perfexp.report.plots.roofline_files` draws and writes it.

`listing` parses ncu's output and `counters` computes each launch's work. `peaks` has the ceilings,
`placement` the result. `sentences` adds its notes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median_high
from typing import Any

from perfexp.errors import UserError
from perfexp.host.gpu_sheets import GpuFile
from perfexp.records.layer_lines import name_of, pass_of, seconds_of
from perfexp.records.number_formats import Formats, tf32_flags
from perfexp.records.record import USUAL_PRECISION, Point, Record, is_layers
from perfexp.roofline import kernel_names, listing, sentences
from perfexp.roofline.counters import COLLECT, Counted, count, recorded_peaks, wanted
from perfexp.roofline.listing import Listing, is_listing
from perfexp.roofline.peaks import (
    ADD,
    Peaks,
    device_of,
    from_measured,
    from_source,
    matching,
    of_layers,
    of_sheet,
)
from perfexp.roofline.placement import (
    PROCESS,
    THREAD,
    Basis,
    Load,
    Roofline,
    RooflineRow,
    shares_of,
    together,
)

__all__ = ["COLLECT", "Peaks", "Roofline", "is_listing", "of_csv", "of_record", "of_sheet"]

#: Advice for a device without a data sheet.
_MEASURE_CEILINGS = (
    "Or repeat the run with probes.ceilings=true in another output_dir: it measures what a "
    "matrix product and a copy reach on the device, which become the ceilings."
)
#: Passes with known bytes; data and kernels without a layer occur in every pass.
_FORWARD = ("forward", "data", "unattributed")
#: Points that a note names; further ones are counted.
_MAX_NAMED = 3
#: Plan algorithms that leave the choice for each convolution to others.
_CHOSEN_BY_OTHERS = ("default", "fastest", "benchmark", "guess", "onednn")


def of_csv(
    path: Path,
    peaks: Peaks | None = None,
    *,
    text: str | None = None,
    sheets: Mapping[str, GpuFile] | None = None,
    title: str | None = None,
) -> Roofline:
    """Return the roofline of an ncu CSV.

    `perfexp roofline CSV` and profiled runs call it.

    Args:
        path: CSV file, which also names the roofline.
        peaks: peaks that take precedence over the file's own.
        text: CSV contents, if `path` is the report it was exported from.
        sheets: data sheets to search for the GPU in the file.
        title: plot title; by default the file name.

    Raises:
        UserError: the file cannot be read, or metrics or peaks are missing.
    """
    table = listing.read(path, wanted) if text is None else listing.parse(text, str(path), wanted)
    csv_peaks, product = recorded(table)
    peaks = (peaks or Peaks()).or_else(matching(product, sheets or {})).or_else(csv_peaks)
    return of_listing(table, peaks.compared_with(product), title or path.stem)


def of_record(
    record: Record,
    peaks: Peaks | None = None,
    *,
    sheets: Mapping[str, GpuFile] | None = None,
    title: str | None = None,
) -> dict[str, Roofline]:
    """Return the rooflines of a record's layers by phase, for example `inference` or `train`.

    Each phase shows its largest point. The arguments are the same as for `of_csv`. The default
    title names the run and the point. The report of a run and `perfexp roofline DIR` call it.

    Raises:
        UserError: the record has no layers, or peaks are missing.
    """
    phases: dict[str, list[Point]] = {}
    for point in sorted(record.points, key=lambda point: (point.key.pixels, point.key.batch_size)):
        if is_layers(point.key) and (point.facts.get("layers") or {}).get("lines"):
            phases.setdefault(point.key.phase.removesuffix("_layers"), []).append(point)
    if not phases:
        raise UserError(
            f"The run {record.name} has no layers: measure it with probes.layers=true, "
            f"or name a CSV of:\n  {COLLECT}"
        )
    product, _ = device_of(record)
    rooflines = {}
    for phase, (*smaller, point) in phases.items():
        record_peaks = of_layers(record, point)
        peaks_known = (
            (peaks or Peaks()).or_else(record_peaks).or_else(matching(product, sheets or {}))
        )
        peaks_known = peaks_known.or_else(from_measured(record_peaks))
        about = f"{phase} {point.key.size_label}, batch {point.key.batch_size}"
        name = title or f"{record.name} · {about}"
        roofline = _of_point(record, point, peaks_known.compared_with(product), name)
        rooflines[phase] = replace(roofline, notes=(*roofline.notes, *_not_drawn(smaller, point)))
    return rooflines


def _not_drawn(smaller: Sequence[Point], largest: Point) -> Iterator[str]:
    """Yield a note about points with layers that the roofline leaves out.

    Args:
        smaller: points that are left out.
        largest: point that is drawn.
    """
    if not smaller:
        return
    names = ", ".join(
        f"{point.key.size_label} batch {point.key.batch_size}" for point in smaller[-_MAX_NAMED:]
    )
    if len(smaller) > _MAX_NAMED:
        names += f" and {len(smaller) - _MAX_NAMED} smaller ones"
    yield (
        f"Only the largest of {len(smaller) + 1} points with layers is drawn, "
        f"{largest.key.size_label} batch {largest.key.batch_size}: for {names} "
        "measure a run of their own."
    )


def recorded(table: Listing) -> tuple[Peaks, str]:
    """Return the peaks that ncu recorded, in FLOP/s and bytes/s, and the GPU name.

    Each peak is the median over the launches. The name is empty if the file has none.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for launch in table.launches:
        for name, value in recorded_peaks(launch).items():
            values[name].append(value)
    peaks = {name: median_high(several) for name, several in values.items()}
    memory = peaks.pop("dram", None), peaks.pop("l2", None)
    return from_source("ncu's own, at its clocks", peaks, *memory), table.product


def of_listing(table: Listing, peaks: Peaks, title: str) -> Roofline:
    """Return the roofline of a parsed ncu file.

    Launches are summed by kernel name, and by NVTX range with all ranges around it.

    Raises:
        UserError: metrics or peaks are missing.
    """
    counted = list(map(count, table.launches))
    _check_metrics(table, counted)
    _check_peaks(table, peaks)
    kernels: defaultdict[str, list[Load]] = defaultdict(list)
    ranges: defaultdict[tuple[str, str], list[Load]] = defaultdict(list)
    launches: list[tuple[str, str, Load]] = []
    complete: list[Counted] = []
    for launch, work in zip(table.launches, counted, strict=True):
        load = _load(work, peaks)
        if load is None:
            continue
        complete.append(work)
        launches.append((launch.kernel, "/".join((*launch.stack, *launch.spans)), load))
        kernels[launch.kernel].append(load)
        for path in accumulate(launch.stack, "{}/{}".format):
            ranges[path, THREAD].append(load)
        for span in dict.fromkeys(launch.spans):
            ranges[span, PROCESS].append(load)
    if not complete:
        raise UserError(
            f"{table.source}: no launch has its time, its FLOPs and its bytes. "
            "Is the file complete?"
        )
    parts = [(name, "", together(loads)) for name, loads in kernels.items()]
    parts.sort(key=lambda part: (-part[2].seconds, part[0]))
    total = together(load for *_, load in launches)
    of_ranges = [(path, owner, together(loads)) for (path, owner), loads in ranges.items()]
    roofline = _roofline(title, peaks, total, parts, of_ranges, launches)
    notes = sentences.of_counters(roofline, complete, len(counted))
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
    """Return a roofline without notes.

    Args:
        total: load of all launches or layers.
        parts: name, place and load of each part, slowest first.
        ranges: name, owner and load of each range.
        launches: kernel, ranges and load of each launch.
        is_analytic: whether the parts are layers, whose work is analytic.
    """

    def row(level: str, number: str, label: str, part: tuple[str, str, Load]) -> RooflineRow:
        """Return a part's row, with its shares of the peaks and of the total time.

        Args:
            number: number in the plot and the table, for example `3` or `R1`.
            label: short name in the plot.
            part: `name`, `where` and `load` of the row.
        """
        name, context, load = part
        return RooflineRow(
            level=level,
            number=number,
            label=label,
            name=name,
            where=context,
            load=load,
            shares=shares_of(load, peaks),
            time_share=load.seconds / total.seconds,
        )

    level, names = "layer", [name for name, *_ in parts]
    if not is_analytic:
        level, names = "kernel", list(map(kernel_names.short, names))
    rows: list[RooflineRow] = []
    # number and label of a part by its name, for its launches
    part_of: dict[str, tuple[str, str]] = {}
    for label, part in zip(kernel_names.numbered(names), parts, strict=True):
        part_row = row(level, str(len(rows) + 1), label, part)
        rows.append(part_row)
        part_of[part_row.name] = part_row.number, part_row.label
    range_rows = [row("range", f"R{n}", part[0], part) for n, part in enumerate(ranges, 1)]
    launch_rows = [row("launch", *part_of[launch[0]], launch) for launch in launches]
    return Roofline(
        title=title,
        peaks=peaks,
        parts=tuple(rows),
        ranges=tuple(range_rows),
        total=row("total", "", "total", ("total", "", total)),
        launches=tuple(launch_rows),
        analytic=is_analytic,
    )


def _load(work: Counted, peaks: Peaks) -> Load | None:
    """Return a launch's time, FLOPs and bytes; None if one of them is unknown.

    If FLOPs or bytes were not counted, they follow from the time and the share of a peak rate.
    """
    seconds, flops, moved = work.seconds, work.flops, work.dram_bytes
    if not seconds:
        return None
    flops_basis = Basis.instructions if work.estimated else Basis.counted
    bytes_basis = Basis.counted
    if flops is None and work.sm_share is not None and peaks.reference:
        flops_basis = Basis.percentage
        _, flops_per_second = peaks.reference
        flops = {"fp32": work.sm_share * flops_per_second * seconds}
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
    """Raise `UserError` if a file has no launch with time, FLOPs and bytes.

    The message names the missing metrics and how to collect them.
    """
    has_seconds = has_flops = has_dram = has_l2 = is_complete = False
    unsized = set[str]()
    for work in counted:
        unsized.update(work.lacking)
        has_seconds |= bool(work.seconds)
        has_flops |= work.flops is not None or work.sm_share is not None
        has_dram |= work.dram_bytes is not None or work.dram_share is not None
        has_l2 |= bool(work.l2_bytes)
        is_complete |= bool(work.seconds and (work.flops or work.sm_share is not None))
    missing = []
    if not has_seconds:
        missing.append("gpu__time_duration.sum")
    if not has_flops:
        usual = "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum (and fadd, fmul, …)"
        missing.append(min(unsized, default=usual))
    if not has_dram:
        missing.append(
            "dram__bytes.sum (or dram__bytes_read.sum and dram__bytes_write.sum, "
            "or dram__bytes_op_read.sum and …)"
        )
    if is_complete and not missing:
        return
    unavailable = sorted(table.unavailable)[:4]
    lacks = f"{table.source} lacks {'; '.join(missing)}."
    if unavailable:
        lacks += f" ncu could not measure {', '.join(unavailable)} (n/a)."
    lacks = " ".join([lacks, *table.notes])
    # a user of a chip without DRAM counters cannot follow the usual advice
    without_dram = all(name.startswith("dram__") for name in missing)
    if without_dram and (has_l2 or "dram__" in " ".join(unavailable)):
        raise UserError(
            f"{lacks} Integrated GPUs (Jetson, GB10) have no DRAM counters. "
            "Draw the layers of a run on such a chip: measure it with probes.layers=true."
        )
    names = sorted(table.names)
    if len(names) > 6:
        names[6:] = ["…"]
    raise UserError(
        f"{lacks} It has: {', '.join(names) or 'none'}. Collect what is needed with:\n  {COLLECT}"
    )


def _check_peaks(table: Listing, peaks: Peaks) -> None:
    """Raise `UserError` if a ceiling is unknown."""
    if not peaks.flops_per_second or not peaks.dram_bytes_per_second:
        device = table.product or "an unnamed GPU"
        capability = next((launch.capability for launch in table.launches if launch.capability), "")
        if capability and not table.product:
            device = f"a GPU of compute capability {capability}"
        raise UserError(f"{table.source}: {_unknown_peaks(device, peaks)}")


def _unknown_peaks(device: str, peaks: Peaks, *, is_gpu: bool = True) -> str:
    """Return which peaks of a device are unknown, and what to do."""
    missing = []
    if not peaks.flops_per_second:
        missing.append("FLOP/s")
    if not peaks.dram_bytes_per_second:
        missing.append("memory bandwidth")
    names = " and ".join(missing) or "in this precision"
    reason = f"it was measured on {device}, whose peak {names} is unknown"
    if not is_gpu:
        return (
            f"{reason}: there are data sheets of GPUs only. "
            "Give --peak-compute TFLOP/s and --peak-bw GB/s."
        )
    return (
        f"{reason}. Name the GPU (--gpu t4, h100, …), give --peak-compute TFLOP/s and "
        f"--peak-bw GB/s, or add {ADD} and use --gpu NAME."
    )


def _of_point(record: Record, point: Point, peaks: Peaks, title: str) -> Roofline:
    """Return the roofline of one point's layers.

    Args:
        record: the run.
        point: result with timed layers in its facts.
        peaks: ceilings for all its number formats.

    Raises:
        UserError: no layer took time, or a ceiling is unknown.
    """
    formats = _formats(record, point)
    lines = point.facts["layers"]["lines"]
    algorithm = _algorithm_of_all(record)
    timed = [line for line in lines if seconds_of(line) > 0]
    timed.sort(key=lambda line: (-seconds_of(line), _label(line)))
    if not timed:
        raise UserError(f"{record.name}, {point.key}: no layer took measurable time.")
    if not (all(map(peaks.of, formats)) and peaks.dram_bytes_per_second):
        product, device_kind = device_of(record)
        unknown = _unknown_peaks(product or "an unknown device", peaks, is_gpu=device_kind != "cpu")
        raise UserError(f"{record.name}, {point.key}: {unknown} {_MEASURE_CEILINGS}")
    parts = [(_label(line), pass_of(line), _analytic([line], formats, algorithm)) for line in timed]
    passes: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        passes[pass_of(line)].append(line)
    ranges = [
        (name, "pass", _analytic(pass_lines, formats, algorithm))
        for name, pass_lines in passes.items()
    ]
    total = _analytic(lines, formats, algorithm)
    roofline = _roofline(title, peaks, total, parts, ranges, is_analytic=True)
    return replace(roofline, notes=tuple(sentences.of_definitions(roofline, point.doubts)))


def _formats(record: Record, point: Point) -> Formats:
    """Return the number formats that a point's convolutions and matrix products used."""
    if point.key.precision == USUAL_PRECISION:
        return Formats.of_flags(tf32_flags(record.environment) or (False, False))
    name = point.key.precision.removeprefix("amp_")
    return Formats(name, name)


def _analytic(lines: Sequence[Mapping[str, Any]], formats: Formats, algorithm: str) -> Load:
    """Return the time and analytic work of some layers.

    A line is a layer in one pass. Lines with known work cover the whole call, so other lines add
    nothing. Lines without time count too: one operator may do the work for several layers. Only
    forward passes have known bytes.

    Args:
        lines: layer lines from the point's facts.
        algorithm: algorithm of all convolutions; empty if it is unknown.
    """
    timed = [line for line in lines if seconds_of(line) > 0]
    flops: defaultdict[str, float] = defaultdict(float)
    moved = []
    for line in lines:
        if line["flops"] is not None:
            kind = formats.convolutions if line.get("convolution") else formats.products
            flops[kind] += line["flops"]
        if line["bytes_min"] is not None:
            moved.append(line["bytes_min"])
    has_bytes = moved and all(pass_of(line) in _FORWARD for line in timed)
    return Load(
        seconds=sum(map(seconds_of, lines)),
        launches=len(timed),
        flops=dict(flops) or None,
        dram_bytes=float(sum(moved)) if has_bytes else None,
        flops_basis=Basis.analytic,
        bytes_basis=Basis.analytic,
        may_be_less=any(_may_multiply_less(line, algorithm) for line in timed),
    )


def _algorithm_of_all(record: Record) -> str:
    """Return the algorithm that a plan requests for every convolution.

    Empty if torch or a race chooses, or if there are several.
    """
    node = record.plan.get("algorithm")
    if not isinstance(node, Mapping) or node.get("layers"):
        return ""
    name = str(node.get("name", ""))
    if name in _CHOSEN_BY_OTHERS:
        return ""
    return name


def _may_multiply_less(line: Mapping[str, Any], algorithm: str) -> bool:
    """Return whether a layer's convolution ran Winograd or FFT, or an unknown algorithm."""
    ran = str(line.get("ran") or algorithm)
    return bool(line.get("convolution")) and (not ran or "winograd" in ran or "fft" in ran)


def _label(line: Mapping[str, Any]) -> str:
    """Return a layer's name, and its pass unless that is the forward pass or the name itself.

    For example `layer1.0.conv1` or `layer1.0.conv1 (backward)`. Device time outside of
    modules has no pass.
    """
    name, pass_name = name_of(line), pass_of(line)
    is_in_module = isinstance(line["key"], Mapping)
    if is_in_module and pass_name not in ("forward", name):
        return f"{name} ({pass_name})"
    return name
