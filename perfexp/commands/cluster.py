"""perfexp cluster check: the nodes of a site's SLURM for each gpu=, and whether perfexp starts on a node."""

from __future__ import annotations

from typing import Annotated

import typer

from perfexp.cli.composition import cluster_of
from perfexp.cluster import site_check, slurm
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
    cluster: Annotated[str, typer.Option(help="Option of the group cluster.")] = "default",
    config_dir: ConfigDir = None,
    gpu: Annotated[str | None, typer.Option(help="Kind for the tiny job; by default one with idle nodes.")] = None,
    job: Annotated[bool, typer.Option(help="Run a job of a second that imports perfexp and torch.")] = True,
    seconds: Annotated[int, typer.Option(min=1, max=3600, help="Longest wait for the start of the job.")] = 60,
) -> None:
    """Show the nodes for each gpu=, and run one tiny job.

    Exit code 0 if every mapped kind has nodes that are up, and the job succeeded, otherwise 1.
    """
    site = cluster_of(cluster, config_dir)
    found = site_check.offers(site, options("gpu", config_dir))
    if not found:
        types = ", ".join(sorted(site_check.gpu_types(slurm.nodes()))) or "none"
        raise UserError(
            f"cluster={cluster}: no node has GRES gpu:KIND for a kind in conf/gpu (types: {types}). Write a site file "
            "with gpus: {KIND: {gres: gpu:TYPE}}."
        )
    columns = [Column("gpu", [offer.kind for offer in found], prose=True)]
    for title in ("nodes", "idle", "busy", "others"):
        columns.append(Column(title, [str(getattr(offer, title)) for offer in found]))
    columns.append(Column("requests", [" ".join(offer.requests) for offer in found], prose=True))
    missing = [f"gpu={offer.kind}: no node is up" for offer in found if not offer.idle + offer.busy]
    Console().show_grid(f"cluster {cluster}", Grid(columns), not_measured=missing)
    failed = bool(missing)
    if job:
        idle = [offer.kind for offer in found if offer.idle]
        kind = gpu or next(iter(idle or [offer.kind for offer in found]))
        try:
            echo(f"job      gpu={kind}: {site_check.try_node(site, kind, seconds=seconds)}")
        except UserError as error:
            echo(f"error: {error}", err=True)
            failed = True
    raise typer.Exit(int(failed))
