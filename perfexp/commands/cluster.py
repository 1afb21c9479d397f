"""perfexp cluster: the nodes of a site's SLURM for each gpu=, a job that tries one, and the site of all sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfexp.cli.composition import cluster_of
from perfexp.cluster import default_site, slurm
from perfexp.cluster import site as sites
from perfexp.commands.app import ConfigDir, app, echo, options
from perfexp.errors import UserError
from perfexp.reports.console import Console
from perfexp.summaries.grid import Column, Grid

group = typer.Typer(help="SLURM clusters.", no_args_is_help=True)
app.add_typer(group, name="cluster")


@group.callback()
def _group() -> None:
    """SLURM clusters."""


@group.command()
def check(
    cluster: Annotated[str | None, typer.Option(help="Option of the group cluster; by default that of `use`.")] = None,
    config_dir: ConfigDir = None,
    gpu: Annotated[str | None, typer.Option(help="Kind for the tiny job; by default one with idle nodes.")] = None,
    job: Annotated[bool, typer.Option(help="Run a job of a second that imports perfexp and torch.")] = True,
    seconds: Annotated[int, typer.Option(min=1, max=3600, help="Longest wait for the start of the job.")] = 60,
) -> None:
    """Show the nodes for each gpu=, and run one tiny job.

    Exit code 0 if every mapped kind has nodes that are up, and the job succeeded, otherwise 1.
    """
    if cluster is None:
        stored = dict(word.split("=", 1) for word in default_site.words())
        cluster = stored.get("cluster", "default")
        config_dir = config_dir or (Path(stored["--config-dir"]) if "--config-dir" in stored else None)
    site = cluster_of(cluster, config_dir)
    found = sites.offers(site, options("gpu", config_dir))
    if not found:
        types = ", ".join(sorted(sites.gpu_types(slurm.nodes()))) or "none"
        raise UserError(
            f"cluster={cluster}: no node has GRES gpu:KIND for a kind in conf/gpu (types: {types}). Write a site file "
            "with gpus: {KIND: {gres: gpu:TYPE}}."
        )
    columns = [Column("gpu", [offer.kind for offer in found], prose=True)]
    columns += [Column(title, [str(offer.nodes[title]) for offer in found]) for title in sites.USES]
    columns.append(Column("requests", [" ".join(offer.requests) for offer in found], prose=True))
    missing = [f"gpu={offer.kind}: no node is up" for offer in found if not offer.nodes["idle"] + offer.nodes["busy"]]
    Console().show_grid(f"cluster {cluster}", Grid(columns), not_measured=missing)
    failed = bool(missing)
    if job:
        idle = [offer.kind for offer in found if offer.nodes["idle"]]
        kind = gpu or next(iter(idle or [offer.kind for offer in found]))
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
    settings: Annotated[list[str] | None, typer.Argument(help="Further KEY=VALUE of each sweep.")] = None,
    config_dir: ConfigDir = None,
    forget: Annotated[bool, typer.Option("--forget", help="Sweeps run on this machine again.")] = False,
) -> None:
    """Submit each sweep (-m) to a site from now on; keys that are typed replace those set here.

    hydra/launcher=basic runs one sweep on this machine.
    """
    if forget:
        default_site.use([])
    elif site:
        cluster_of(site, config_dir)  # raises for one that does not exist
        for word in settings or ():
            if "=" not in word or word.startswith("-"):
                raise UserError(f"{word} is not KEY=VALUE, as in hydra.launcher.wait=false.")
        folder = [f"--config-dir={config_dir.resolve()}"] if config_dir else []
        default_site.use([*folder, f"cluster={site}", "hydra/launcher=slurm", *(settings or ())])
    words = default_site.words()
    echo(f"Each sweep (-m) begins with: {' '.join(words)}" if words else "Sweeps run on this machine.")
