"""Profile rooflines: the picture and the table of what ncu counted in a run, or of its layers where ncu could not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perfexp.errors import UserError
from perfexp.plots import roofline_files as sink
from perfexp.profilers import ProfilerFailed, refuse_to_overwrite
from perfexp.records import diagnostics
from perfexp.records.paths import RunPaths
from perfexp.records.record import Point, Record, Status, is_layers
from perfexp.roofline import of_csv, of_record
from perfexp.roofline.peaks import matching, of_plan
from perfexp.summaries import profile_summary

if TYPE_CHECKING:
    from perfexp.host.gpu_sheets import GpuFile
    from perfexp.roofline import Peaks, Roofline

_COUNTED = "_ncu.csv"


def write(record: Record, paths: RunPaths, sheets: Mapping[str, GpuFile]) -> None:
    """Write the rooflines of a run under ncu; their names join those of the profile's files.

    Args:
        record: of any run; where there is no roofline, its profile says why.
        paths: of the run's folder.
        sheets: data sheets, by name.

    Raises:
        OSError: the folder can't be written.
    """
    for point in profile_summary.points(record):
        facts = point.facts["profile"]
        if facts.get("profiler") != "ncu" or (point.status is Status.UNSUPPORTED and not _has_layers(record)):
            continue  # of a device that ncu can't look at the profile's own error says what can
        try:
            for stem, roofline in _rooflines(record, point, paths, sheets):
                targets = sink.files(paths.root / stem)
                refuse_to_overwrite(list(targets.values()), paths.root, "the roofline is not drawn")
                paths.claim(*targets.values())
                facts["files"] = [*facts.get("files", ()), *(path.name for path in sink.write(roofline, targets))]
        except ProfilerFailed as error:
            advice = "move it away and repeat the command"
            point.doubts.append(diagnostics.make("roofline_missing", reason=error, advice=advice))
        except UserError as error:
            advice = _advice(record, point, sheets)
            point.doubts.append(diagnostics.make("roofline_missing", reason=error, advice=advice))


def _advice(record: Record, point: Point, sheets: Mapping[str, GpuFile]) -> str:
    """How there would be a roofline: by layers, by counters, or by peaks, whichever is missing."""
    if point.status is not Status.OK and not _has_layers(record):
        return "repeat the command with probes.layers=true in another output_dir to draw it from layers"
    peaks = _peaks(record, sheets)
    if peaks.flops_per_second and peaks.dram_bytes_per_second:
        return "repeat the command with profiler.metrics=null, which collects the counters of a roofline"
    return "draw it later by perfexp roofline DIR --gpu NAME, or with --peak-compute and --peak-bw"


def _has_layers(record: Record) -> bool:
    return any(is_layers(point.key) for point in record.points)


def _rooflines(
    record: Record, point: Point, paths: RunPaths, sheets: Mapping[str, GpuFile]
) -> Iterator[tuple[str, Roofline]]:
    """Of the counters; where there are none, of what the layers compute by definition, which says so itself."""
    peaks = _peaks(record, sheets)
    tables = [Path(str(name)) for name in point.facts["profile"].get("files") or () if str(name).endswith(_COUNTED)]
    if point.status is Status.OK:
        for table in tables:
            title = f"{record.name} · {table.stem}"
            yield f"{table.stem}_roofline", of_csv(paths.root / table.name, peaks, sheets=sheets, title=title)
        return
    layers = of_record(record, sheets=sheets)
    for phase, roofline in layers.items():
        yield f"roofline_{phase}" if len(layers) > 1 else "roofline", roofline


def _peaks(record: Record, sheets: Mapping[str, GpuFile]) -> Peaks:
    """Those of the plan's GPU, or of the data sheet that fits the device's name."""
    device = record.environment.get("device")
    product = str(device.get("name") or "") if isinstance(device, Mapping) else ""
    return of_plan(record.plan).or_else(matching(product, sheets))
