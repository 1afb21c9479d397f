"""The trainings of a sweep as a table: number of GPUs, images per second, and speed file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.speed import Speed
from perfexp.statistics import estimators
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import one_line
from perfexp.summaries.sweep_summary import paired
from perfexp.summaries.wording import percent, rate_text
from perfexp.tables import speed_files

_SYNTHETIC = "images are synthetic, loading is not included; for real images: data=cityscapes data.root=DIR"


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One training."""

    model: str
    gpus: str
    precision: str = ""
    batch_size: str = ""
    rate: str = ""
    per_gpu: str = ""
    file: str = ""
    remark: str = ""


def table(sweep: Sweep, folder: Path, records: Sequence[Record]) -> Grid | None:
    """Return the trainings of a sweep; None if it has none.

    Args:
        sweep: summary of the sweep.
        folder: folder of the sweep.
        records: available records of its runs.
    """
    lines: list[_Line] = []
    for child, record in paired(sweep, records):
        if record is not None:
            lines += [_of_speed(*found) for found in speed_files.where(record, folder / child.directory)]
        elif child.status is not Status.OK:
            lines.append(_refused(child))
    if not lines:
        return None
    columns = (
        Column(title="model", cells=tuple(line.model for line in lines), prose=True),
        Column(title="GPUs", cells=tuple(line.gpus for line in lines)),
        Column(title="precision", cells=tuple(line.precision for line in lines)),
        Column(title="batch per GPU", cells=tuple(line.batch_size for line in lines)),
        Column(title="images/s ± CI95", cells=tuple(line.rate for line in lines)),
        Column(title="per GPU", cells=tuple(line.per_gpu for line in lines)),
        Column(title="speed file", cells=tuple(line.file for line in lines), prose=True, rank=1),
        Column(title="remarks", cells=tuple(line.remark for line in lines), prose=True),
    )
    synthetic = any("synthetic" in str(record.plan.get("choices", {}).get("data", "")) for record in records)
    notes = (_SYNTHETIC,) if synthetic else ()
    return Grid(columns=tuple(column for column in columns if any(column.cells)), notes=notes)


def _of_speed(speed: Speed, path: Path | None) -> _Line:
    """A recorded training, finished or failed."""
    rate = estimators.Interval(value=speed.images_per_second, low=None, high=None)
    return _Line(
        model=one_line(speed.model),
        gpus=str(speed.cards),
        precision=speed.precision,
        batch_size=str(speed.batch_size),
        rate="" if speed.failed else _rate_text(speed.interval or rate),
        per_gpu="" if speed.failed else rate_text(_share(speed.interval or rate, speed.cards)),
        file=one_line(str(path)) if path else "",
        remark=one_line(f"failed: {speed.remark}") if speed.failed else "",
    )


def _refused(child: SweepChild) -> _Line:
    """A run that left no record."""
    why = f"{child.status.value}: {child.error}" if child.error else child.status.value
    model, gpus = child.axes.get("model") or child.name, child.axes.get("gpu.count", "")
    return _Line(model=one_line(model), gpus=one_line(gpus), remark=one_line(why))


def _rate_text(rate: estimators.Interval) -> str:
    width = rate.relative_half_width
    return f"{rate_text(rate)} ± {percent(width)}" if width is not None else f"{rate_text(rate)}, no interval"


def _share(rate: estimators.Interval, gpus: int) -> estimators.Interval:
    """The rate of one of several GPUs."""
    low, high = (None if end is None else end / gpus for end in (rate.low, rate.high))
    return estimators.Interval(value=rate.value / gpus, low=low, high=high)
