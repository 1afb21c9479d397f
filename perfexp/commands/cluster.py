"""perfexp cluster: a SLURM site's nodes for each gpu=, the site for all sweeps, and sweep jobs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from perfexp.cli.composition import cluster_of
from perfexp.commands.app import SWEEP, ConfigDir, app, echo, options
from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.records import units
from perfexp.records.folders import below, run_folders
from perfexp.records.grid import Grid
from perfexp.records.paths import SweepPaths, refuse_link
from perfexp.records.sweep_record import Sweep
from perfexp.report.console import Console
from perfexp.run.cluster import default_site, job_states, slurm
from perfexp.run.cluster import site as sites

#: Characters to print from the end of each job log.
_MOST_CHARACTERS = 20_000

group = typer.Typer(help="SLURM clusters.", no_args_is_help=True)
app.add_typer(group, name="cluster")


@group.command()
def check(
    cluster: Annotated[
        str | None,
        typer.Option(help="Option of the group cluster; by default the one set by `use`."),
    ] = None,
    config_dir: ConfigDir = None,
    gpu: Annotated[
        str | None, typer.Option(help="Kind for the tiny job; by default one with idle nodes.")
    ] = None,
    job: Annotated[
        bool, typer.Option(help="Run a job of a second that imports perfexp and torch.")
    ] = True,
    seconds: Annotated[
        int, typer.Option(min=1, max=3600, help="Longest wait for the start of the job.")
    ] = 60,
) -> None:
    """Show the nodes for each gpu=, and run a tiny job.

    The exit code is 0 if every mapped kind has nodes that are up and the job succeeded, otherwise
    1.

    Example: perfexp cluster check --cluster default
    """
    if cluster is None:
        stored = dict(word.split("=", 1) for word in default_site.words())
        cluster = stored.get("cluster", "default")
        if config_dir is None and "--config-dir" in stored:
            config_dir = Path(stored["--config-dir"])
    site = cluster_of(cluster, config_dir)
    offers = sites.offers(site, options("gpu", config_dir))
    if not offers:
        types = ", ".join(sorted(sites.gpu_types(slurm.nodes()))) or "none"
        raise UserError(
            f"cluster={cluster}: no node has GRES gpu:KIND for a kind in conf/gpu "
            f"(types: {types}). Write a site file with gpus: {{KIND: {{gres: gpu:TYPE}}}}."
        )
    rows = []
    missing = []
    for offer in offers:
        nodes = {use: str(offer.nodes[use]) for use in sites.USES}
        rows.append({"gpu": offer.kind, **nodes, "requests": " ".join(offer.requests)})
        if not offer.nodes["idle"] + offer.nodes["busy"]:
            missing.append(f"gpu={offer.kind}: no node is up")
    Console().show_grid(
        f"cluster {cluster}", Grid.of_rows(rows, figures=sites.USES), not_measured=missing
    )
    failed = bool(missing)
    if job:
        first = next((offer for offer in offers if offer.nodes["idle"]), offers[0])
        kind = gpu or first.kind
        try:
            echo(f"job      gpu={kind}: {sites.try_node(site, kind, seconds=seconds)}")
        except UserError as error:
            echo(f"error: {error}", err=True)
            failed = True
    raise typer.Exit(int(failed))


@group.command()
def use(
    site: Annotated[
        str | None, typer.Argument(help="Option of the group cluster; none prints the present one.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(help="Further KEY=VALUE of each sweep.")
    ] = None,
    config_dir: ConfigDir = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Sweeps run on this machine again.")
    ] = False,
) -> None:
    """Submit each sweep (-m) to a site from now on.

    Typed keys replace those set here: hydra/launcher=basic, for example, runs one sweep on this
    machine.

    Example: perfexp cluster use mysite hydra.launcher.wait=false
    """
    if forget:
        default_site.use([])
    elif site:
        cluster_of(site, config_dir)  # raises for an unknown site
        for word in settings or ():
            if "=" not in word or word.startswith("-"):
                raise UserError(f"{word} is not KEY=VALUE, as in hydra.launcher.wait=false.")
        folder = [f"--config-dir={config_dir.resolve()}"] if config_dir else []
        default_site.use([*folder, f"cluster={site}", "hydra/launcher=slurm", *(settings or ())])
    words = default_site.words()
    echo(
        f"Each sweep (-m) begins with: {' '.join(words)}"
        if words
        else "Sweeps run on this machine."
    )


@group.command()
def logs(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a sweep.")],
    run: Annotated[
        int | None, typer.Option(min=0, help="Number of a run, for the folder of a sweep.")
    ] = None,
) -> None:
    """Print the output and the errors of the job that measured a run (.out and .err).

    Example: perfexp cluster logs outputs/2026-11-28/100000-sweep-model --run 3
    """
    sweep_folder, number = _submitted(folder, run)
    paths = SweepPaths(sweep_folder)
    refuse_link(paths.job_logs)
    entry = job_states.load(paths).get(number)
    if entry is None:
        raise UserError(f"Run {number} of {sweep_folder} was not submitted.")
    for suffix in ("out", "err"):
        file = paths.job_logs / f"{entry.job}.{suffix}"
        try:
            text = foreign.read_bytes(file).decode(errors="replace")
        except OSError as error:
            echo(f"{file}: {error.strerror}", err=True)
            continue
        echo(f"== {file}")
        echo(text[-_MOST_CHARACTERS:].rstrip())


@group.command()
def cancel(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a sweep.")],
    run: Annotated[
        list[int] | None, typer.Option(min=0, help="Number of a run; without it, all. Repeatable.")
    ] = None,
) -> None:
    """Cancel the SLURM jobs of a sweep; finished points stay.

    To continue the sweep, repeat its command.

    Example: perfexp cluster cancel outputs/2026-11-28/100000-sweep-model
    """
    sweep = Sweep.load(folder)
    states = job_states.states(sweep, folder)
    jobs = []
    unknown = set(run or ())
    for state in states:
        unknown.discard(state.run)
        if (run is None or state.run in run) and state.job and not state.is_over:
            jobs.append(state.job)
    if unknown:
        raise UserError(f"{folder} has no run {min(unknown)}; perfexp status {folder} lists them.")
    # the job ids come from a file, so SLURM cancels only jobs with the sweep's name; without
    # --run it also cancels jobs with this name that the file lacks
    if jobs or run is None:
        slurm.cancel(job_states.job_name(sweep.uid), [] if run is None else jobs)
    echo(f"{units.counted(len(jobs), 'job')} cancelled")


def _submitted(folder: Path, run: int | None) -> tuple[Path, int]:
    """Return the sweep folder and the run number for a folder that the user named.

    The run needs no record yet.

    Args:
        folder: folder of a sweep, or of one of its runs.
        run: number of the run, for the folder of a sweep.

    Raises:
        UserError: no run was named, or the folder is not a submitted run.
    """
    if (folder / SWEEP).is_file():
        if run is None:
            raise UserError(f"{folder} is a sweep; name a run: --run N, or the folder of a run.")
        return folder, run
    absolute = folder.absolute()
    for parent in absolute.parents[:2]:
        for file in below(parent, SWEEP, refused=lambda error: None):
            if not SweepPaths(file.parent).jobs.is_file():
                continue
            with suppress(UserError):  # another sweep's file may be broken
                for child, path in run_folders(Sweep.load(file), file.parent):
                    if path.absolute() == absolute:
                        return file.parent, child.job
    raise UserError(f"{folder} is not the folder of a run that was submitted to SLURM.")
