"""perfexp roofline: how far kernels and layers are from the device's peaks.

The figures come from ncu's counters or a run's record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import (
    RECORD,
    ConfigDir,
    Force,
    Json,
    app,
    emit,
    group_folders,
    refuse_to_overwrite,
)
from perfexp.errors import UserError
from perfexp.host import foreign, gpu_sheets, interrupts
from perfexp.host.gpu_sheets import GpuFile
from perfexp.measuring.profilers import ProfilerFailed, ncu, tools
from perfexp.records.grid import Section
from perfexp.records.paths import RunPaths, folder_of, is_own_place
from perfexp.records.record import Record, is_layers
from perfexp.records.subject import one_line
from perfexp.report.plots import roofline_files as sink
from perfexp.report.plots import roofline_table
from perfexp.roofline import Peaks, Roofline, is_listing, of_csv, of_record
from perfexp.roofline.listing import EXPORT
from perfexp.roofline.peaks import by_hand, named, of_plan
from perfexp.roofline.sentences import meaning


@app.command()
def roofline(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="CSV|FILE.ncu-rep|DIR", help="ncu's output, or a run's folder or record.json."
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Use the peaks of this data sheet: t4, h200, …."),
    ] = None,
    peak_compute: Annotated[
        float | None, typer.Option(metavar="TFLOP/s", help="Peak of the device.")
    ] = None,
    peak_bw: Annotated[
        float | None, typer.Option(metavar="GB/s", help="Peak bandwidth of its memory.")
    ] = None,
    label: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the plot.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG", help="The plot; SVG and HTML go beside it. By default beside the input."
        ),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="All figures, a line for each kernel, launch and range."),
    ] = None,
    config_dir: ConfigDir = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Draw the roofline of kernels profiled by ncu, or of a run's layers, and explain the limits.

    For a run with several sizes or batches, the largest point of each phase is drawn.

    Peaks come from the first source that has them: --peak-compute and --peak-bw, --gpu, the GPU
    named in the file or record, then the values that ncu or the run recorded.

    Example: perfexp roofline outputs/2026-11-28/100000-resnet50-b1
    """
    sheets = gpu_sheets.read(group_folders(config_dir))
    peaks = by_hand(peak_compute, peak_bw)
    peaks = peaks.or_else(named(gpu, sheets)) if gpu else peaks
    rooflines = [result for source in places for result in _rooflines(source, peaks, sheets, label)]
    if len(rooflines) > 1 and (out or summary):
        raise UserError(
            f"--out and --summary name one file, and there are {len(rooflines)} rooflines. "
            "Leave them out."
        )
    planned = [(result, stem.parent, _targets(stem, out, summary)) for stem, result in rooflines]
    files = [path for *_, targets in planned for path in targets.values()]
    _refuse_targets(files, places, force=force)
    documents: list[dict[str, Any]] = []
    parts: list[Section | str] = []
    for result, folder, targets in planned:
        written = _write(result, folder, targets)
        documents.append(_document(result, written))
        parts += _parts(result, written)
    emit({"rooflines": documents}, parts, as_json=as_json)


def _rooflines(
    path: Path, peaks: Peaks, sheets: Mapping[str, GpuFile], label: str | None
) -> Iterator[tuple[Path, Roofline]]:
    """Yield the rooflines of one place, each with the path of its files without an ending.

    Raises:
        UserError: there is no such place, or it has no roofline.
    """
    if not path.exists():
        raise UserError(
            f"{path} does not exist. Name a CSV or an .ncu-rep of ncu, a run's folder, "
            f"or its {RECORD}."
        )
    if path.is_dir() or path.suffix == ".json":
        yield from _of_run(path, peaks, sheets, label)
        return
    text = _exported(path) if path.suffix == ".ncu-rep" else None
    result = of_csv(
        path.resolve(), peaks, text=text, sheets=sheets, title=label or path.stem
    )  # the user may name a link
    yield path.with_name(f"{path.stem}_roofline"), result


def _exported(report: Path) -> str:
    """Return an ncu report as CSV.

    Only ncu can read its reports.

    Raises:
        UserError: ncu is missing or cannot read the report.
    """
    try:
        with interrupts.handled():
            return ncu.exported(tools.find("ncu"), report).decode()
    except ProfilerFailed as error:
        raise UserError(
            f"{report}: {error}. A report can only be read by an ncu as new as the one that wrote "
            "it. Where that is installed, export it and bring the CSV here: "
            f"{EXPORT.replace('FILE', report.stem)}"
        ) from error


def _of_run(
    source: Path, peaks: Peaks, sheets: Mapping[str, GpuFile], label: str | None
) -> Iterator[tuple[Path, Roofline]]:
    """Yield the rooflines of a run: from ncu files in its manifest, and from its layers."""
    record = Record.load(source)
    folder = folder_of(source)
    tables = []
    for name in RunPaths(folder).claimed():
        path = folder / name
        if is_own_place(name) and name.endswith(".csv") and foreign.is_regular(path):
            tables += [path] if is_listing(path) else []
    for path in tables:
        title = label or f"{record.name} · {path.stem}"
        result = of_csv(path, peaks.or_else(of_plan(record.plan)), sheets=sheets, title=title)
        yield folder / f"{path.stem}_roofline", result
    if tables and not any(is_layers(point.key) for point in record.points):
        return
    for stem, result in sink.stems(of_record(record, peaks, sheets=sheets, title=label)).items():
        yield folder / stem, result


def _targets(stem: Path, out: Path | None, summary: Path | None) -> dict[str, Path]:
    """Return the files to write, by ending.

    Raises:
        UserError: `--out` has another ending than .png.
    """
    if out and out.suffix.lower() not in ("", ".png"):
        raise UserError(
            f"--out {out}: the plot is a PNG; SVG and HTML of it are written beside it."
        )
    targets = sink.files(out.with_suffix("") if out else stem)
    return targets | ({"csv": summary} if summary else {})


def _refuse_targets(files: Sequence[Path], inputs: Sequence[Path], *, force: bool) -> None:
    """Raise `UserError` if a file is an input, would be overwritten, or has no folder."""
    sources = set(map(Path.resolve, inputs))
    if overwritten := [str(file) for file in files if file.resolve() in sources]:
        raise UserError(
            f"{', '.join(overwritten)} is the input. "
            "Choose another file with --out PNG or --summary CSV."
        )
    # rooflines in a manifest: the run drew them after its profiler, or this command did
    own_files: set[Path] = set()
    for path in inputs:
        folder = folder_of(path)
        names = RunPaths(folder).claimed()
        own_files |= {(folder / name).resolve() for name in names if "roofline" in name}
    others = [file for file in files if file.resolve() not in own_files]
    refuse_to_overwrite(others, "Choose others with --out and --summary", force=force)
    for file in files:
        if not file.parent.is_dir():
            raise UserError(
                f"There is no folder {file.parent} for {file.name}. Make it, or choose another."
            )


def _parts(result: Roofline, written: Sequence[Path]) -> Iterator[Section | str]:
    """Yield the roofline table, what limits the whole and the slowest part, and the files."""
    slowest = result.parts[0]
    yield Section(one_line(result.title), roofline_table.console_grid(result))
    yield meaning(result, result.total)
    yield f"{slowest.label} ({slowest.time_share:.0%} of the time): {meaning(result, slowest)}"
    yield from result.notes
    yield f"written: {', '.join(map(str, written))}"


def _document(result: Roofline, written: Sequence[Path]) -> dict[str, Any]:
    """Return a roofline as JSON values: CSV lines, sentences and files."""
    return {
        "title": result.title,
        "meaning": meaning(result, result.total),
        "notes": list(result.notes),
        "rows": roofline_table.lines(result),
        "files": list(map(str, written)),
    }


def _write(result: Roofline, folder: Path, targets: dict[str, Path]) -> list[Path]:
    """Write the files of a roofline, enter them into the run's manifest, and return them.

    Raises:
        UserError: a file cannot be written.
    """
    paths = RunPaths(folder)
    absolute = list(map(Path.absolute, targets.values()))
    path: Path | str | None = paths.manifest
    try:
        if paths.manifest.is_file():
            paths.claim(*(path for path in absolute if path.is_relative_to(paths.root)))
        path = None
        return sink.write(result, targets)
    except OSError as error:
        raise UserError(
            f"{path or error.filename} can't be written: {error.strerror}. "
            "Choose another place with --out PNG and --summary CSV."
        ) from error
