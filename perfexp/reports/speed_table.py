"""The trainings of a sweep as a table: number of GPUs, images per second, and speed file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.speed import Speed
from perfexp.statistics import estimators
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import one_line
from perfexp.summaries.sweep_summary import paired
from perfexp.summaries.wording import rate_text, with_width
from perfexp.tables import speed_files

_SYNTHETIC = "images are synthetic, loading is not included; for real images: data=cityscapes data.root=DIR"
#: Columns; whether they are prose.
_COLUMNS = {
    "model": True,
    "GPUs": False,
    "precision": False,
    "batch per GPU": False,
    "images/s ± CI95": False,
    "per GPU": False,
    "speed file": True,
    "remarks": True,
}


def table(sweep: Sweep, folder: Path, records: Sequence[Record]) -> Grid | None:
    """Return the trainings of a sweep, whose folder is `folder`; None if it has none."""
    lines: list[dict[str, str]] = []
    for child, record in paired(sweep, records):
        if record is not None:
            lines += [_of_speed(*training) for training in speed_files.where(record, folder / child.directory)]
        elif child.status is not Status.OK:
            lines.append(_refused(child))
    if not lines:
        return None
    columns = [
        Column(title, [line.get(title, "") for line in lines], prose=is_prose, rank=int(title == "speed file"))
        for title, is_prose in _COLUMNS.items()
    ]
    synthetic = any("synthetic" in str(record.plan.get("choices", {}).get("data", "")) for record in records)
    return Grid(columns, [_SYNTHETIC] if synthetic else []).without_empty()


def _of_speed(speed: Speed, path: Path | None) -> dict[str, str]:
    rate = speed.interval or estimators.Interval(value=speed.images_per_second, low=None, high=None)
    low, high = (None if end is None else end / speed.num_gpus for end in (rate.low, rate.high))
    share = estimators.Interval(value=rate.value / speed.num_gpus, low=low, high=high)
    return {
        "model": one_line(speed.model),
        "GPUs": str(speed.num_gpus),
        "precision": speed.precision,
        "batch per GPU": str(speed.batch_size),
        "images/s ± CI95": "" if speed.failed else with_width(rate, rate_text(rate)),
        "per GPU": "" if speed.failed else rate_text(share),
        "speed file": one_line(str(path)) if path else "",
        "remarks": one_line(f"failed: {speed.remark}") if speed.failed else "",
    }


def _refused(child: SweepChild) -> dict[str, str]:
    why = f"{child.status.value}: {child.error}" if child.error else child.status.value
    model, gpus = child.axes.get("model") or child.name, child.axes.get("gpu.count", "")
    return {"model": one_line(model), "GPUs": one_line(gpus), "remarks": one_line(why)}
