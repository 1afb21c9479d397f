"""GPU counts and the final table for experiment=segmentation_table.

The experiment trains segmentation models on one GPU and on all. Its file in conf/ names
`SegmentationTable` as a Hydra callback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.records.analysis import SweepAnalysis
from perfexp.records.grid import Column, Grid
from perfexp.records.record import Record, Status
from perfexp.records.subject import one_line
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.records.wording import rate_text, with_width
from perfexp.report.console import Console
from perfexp.report.speed import Speed
from perfexp.report.tables import speed_files
from perfexp.run import worker_query
from perfexp.run.sweep_run import SweepRun
from perfexp.statistics import estimators

#: Configured devices that are not GPUs.
_NO_GPUS = ("cpu", "mps", "fake")
_COUNT = "gpu.count"
_SYNTHETIC = (
    "images are synthetic, loading is not included; for real images: data=cityscapes data.root=DIR"
)
_COLUMNS = (
    "model",
    "GPUs",
    "precision",
    "batch per GPU",
    "images/s ± CI95",
    "per GPU",
    "speed file",
    "remarks",
)
#: Columns of prose.
_PROSE = ("model", "speed file", "remarks")


class SegmentationTable:
    """Hydra callback for conf/experiment/segmentation_table.yaml. Its exceptions become warnings.

    Args:
        register: OmegaConf's function that registers a resolver. `${perfexp_cards:GPU}` resolves to
            the sweep's GPU counts. It is registered only if this experiment is chosen.
    """

    def __init__(self, *, register: Callable[..., None]) -> None:
        register("perfexp_cards", counts, replace=True)

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Announce skipped runs before anything is measured."""
        keys = (text.lstrip("+").partition("=")[0] for text in config.hydra.overrides.task)
        if _COUNT not in keys and "," not in (counts(config.gpu.name)):
            _console(config).note(
                f"mp is skipped: {_why_single(config.gpu.name)}. To measure 1 and N: {_COUNT}=1,N."
            )

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """Show the table. The sweep's own summary follows it."""
        if (folder := SweepRun.folder) is None:
            return
        try:
            sweep = Sweep.load(folder)
        except UserError:  # replicates of several runs are interleaved, so no run has ended yet
            return
        if (table := trainings(sweep, folder, sweep.records(folder))) is not None:
            _console(config).show_grid("training of segmentation models", table)
        else:
            _console(config).note("There is no table: no training was measured (mode=train).")

    def on_run_start(self, config: Any, **_: Any) -> None:
        """Do nothing."""

    on_run_end = on_job_start = on_job_end = on_run_start


def counts(gpu: str) -> str:
    """Return the GPU counts to sweep over as text: `1`, or `1,8` if 8 GPUs are visible.

    It resolves `${perfexp_cards:GPU}`.

    Args:
        gpu: option of the group `gpu`.
    """
    visible = 1 if gpu in _NO_GPUS else worker_query.visible_gpus()
    if visible > 1:
        return f"1,{visible}"
    return "1"


def _why_single(gpu: str) -> str:
    """Return why `counts` has a single GPU count for an option of the group `gpu`."""
    if gpu in _NO_GPUS:
        return f"gpu={gpu} is not a GPU"
    return f"{'one GPU is' if worker_query.visible_gpus() else 'no GPU is'} visible here"


def _console(config: Any) -> Any:
    """Return a console for the sweep's messages."""
    return Console(quiet=bool(config.quiet))


def trainings(sweep: Sweep, folder: Path, records: Sequence[Record]) -> Grid | None:
    """Return a table of the sweep's trainings; None if there are none.

    `on_multirun_end` prints it.

    Args:
        sweep: the sweep.
        folder: the sweep's folder.
        records: records of its runs.
    """
    lines: list[dict[str, str]] = []
    for child, analysis in SweepAnalysis.of(sweep, records).runs:
        if analysis is not None:
            for speed, path in speed_files.where(analysis.record, folder / child.directory):
                lines.append(_of_speed(speed, path))
        elif child.status is not Status.OK:
            lines.append(_refused(child))
    if not lines:
        return None
    columns = []
    for title in _COLUMNS:
        texts = [line.get(title, "") for line in lines]
        rank = int(title == "speed file")
        columns.append(Column(title, texts, prose=title in _PROSE, rank=rank))
    notes = []
    data = [str(record.plan.get("choices", {}).get("data", "")) for record in records]
    if "synthetic" in " ".join(data):
        notes.append(_SYNTHETIC)
    return Grid(columns, notes).without_empty()


def _of_speed(speed: Speed, path: Path | None) -> dict[str, str]:
    """Return the table's line for a training, by column.

    Args:
        speed: figures of the training.
        path: its speed file; None if there is none.
    """
    line = {
        "model": one_line(speed.model),
        "GPUs": str(speed.num_gpus),
        "precision": speed.precision,
        "batch per GPU": str(speed.batch_size),
        "speed file": one_line(str(path)) if path else "",
    }
    if speed.failed:
        return line | {"remarks": one_line(f"failed: {speed.remark}")}
    rate = speed.interval or estimators.Interval(value=speed.images_per_second, low=None, high=None)
    low, high = (None if end is None else end / speed.num_gpus for end in (rate.low, rate.high))
    share = estimators.Interval(value=rate.value / speed.num_gpus, low=low, high=high)
    rates = {"images/s ± CI95": with_width(rate, rate_text(rate)), "per GPU": rate_text(share)}
    return line | rates


def _refused(child: SweepChild) -> dict[str, str]:
    """Return the table's line for a run without a record, by column."""
    why = f"{child.status.value}: {child.error}" if child.error else child.status.value
    model, gpus = child.axes.get("model") or child.name, child.axes.get("gpu.count", "")
    return {"model": one_line(model), "GPUs": one_line(gpus), "remarks": one_line(why)}
