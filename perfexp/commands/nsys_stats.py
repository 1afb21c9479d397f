"""perfexp nsys-stats: make reports from existing nsys profiles, without a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import Json, app, echo, emit
from perfexp.errors import PerfexpError, UserError
from perfexp.host import interrupts
from perfexp.measuring.profilers import ProfileLocation, refuse_to_overwrite, reports, tools
from perfexp.measuring.profilers.nsys import DATABASE, ENDINGS, evaluate, evaluated, imported
from perfexp.measuring.profilers.tools import Tool
from perfexp.records.grid import Grid, Section
from perfexp.records.paths import RunPaths
from perfexp.records.profile_summary import ranked


@app.command("nsys-stats")
def nsys_stats(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|FILE",
            help="A run's folder, one above runs, or a .nsys-rep or .sqlite of nsys.",
        ),
    ],
    report: Annotated[
        list[str] | None,
        typer.Option(
            "--report",
            "-r",
            help="Report of nsys stats (cuda_api_gpu_sum, …); repeatable, or with commas.",
        ),
    ] = None,
    tool: Annotated[str | None, typer.Option(help="Path of nsys; by default searched for.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that no run wrote.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make reports from nsys profiles again: CSVs beside each profile, and its top kernels.

    The exit code is 0 if every report has rows or nothing to list, and 1 if a report failed.

    Example: perfexp nsys-stats outputs/2026-11-28/100000-resnet50-b1 -r cuda_gpu_kern_sum
    """
    wanted = reports.check(report or reports.DEFAULT)
    profiles = dict.fromkeys(chain.from_iterable(map(_profiles, places)))
    made: list[dict[str, Any]] = []
    is_good = True
    with interrupts.handled():
        nsys = tools.find("nsys", tool)
        for profile in profiles:
            try:
                facts = _made(nsys, profile, wanted, force=force)
                made.append(facts)
                is_good &= all(name in {**facts["reports"], **facts["empty"]} for name in wanted)
                if not as_json:  # the next profile may take minutes
                    emit(None, _sections(facts), as_json=False)
            except PerfexpError as error:
                echo(f"failed  {profile}: {error}", err=True)
                is_good = False
    emit({"profiles": made}, (), as_json=as_json)
    raise typer.Exit(0 if is_good else 1)


def _profiles(path: Path) -> Iterator[Path]:
    """Yield the named profile, or all profiles in and below a folder.

    Skip a raw recording if its imported profile exists.

    Raises:
        UserError: there is no profile.
    """
    endings = (*ENDINGS, ".qdstrm")
    if path.is_file():
        if path.suffix not in (*endings, DATABASE):
            raise UserError(
                f"{path} is not a profile of nsys; name a FILE.nsys-rep or FILE.sqlite, "
                "or a run's folder."
            )
        yield path
        return
    if not path.is_dir():
        raise UserError(f"{path}: there is no such file or folder.")
    files = []
    for file in sorted(path.rglob("*")):
        if file.suffix in endings and file.is_file() and not file.is_symlink():
            files += [] if file.name.startswith(".") else [file]
    # a recording beside its imported profile needs no import
    done = {file.with_suffix("") for file in files if file.suffix in ENDINGS}
    files = [file for file in files if file.suffix in ENDINGS or file.with_suffix("") not in done]
    if not files:
        raise UserError(
            f"{path}: there is no profile of nsys in it or below it; profiler=nsys makes one."
        )
    yield from files


def _made(nsys: Tool, profile: Path, report_names: list[str], *, force: bool) -> dict[str, Any]:
    """Make the reports for a profile; return the files, and why others have no rows.

    Args:
        nsys: nsys, which makes the reports.
        profile: .nsys-rep, .qdstrm or .sqlite file.
        report_names: names of reports.
        force: whether to replace files that no run wrote.

    Raises:
        PerfexpError: the profile cannot be read, or a file would be overwritten.
    """
    paths = RunPaths(profile.parent)

    def claim(path: Path) -> None:
        """Add a file to the run's manifest; outside of runs, files are the user's."""
        if paths.manifest.is_file():
            paths.claim(path.absolute())

    location = ProfileLocation(folder=profile.parent, stem=profile.stem)
    fresh = [profile.with_suffix(ENDINGS[0])] if profile.suffix == ".qdstrm" else []
    if not force:
        written = [path for path in (*fresh, *evaluated(location, report_names)) if path != profile]
        refuse_to_overwrite(written, location.folder, "move it away, or add --force")
    if fresh:
        claim(*fresh)
        profile = imported(nsys, profile)
    facts = evaluate(nsys, profile, report_names, location, claim).facts
    shown = ("reports", "empty", "problems", "kernels", "kernel_names")
    return {"profile": str(profile), **{name: facts[name] for name in shown}}


def _sections(facts: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the outcome of each report for a profile, and its top kernels."""
    outcomes = dict.fromkeys(facts["reports"], "") | facts["empty"] | facts["problems"]
    for name, report in facts["reports"].items():
        outcomes[name] = f"{report['rows']} rows: {report['file']}"
    rows = [{"report": name, "what came out": text} for name, text in outcomes.items()]
    yield Section(facts["profile"], Grid.of_rows(rows))
    if kernels := facts["kernels"]:
        yield Section(
            f"top kernels of {facts['kernel_names']}", ranked(kernels, 1, "kernel", "in all")
        )
