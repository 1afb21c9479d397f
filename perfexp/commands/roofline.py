"""roofline: how near kernels and layers come to the device's peaks, from ncu's counters or a run's record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfexp.commands.app import app
from perfexp.commands.output import echo
from perfexp.errors import UserError
from perfexp.host import gpu_sheets, installation, interrupts
from perfexp.plots import roofline_files as sink
from perfexp.profilers import ProfilerFailed, ncu, tools
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, is_layers
from perfexp.reports.console import Console
from perfexp.roofline import is_listing, of_csv, of_record, of_text
from perfexp.roofline import peaks as peak
from perfexp.roofline.listing import EXPORT
from perfexp.roofline.peaks import of_plan

if TYPE_CHECKING:
    from perfexp.host.gpu_sheets import GpuFile
    from perfexp.roofline import Peaks, Roofline

_RECORD = "record.json"


@app.command()
def roofline(
    places: Annotated[
        list[Path],
        typer.Argument(metavar="CSV|FILE.ncu-rep|DIR", help="What ncu left, or a run's folder or record.json."),
    ],
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take the peaks of this data sheet: t4, h200, ….")
    ] = None,
    peak_compute: Annotated[float | None, typer.Option(metavar="TFLOP/s", help="Peak of the device.")] = None,
    peak_bw: Annotated[float | None, typer.Option(metavar="GB/s", help="Peak bandwidth of its memory.")] = None,
    label: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the picture.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="The picture; SVG and HTML go beside it. By default beside the input."),
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(metavar="CSV", help="All figures, a line for each kernel, launch and range.")
    ] = None,
    config_dir: Annotated[Path | None, typer.Option(help="Folder with groups of your own (gpu/NAME.yaml).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Draw the roofline of kernels that ncu profiled, or of a run's layers, and say what holds each back.

    Of a run with several sizes or batches, the largest point of each phase is drawn.

    Peaks are those of --peak-compute and --peak-bw, of --gpu, of the GPU that the file or the record names, or those
    that ncu or the run recorded, in this order.
    """
    sheets = gpu_sheets.read([installation.conf_dir(), *([config_dir] if config_dir else [])])
    known = peak.given(peak_compute, peak_bw)
    known = known.or_else(peak.named(gpu, sheets)) if gpu else known
    found = [each for place in places for each in _found(place, known, sheets, label)]
    if len(found) > 1 and (out or summary):
        raise UserError(f"--out and --summary name one file, and there are {len(found)} rooflines. Leave them out.")
    planned = [(each, _targets(each, out, summary)) for each in found]
    _refuse_to_overwrite([path for _, targets in planned for path in targets.values()], places, force=force)
    for each, targets in planned:
        _show(each.roofline)
        _write(each, targets)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A roofline and where its files go.

    Attributes:
        roofline: what was found.
        stem: of its files, without suffix.
    """

    roofline: Roofline
    stem: Path


def _found(place: Path, known: Peaks, sheets: Mapping[str, GpuFile], label: str | None) -> Iterator[_Found]:
    """The rooflines of one place.

    Raises:
        UserError: there is none.
    """
    if not place.exists():
        raise UserError(f"{place} does not exist. Name a CSV or an .ncu-rep of ncu, a run's folder, or its {_RECORD}.")
    if place.is_dir() or place.suffix == ".json":
        yield from _of_run(place, known, sheets, label)
    else:
        if place.suffix == ".ncu-rep":
            drawn = of_text(_exported(place), place, known, sheets=sheets, title=label)
        else:
            drawn = of_csv(place, known, sheets=sheets, title=label)
        yield _Found(roofline=drawn, stem=place.with_name(f"{place.stem}_roofline"))


def _exported(report: Path) -> str:
    """What ncu says of a report, which it alone can read.

    Raises:
        UserError: ncu is not there, or can't read it.
    """
    try:
        with interrupts.handled():
            return ncu.exported(tools.find("ncu"), report).decode()
    except ProfilerFailed as error:
        raise UserError(
            f"{report}: {error}. A report can only be read by an ncu as new as the one that wrote it. Where that is "
            f"installed, export it and bring the CSV here: {EXPORT.replace('FILE', report.stem)}"
        ) from error


def _of_run(place: Path, known: Peaks, sheets: Mapping[str, GpuFile], label: str | None) -> Iterator[_Found]:
    """The files of ncu that a run's manifest names, and its layers."""
    record, folder = Record.load(place), place if place.is_dir() else place.parent
    of_run = known.or_else(of_plan(record.plan))
    tables = list(_tables(folder))
    for path in tables:
        title = label or f"{record.name} · {path.stem}"
        stem = folder / f"{path.stem}_roofline"
        yield _Found(roofline=of_csv(path, of_run, sheets=sheets, title=title), stem=stem)
    if tables and not any(is_layers(point.key) for point in record.points):
        return
    layers = of_record(record, known, sheets=sheets, title=label)
    for phase, found in layers.items():
        yield _Found(roofline=found, stem=folder / (f"roofline_{phase}" if len(layers) > 1 else "roofline"))


def _tables(folder: Path) -> Iterator[Path]:
    """The CSVs of ncu that a run wrote; links are not followed out of its folder."""
    for name in RunPaths(folder).claimed():
        path = folder / name
        inside = path.resolve().is_relative_to(folder.resolve())
        if path.suffix == ".csv" and inside and path.is_file() and is_listing(path):
            yield path


def _targets(found: _Found, out: Path | None, summary: Path | None) -> dict[str, Path]:
    """The files by what they are."""
    if out and out.suffix.lower() not in ("", ".png"):
        raise UserError(f"--out {out}: the picture is a PNG; SVG and HTML of it are written beside it.")
    targets = sink.files(out.with_suffix("") if out else found.stem)
    if summary:
        targets["csv"] = summary
    return targets


def _refuse_to_overwrite(files: Sequence[Path], inputs: Sequence[Path], *, force: bool) -> None:
    given = {path.resolve() for path in inputs}
    if mine := [str(file) for file in files if file.resolve() in given]:
        raise UserError(f"{', '.join(mine)} is what is read. Choose another file with --out PNG or --summary CSV.")
    there = [str(file) for file in files if file.exists()]
    if there and not force:
        raise UserError(
            f"{', '.join(there)} would be overwritten. Choose others with --out and --summary, or add --force."
        )
    gone = next((file for file in files if not file.parent.is_dir()), None)
    if gone:
        raise UserError(f"There is no folder {gone.parent} for {gone.name}. Make it, or choose another.")


def _show(found: Roofline) -> None:
    """The table, and what it means."""
    console = Console()
    console.show_grid(found.title, sink.grid(found))
    console.note(found.meaning(found.total))
    slowest = found.parts[0]
    console.note(f"{slowest.label} ({slowest.time_share:.0%} of the time): {found.meaning(slowest)}")
    for note in found.notes:
        console.note(note)


def _write(found: _Found, targets: dict[str, Path]) -> None:
    folder = RunPaths(found.stem.parent)
    inside = [path.absolute() for path in targets.values() if path.absolute().is_relative_to(folder.root)]
    try:
        if folder.manifest.is_file():
            folder.claim(*inside)
    except OSError as error:
        raise _unwritable(folder.manifest, error) from error
    try:
        written = sink.write(found.roofline, targets)
    except OSError as error:
        raise _unwritable(error.filename, error) from error
    echo(f"written: {', '.join(map(str, written))}")
    if targets["html"] not in written:
        echo('no interactive page: pip install "perfexp[html]"', err=True)


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path} can't be written: {error.strerror}. Choose another place with --out PNG and --summary CSV."
    )
