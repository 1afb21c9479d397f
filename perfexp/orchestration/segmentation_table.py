"""Segmentation table: the numbers of GPUs and the final table of experiment=segmentation_table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfexp.errors import UserError
from perfexp.orchestration import capabilities
from perfexp.orchestration.sweep_run import SweepRun
from perfexp.records.sweep_record import Sweep
from perfexp.reports import speed_table
from perfexp.reports.console import Console

#: Devices that are not GPUs.
_NO_GPUS = ("cpu", "mps", "fake")
_COUNT = "gpu.count"


class SegmentationTable:
    """The Hydra callback of conf/experiment/segmentation_table.yaml; an exception in it becomes a warning.

    Args:
        register: OmegaConf's function that registers a resolver. `${perfexp_cards:GPU}` are the numbers of GPUs of
            the sweep; registering it from the file is early enough, and happens only if the file is chosen.
    """

    def __init__(self, *, register: Callable[..., None]) -> None:
        register("perfexp_cards", counts, replace=True)

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Announce what is skipped before anything is measured."""
        keys = (text.lstrip("+").partition("=")[0] for text in config.hydra.overrides.task)
        if _COUNT not in keys and "," not in (counts(config.gpu.name)):
            _console(config).note(f"mp is skipped: {_visible(config.gpu.name)}. To measure 1 and N: {_COUNT}=1,N.")

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """Show the table; the sweep's own summary comes after it."""
        if (folder := SweepRun.folder) is None:
            return
        try:
            sweep = Sweep.load(folder)
        except UserError:  # no run has ended: replicates of several runs are interleaved
            return
        if (table := speed_table.table(sweep, folder, sweep.records(folder))) is not None:
            _console(config).show_grid("training of segmentation models", table)
        else:
            _console(config).note("There is no table: no training was measured (mode=train).")

    def on_run_start(self, config: Any, **_: Any) -> None:
        """Do nothing."""

    on_run_end = on_job_start = on_job_end = on_run_start


def counts(gpu: str) -> str:
    """Return the numbers of GPUs of the sweep: `1`, or `1,8` if more than one is visible here."""
    visible = 1 if gpu in _NO_GPUS else capabilities.visible_gpus()
    return f"1,{visible}" if visible > 1 else "1"


def _visible(gpu: str) -> str:
    if gpu in _NO_GPUS:
        return f"gpu={gpu} is not a GPU"
    return f"{'one GPU is' if capabilities.visible_gpus() else 'no GPU is'} visible here"


def _console(config: Any) -> Any:
    return Console(quiet=bool(config.quiet))
