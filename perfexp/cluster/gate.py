"""Gate: the jobs of one sweep start after those of another have succeeded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfexp.cluster import job_states, jobs_file
from perfexp.cluster.job_states import State
from perfexp.errors import UserError
from perfexp.records import units
from perfexp.records.folders import below, run_folders
from perfexp.records.paths import SweepPaths
from perfexp.records.sweep_record import Sweep

#: Folder in which the sweeps of a stage are looked up.
_OUTPUTS = Path("outputs")
_JOBS = re.compile(r"\d+(_\d+)?([:,]\d+(_\d+)?)*")
#: More elements than this are waited for by their arrays, except those with elements that were submitted again.
_MOST_ELEMENTS = 50


def dependency(after: Any) -> list[str]:
    """Return the options of sbatch for `hydra.launcher.after`; none if everything has succeeded already.

    Raises UserError if there is no such sweep, or if one of its runs has failed: the jobs would wait forever.
    """
    if after is None:
        return []
    text = str(after)
    if _JOBS.fullmatch(text):
        return [f"--dependency=afterok:{text.replace(',', ':')}"]
    sweep, folder = _sweep(text)
    states = job_states.states(sweep, folder)
    ended = [state for state in states if state.has_ended and state.state is not State.done]
    if ended:
        first = ended[0]
        why = f": {first.why}" if first.why else ""
        raise UserError(
            f"hydra.launcher.after={text}: {units.counted(len(ended), 'run')} of {folder} did not succeed "
            f"({first.name}: {first.state}{why}). Repeat that sweep, or leave hydra.launcher.after out."
        )
    waiting = sorted({state.job for state in states if state.state is not State.done})
    if len(waiting) > _MOST_ELEMENTS:
        mixed = {job.partition("_")[0] for job in jobs_file.superseded(SweepPaths(folder))}
        arrays = {job: job.partition("_")[0] for job in waiting}
        waiting = sorted({job if array in mixed else array for job, array in arrays.items()})
    return [f"--dependency=afterok:{':'.join(waiting)}"] if waiting else []


def _sweep(text: str) -> tuple[Sweep, Path]:
    """Return the sweep in a folder, or the latest sweep of a stage."""
    if (Path(text) / "sweep.json").is_file():
        return Sweep.load(Path(text)), Path(text)
    stages = sorted(_sweeps_of(text), key=lambda pair: pair[0].started)
    if not stages:
        raise UserError(
            f"hydra.launcher.after={text}: no sweep of a stage {text!r} in {_OUTPUTS}, and no sweep.json there; name a "
            "stage (sanity), the folder of a sweep, or the ids of jobs."
        )
    return stages[-1]


def _sweeps_of(stage: str) -> Iterator[tuple[Sweep, Path]]:
    if not _OUTPUTS.is_dir():
        return
    for file in below(_OUTPUTS, "sweep.json", refused=lambda error: None):
        try:
            sweep = Sweep.load(file)
        except UserError:
            continue
        names = {path.parent.name for _, path in run_folders(sweep, file.parent)}
        if stage in names or any(name.endswith(f"_{stage}") for name in names):
            yield sweep, file.parent
