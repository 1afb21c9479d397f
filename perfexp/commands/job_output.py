"""perfexp job-output: print the output of a run's job."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from perfexp.cluster import job_states
from perfexp.commands.app import app, echo
from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.records.folders import below, run_folders
from perfexp.records.paths import SweepPaths, refuse_link
from perfexp.records.sweep_record import Sweep

#: Characters of each file that are printed, from its end.
_MOST_CHARACTERS = 20_000


@app.command(name="job-output")
def job_output(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a sweep.")],
    run: Annotated[int | None, typer.Option(min=0, help="Number of a run, for the folder of a sweep.")] = None,
) -> None:
    """Print the output and the errors of the job that measured a run (.out and .err)."""
    place, number = _place(folder, run)
    paths = SweepPaths(place)
    refuse_link(paths.job_logs)
    entry = job_states.load(paths).get(number)
    if entry is None:
        raise UserError(f"Run {number} of {place} was not submitted.")
    for suffix in ("out", "err"):
        file = paths.job_logs / f"{entry.job}.{suffix}"
        try:
            text = untrusted.read_bytes(file).decode(errors="replace")
        except OSError as error:
            echo(f"{file}: {error.strerror}", err=True)
            continue
        echo(f"== {file}")
        echo(text[-_MOST_CHARACTERS:].rstrip())


def _place(folder: Path, run: int | None) -> tuple[Path, int]:
    """Return the folder of the sweep and the number of the run; the run's record need not exist."""
    if (folder / "sweep.json").is_file():
        if run is None:
            raise UserError(f"{folder} is a sweep; name a run: --run N, or the folder of a run.")
        return folder, run
    wanted = folder.absolute()
    for parent in (folder.absolute().parent, folder.absolute().parent.parent):
        for file in below(parent, "sweep.json", refused=lambda error: None):
            if not SweepPaths(file.parent).jobs.is_file():
                continue
            with suppress(UserError):  # another sweep's file may be broken
                for child, path in run_folders(Sweep.load(file), file.parent):
                    if path.absolute() == wanted:
                        return file.parent, child.job
    raise UserError(f"{folder} is not the folder of a run that was submitted to SLURM.")
