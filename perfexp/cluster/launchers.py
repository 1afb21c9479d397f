"""Launchers: who measures the runs of a sweep, by the option of hydra/launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from perfexp.cluster.campaign import SlurmCampaign
from perfexp.cluster.local_queue import LocalCampaign
from perfexp.errors import PerfexpError, UserError
from perfexp.orchestration.preparation import Assignment
from perfexp.orchestration.sweep_run import SweepRun
from perfexp.plan.schema import Cluster
from perfexp.records.record import Record
from perfexp.reports.console import Console

_ROOM = "hydra_plugins.perfexp_launchers.launchers."


class Campaign(Protocol):
    """The runs of a sweep that processes of their own measure.

    Attributes:
        outlives: whether they go on after the command has ended.
    """

    outlives: bool

    def add(self, assignment: Assignment, cluster: Cluster, command: Sequence[str]) -> None:
        """Take a run of the sweep, with its overrides as typed; raises UserError if it can't be measured so."""

    def measure(
        self, sweep_run: SweepRun, console: Console, ended: Callable[[Assignment, Record | PerfexpError], None]
    ) -> bool:
        """Have all runs measured; returns whether every run has ended. `ended` is called with each that has."""


def campaign_of(name: str, launcher: Mapping[str, Any], *, is_sweep: bool) -> Campaign | None:
    """Return the launcher of the runs, by the option and the node of hydra/launcher; None for this process.

    Raises UserError for a launcher that perfexp does not know, or settings out of range.
    """
    target = str(launcher["_target_"])
    if target.endswith(".BasicLauncher"):
        return None
    kinds: dict[str, Callable[[Mapping[str, Any]], Campaign]] = {
        f"{_ROOM}SlurmLauncher": SlurmCampaign,
        f"{_ROOM}LocalLauncher": LocalCampaign,
    }
    if target not in kinds:
        if not is_sweep:
            return None
        raise UserError(
            f"hydra/launcher={name} can't measure: leave it at basic (one run "
            "after another), or choose local (several GPUs) or slurm (jobs of a cluster)."
        )
    if not is_sweep:
        raise UserError("hydra/launcher is for the runs of a sweep: add -m.")
    return kinds[target](launcher)
