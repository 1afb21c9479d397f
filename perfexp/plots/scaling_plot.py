"""The plot of a sweep over numbers of devices as data: the rate of all devices, and the one in proportion to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perfexp.plots.chart import Caption, Chart, Curve, Line, Panel
from perfexp.records.summary import Row

#: Line segments of a proportional rate.
_SEGMENTS = 60


class Sharing(NamedTuple):
    """A run on a number of devices, with the name of its line; without a row it was not measured."""

    name: str
    devices: int
    phase: str
    row: Row | None
    status: str


def plot(caption: Caption, runs: Sequence[Sharing]) -> Chart:
    """Return the rates of all devices over their number: a panel for each phase, a line for each name.

    Dashed is the rate of the fewest devices of a line times their ratio. Runs without a rate are gaps.
    """
    phases = list(dict.fromkeys(run.phase for run in runs if run.row))
    panels = []
    for phase in phases:
        lines = _lines([run for run in runs if run.phase == phase])
        prefix = f"{phase}: " if len(phases) > 1 else ""
        if lines:
            panels.append(Panel(title=f"{prefix}throughput", lines=lines, curves=tuple(_proportional(lines))))
    counts = sorted({run.devices for run in runs})
    several = len({run.name for run in runs}) > 1
    missing: dict[float, list[str]] = {}
    for run in runs:
        if run.row is None or run.row.samples_per_second is None:
            where = [run.name if several else "", run.phase if len(phases) > 1 else ""]
            missing.setdefault(run.devices, []).append(": ".join(filter(None, (*where, run.status))))
    return Chart(
        caption=caption,
        axis="devices, each with its own batch",
        ticks={count: str(count) for count in counts},
        panels=tuple(panels),
        gaps={count: "\n".join(texts) for count, texts in missing.items()},
    )


def _lines(runs: Sequence[Sharing]) -> tuple[Line, ...]:
    lines = []
    for color, name in enumerate(dict.fromkeys(run.name for run in runs)):
        points = [
            (run.devices, rate) for run in runs if run.name == name and run.row and (rate := run.row.samples_per_second)
        ]
        if points:
            points.sort(key=lambda point: point[0])
            x, y = zip(*points, strict=True)
            lines.append(Line(label=name, x=x, y=y, color=color))
    return tuple(lines)


def _proportional(lines: Sequence[Line]) -> list[Curve]:
    curves = list[Curve]()
    for line in (line for line in lines if len(line.x) > 1):
        first, last = line.x[0], line.x[-1]
        x = tuple(first * (last / first) ** (step / _SEGMENTS) for step in range(_SEGMENTS + 1))
        y = tuple(line.y[0].value * devices / first for devices in x)
        curves.append(Curve(label="" if curves else "in proportion to the devices", x=x, y=y))
    return curves
