"""segmentation_table: what experiment=segmentation_table does around its runs: how many cards, and the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfexp.errors import UserError
from perfexp.orchestration import gpu_count
from perfexp.orchestration.sweep_run import Campaign
from perfexp.records.sweep_record import Sweep
from perfexp.reports import speed_table
from perfexp.reports.console import Console

#: Devices that are no cards.
_NO_CARDS = ("cpu", "mps", "fake")
_COUNT = "gpu.count"


class SegmentationTable:
    """A callback of Hydra's, named by conf/experiment/segmentation_table.yaml.

    Hydra calls these methods by their names and asks for no base class; what an exception in them says, it warns of.

    Args:
        register: OmegaConf's function that makes a resolver known; `${perfexp_cards:GPU}` are the numbers of cards of
            the sweep. Only the file can ask for it early enough, and only when it is chosen.
    """

    def __init__(self, *, register: Callable[..., None]) -> None:
        register("perfexp_cards", counts, replace=True)

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Say what is skipped, before anything is measured.

        Args:
            config: of the sweep, with Hydra's own node.
        """
        given = (text.lstrip("+").partition("=")[0] for text in config.hydra.overrides.task)
        if _COUNT not in given and "," not in (counts(config.gpu.name)):
            _console(config).note(
                f"mp is skipped: {_seen(config.gpu.name)}. {_COUNT}=1,N measures one and N, whatever is seen."
            )

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """Show the table of what was measured; the sweep's own summary comes after it.

        Args:
            config: likewise.
        """
        folder = Campaign.folder
        if folder is None:
            return
        try:
            sweep = Sweep.load(folder)
        except UserError:  # no run was begun, or none has ended: replicates of several runs are measured in rounds
            return
        if (table := speed_table.table(sweep, folder, sweep.records(folder))) is not None:
            _console(config).show_grid("training of segmentation models", table)
        else:
            _console(config).note("There is no table: it is one of trainings (mode=train), and none was measured.")

    def on_run_start(self, config: Any, **_: Any) -> None:
        """Nothing."""

    def on_run_end(self, config: Any, **_: Any) -> None:
        """Nothing."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        """Nothing."""

    def on_job_end(self, config: Any, **_: Any) -> None:
        """Nothing."""


def counts(gpu: str) -> str:
    """The numbers of cards of the sweep: `1`, or `1,8` where more than one is visible here.

    Args:
        gpu: name of the device that is meant.
    """
    visible = 1 if gpu in _NO_CARDS else gpu_count.visible()
    return f"1,{visible}" if visible > 1 else "1"


def _seen(gpu: str) -> str:
    if gpu in _NO_CARDS:
        return f"gpu={gpu} is no card"
    return f"{'one card is' if gpu_count.visible() else 'no card is'} visible here"


def _console(config: Any) -> Any:
    return Console(quiet=bool(config.quiet))
