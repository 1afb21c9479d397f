"""Roofline files: PNG, SVG, HTML page and CSV, from ncu's counters or from layer times.

A roofline (`perfexp.roofline`) places kernels or layers below the ceilings of a device. `perfexp
roofline` writes these files, and so does a run with `profiler=ncu` when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.measuring.profilers import ProfilerFailed, refuse_to_overwrite
from perfexp.records import diagnostics, profile_summary
from perfexp.records.paths import RunPaths
from perfexp.records.record import Point, Record, Status, is_layers
from perfexp.report.plots import roofline_table
from perfexp.report.tables import csv_tables
from perfexp.roofline import of_csv, of_record
from perfexp.roofline.peaks import device_of, matching, of_plan
from perfexp.roofline.placement import Roofline

if TYPE_CHECKING:
    from perfexp.host.gpu_sheets import GpuFile
    from perfexp.roofline import Peaks


def to_csv(roofline: Roofline) -> bytes:
    """Return a roofline as CSV: a line for its total, each range, each part and each launch."""
    return csv_tables.to_csv(roofline_table.lines(roofline))


def files(stem: Path) -> dict[str, Path]:
    """Return the paths of a roofline's files by kind (`png`, …), from a path without suffix."""
    kinds = ("png", "svg", "html", "csv")
    return {kind: stem.with_name(f"{stem.name}.{kind}") for kind in kinds}


def stems(layers: Mapping[str, Roofline]) -> dict[str, Roofline]:
    """Return the rooflines of a record's phases by file name without suffix.

    With several phases, the name ends with the phase.
    """
    if len(layers) == 1:
        return {"roofline": next(iter(layers.values()))}
    return {f"roofline_{phase}": roofline for phase, roofline in layers.items()}


def write(roofline: Roofline, targets: Mapping[str, Path]) -> list[Path]:
    """Write a roofline's files to paths by kind, and return the paths; raises `OSError`.

    `perfexp roofline` calls it, and a run under ncu when it ends.
    """
    from perfexp.report.plots import canvas, pages, roofline_plot  # matplotlib imports slowly

    figure = roofline_plot.compose(roofline)
    svg = canvas.save(figure, "svg")
    page = pages.of_roofline(roofline, svg)
    contents = {"png": canvas.save(figure), "svg": svg, "html": page, "csv": to_csv(roofline)}
    for kind, path in targets.items():
        try:
            write_atomically(path, contents[kind])
        except OSError as error:  # the error names the temporary file, or no file
            raise OSError(error.errno, error.strerror, str(path)) from error
    return list(targets.values())


def write_profiled(record: Record, paths: RunPaths, sheets: Mapping[str, GpuFile]) -> None:
    """Write the rooflines of a run under ncu when the run ends; nothing for other profilers.

    The facts about its profile get the file names, or its point a diagnostic why there is no
    roofline.

    Args:
        sheets: data sheets of GPUs, for the ceilings.

    Raises:
        OSError: a file cannot be written.
    """
    for point, _ in profile_summary.profiles(record):
        facts = point.facts["profile"]
        if facts.get("profiler") != "ncu":
            continue
        if point.status is Status.UNSUPPORTED and not _has_layers(record):
            # the profile's own error names the profilers that support the device
            continue
        try:
            for stem, roofline in _rooflines(record, point, paths, sheets):
                targets = files(paths.root / stem)
                refuse_to_overwrite(list(targets.values()), paths.root, "the roofline is not drawn")
                paths.claim(*targets.values())
                written = [path.name for path in write(roofline, targets)]
                facts["files"] = [*(facts.get("files") or ()), *written]
        except (ProfilerFailed, UserError) as error:
            advice = "move it away and repeat the command"
            if isinstance(error, UserError):
                advice = _advice(record, point, sheets)
            reason = f"no roofline: {error}"
            point.doubts.append(
                diagnostics.make("profile_incomplete", reason=reason, advice=advice)
            )


def _advice(record: Record, point: Point, sheets: Mapping[str, GpuFile]) -> str:
    """Return what the user can do if layers, counters or peaks are missing for a roofline."""
    if point.status is not Status.OK and not _has_layers(record):
        how = "repeat the command with probes.layers=true in another output_dir"
        return f"{how} to draw it from layers"
    peaks = _peaks(record, sheets)
    if peaks.flops_per_second and peaks.dram_bytes_per_second:
        how = "repeat the command with profiler.metrics=null"
        return f"{how}, which collects the counters of a roofline"
    return "draw it later by perfexp roofline DIR --gpu NAME, or with --peak-compute and --peak-bw"


def _has_layers(record: Record) -> bool:
    """Return whether the run profiled layers, which can replace ncu's counters."""
    return any(is_layers(point.key) for point in record.points)


def _rooflines(
    record: Record, point: Point, paths: RunPaths, sheets: Mapping[str, GpuFile]
) -> Iterator[tuple[str, Roofline]]:
    """Yield file names without suffix and rooflines: from a profile's CSVs, or from layers.

    Raises:
        ProfilerFailed: a CSV cannot be read.
        UserError: no roofline can be drawn, for example without peaks.
    """
    if point.status is not Status.OK:
        yield from stems(of_record(record, sheets=sheets)).items()
        return
    for name in point.facts["profile"].get("files") or ():
        if name.endswith("_ncu.csv"):
            path = paths.root / name
            title = f"{record.name} · {path.stem}"
            roofline = of_csv(path, _peaks(record, sheets), sheets=sheets, title=title)
            yield f"{path.stem}_roofline", roofline


def _peaks(record: Record, sheets: Mapping[str, GpuFile]) -> Peaks:
    """Return a device's peaks: those in the plan first, then its data sheet's."""
    return of_plan(record.plan).or_else(matching(device_of(record)[0], sheets))
