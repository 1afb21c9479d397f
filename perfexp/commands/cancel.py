"""perfexp cancel: cancel the jobs of a sweep that have not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfexp.cluster import job_states, slurm
from perfexp.commands.app import app, echo
from perfexp.errors import UserError
from perfexp.records import units
from perfexp.records.sweep_record import Sweep


@app.command()
def cancel(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a sweep.")],
    run: Annotated[list[int] | None, typer.Option(min=0, help="Number of a run; without it, all. Repeatable.")] = None,
) -> None:
    """Cancel jobs of a sweep in SLURM; finished points stay, and the sweep's command continues it."""
    sweep = Sweep.load(folder)
    states = job_states.states(sweep, folder)
    wanted = [state for state in states if (run is None or state.run in run) and state.job and not state.is_over]
    if run is not None and (unknown := set(run) - {state.run for state in states}):
        raise UserError(f"{folder} has no run {min(unknown)}; perfexp status {folder} lists them.")
    # a file names the jobs: SLURM cancels only those that have the name of the sweep; without --run also those of
    # that name that the file lacks
    if wanted or run is None:
        slurm.cancel(job_states.job_name(sweep.uid), [] if run is None else [state.job for state in wanted])
    echo(f"{units.counted(len(wanted), 'job')} cancelled")
