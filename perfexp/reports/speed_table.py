"""Speed table: the trainings of a sweep, a line each: on how many cards, how many images a second, and which file."""

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

#: What the figures leave out.
_SYNTHETIC = "images are synthetic, and no loading is in the figures: data=cityscapes data.root=DIR trains on pictures"


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One training."""

    model: str
    cards: str
    precision: str = ""
    batch_size: str = ""
    rate: str = ""
    per_card: str = ""
    file: str = ""
    remark: str = ""


def table(sweep: Sweep, folder: Path, records: Sequence[Record]) -> Grid | None:
    """The trainings of a sweep; None where it has none.

    Args:
        sweep: its summary.
        folder: the sweep's.
        records: those of its runs, as far as there are any.
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
        Column(title="cards", cells=tuple(line.cards for line in lines)),
        Column(title="precision", cells=tuple(line.precision for line in lines)),
        Column(title="batch per card", cells=tuple(line.batch_size for line in lines)),
        Column(title="images/s ± CI95", cells=tuple(line.rate for line in lines)),
        Column(title="per card", cells=tuple(line.per_card for line in lines)),
        Column(title="speed file", cells=tuple(line.file for line in lines), prose=True, rank=1),
        Column(title="remarks", cells=tuple(line.remark for line in lines), prose=True),
    )
    synthetic = any("synthetic" in str(record.plan.get("choices", {}).get("data", "")) for record in records)
    notes = (_SYNTHETIC,) if synthetic else ()
    return Grid(columns=tuple(column for column in columns if any(column.cells)), notes=notes)


def _of_speed(speed: Speed, path: Path | None) -> _Line:
    """A training that was recorded, whatever came of it."""
    rate = estimators.Interval(value=speed.images_per_second, low=None, high=None)
    return _Line(
        model=one_line(speed.model),
        cards=str(speed.num_gpus),
        precision=speed.precision,
        batch_size=str(speed.batch_size),
        rate="" if speed.failed else _rate_text(speed.interval or rate),
        per_card="" if speed.failed else rate_text(_share(speed.interval or rate, speed.num_gpus)),
        file=one_line(str(path)) if path else "",
        remark=one_line(f"failed: {speed.remark}") if speed.failed else "",
    )


def _refused(child: SweepChild) -> _Line:
    """A run that left no record."""
    why = f"{child.status.value}: {child.error}" if child.error else child.status.value
    model, cards = child.axes.get("model") or child.name, child.axes.get("gpu.count", "")
    return _Line(model=one_line(model), cards=one_line(cards), remark=one_line(why))


def _rate_text(rate: estimators.Interval) -> str:
    width = rate.relative_half_width
    return f"{rate_text(rate)} ± {percent(width)}" if width is not None else f"{rate_text(rate)}, no interval"


def _share(rate: estimators.Interval, cards: int) -> estimators.Interval:
    """What one of several cards does."""
    low, high = (None if end is None else end / cards for end in (rate.low, rate.high))
    return estimators.Interval(value=rate.value / cards, low=low, high=high)
