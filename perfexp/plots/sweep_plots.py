"""The plot of a sweep as data; `drawing` draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy

from perfexp.comparison import sweep_verdicts
from perfexp.comparison.document import Verdict
from perfexp.comparison.sweep_verdicts import TimeRatio
from perfexp.plots.chart import Bar, Bars, Caption, Chart, Curve, Facet, Line, Panel
from perfexp.plots.record_plots import (
    NUMERIC,
    Placed,
    axes_of,
    chart_of,
    footer,
    gaps_of,
    lines_of,
    subtitle,
)
from perfexp.records import units
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.quantities import time_title
from perfexp.records.record import Key
from perfexp.records.summary import TIME_KINDS, Row
from perfexp.records.sweep_record import GPU_COUNT, SweepChild
from perfexp.records.units import digits
from perfexp.statistics.estimators import Interval
from perfexp.summaries import wording
from perfexp.summaries.analysis import SweepAnalysis
from perfexp.summaries.subject import MODEL_AXES, constant, label, one_line
from perfexp.summaries.wording import bare

#: Line segments of a proportional rate.
_SEGMENTS = 60


class _Run(NamedTuple):
    """A row of a run of a sweep, with its time over that of the baseline; without a row it left no record."""

    child: SweepChild
    row: Row | None
    ratio: TimeRatio | None = None
    is_baseline: bool = False

    @property
    def phase(self) -> str:
        """The phase; empty without a row."""
        return self.row.key.phase if self.row else ""

    @property
    def kind(self) -> str:
        """The kind of its time; empty for a failed one."""
        return (self.row and self.row.time_kind) or ""

    @property
    def place(self) -> tuple[int, str, str]:
        """The identity of its ratio: number, phase and kind of time."""
        return self.child.job, self.phase, self.kind

    @property
    def seconds(self) -> float:
        """The run's time, by which bars are sorted; infinite without one."""
        return self.row.time.median.value if self.row and self.row.time else float("inf")

    @property
    def model(self) -> str:
        """The model, if it is an axis of the sweep; otherwise empty."""
        return next(
            (one_line(self.child.axes[name]) for name in MODEL_AXES if name in self.child.axes), ""
        )


def plot(whole: SweepAnalysis) -> Chart | Bars | None:
    """Return the plot of a sweep: lines over sizes, batches or numbers of devices, otherwise bars; None for none."""
    runs = [_Run(child, row) for child, one in whole.runs for row in (one.rows if one else [None])]
    runs = _by_one_time(runs)
    table = [run.row for run in runs if run.row]
    if not any(row.time for row in table):
        return None
    device = ", ".join(
        dict.fromkeys(one.about.device for one in whole.analyses if one.about.device)
    )
    same = label(table[0].key, constant(row.key for row in table))
    title = " · ".join(
        filter(None, (one_line(whole.sweep.name), same, units.counted(len(whole.runs), "run")))
    )
    warnings = footer(table, [one.record for one in whole.analyses], whole.slower.values())
    caption = Caption(title=title, subtitle=subtitle(table, device), footer=warnings)
    fields, axis = axes_of(table)
    if axis:
        named = [
            (_label(run.child.axes, run.row.key, fields, axis), run.row) for run in runs if run.row
        ]
        return chart_of(caption, named, axis)
    sharing = [run for run in runs if run.child.devices is not None]
    if len({run.child.devices for run in sharing}) > 1:
        of = f" of {scope}" if (scope := wording.scope(table)) else ""
        words = f"samples/s of all devices with their 95 % interval{of}, on {device or 'unknown devices'}"
        return _over_devices(replace(caption, subtitle=words), sharing, fields)
    ratios = sweep_verdicts.time_ratios(whole)
    runs = [
        run._replace(ratio=ratios.get(run.place), is_baseline=run.place in ratios) for run in runs
    ]
    subtitles = [caption.subtitle, *_meaning([run.ratio for run in runs if run.ratio])]
    return Bars(
        caption=replace(caption, subtitle="; ".join(subtitles)), facets=tuple(_facets(runs))
    )


def _over_devices(caption: Caption, runs: Sequence[_Run], fields: Sequence[str]) -> Chart:
    """The rates of all devices over their number: a panel for each phase, a line for each name.

    Dashed is the rate of the fewest devices of a line times their ratio. Runs without a rate are gaps.
    """
    placed = list[Placed]()
    for run in runs:
        words = [
            _axis_text(name, value) for name, value in run.child.axes.items() if name != GPU_COUNT
        ]
        rest = [name for name in fields if name != "phase" and name not in run.child.axes]
        name = " · ".join(filter(None, [*words, label(run.row.key, rest) if run.row else ""]))
        placed.append(
            Placed(name, run.child.devices or 0, run.row, (run.row or run.child).status.value)
        )
    phases, panels = dict.fromkeys(one.row.key.phase for one in placed if one.row), list[Panel]()
    for phase in phases:
        own = [one for one in placed if one.row and one.row.key.phase == phase]
        lines = lines_of(own, lambda row: row.samples_per_second)
        curves = tuple(_in_proportion(line) for line in lines if len(line.x) > 1)
        prefix = f"{phase}: " if len(phases) > 1 else ""
        panels.append(Panel(title=f"{prefix}throughput", lines=lines, curves=curves))
    return Chart(
        caption=caption,
        axis="devices, each with its own batch",
        ticks={one.x: f"{one.x:g}" for one in placed},
        panels=tuple(panel for panel in panels if panel.lines),
        gaps=gaps_of(placed),
    )


def _in_proportion(line: Line) -> Curve:
    x = numpy.geomspace(line.x[0], line.x[-1], _SEGMENTS + 1)
    y = line.y[0].value * x / line.x[0]
    return Curve(label="in proportion to the devices", x=tuple(x.tolist()), y=tuple(y.tolist()))


def _by_one_time(runs: Sequence[_Run]) -> list[_Run]:
    """The rows of a sweep, those of a phase with the first kind of time that all have; unchanged if there is none."""
    kinds: dict[str, str | None] = {}
    for phase in {run.phase for run in runs if run.kind}:
        own = [run.row for run in runs if run.row and run.kind and run.phase == phase]
        kinds[phase] = next(
            (kind for kind in TIME_KINDS if all(kind in row.times for row in own)), None
        )
    made = []
    for run in runs:
        kind = kinds.get(run.phase) if run.kind else None
        made.append(run._replace(row=replace(run.row, time_kind=kind)) if run.row and kind else run)
    return made


def _facets(runs: Sequence[_Run]) -> Iterator[Facet]:
    """One for each phase and kind of time; a run without a record is in each."""
    places = list(dict.fromkeys((run.phase, run.kind) for run in runs if run.kind))
    for phase, kind in places:
        # a failed point has no kind of time: it is shown with the first kind of its phase
        kinds = (kind, "") if kind == dict(reversed(places))[phase] else (kind,)
        here = [run for run in runs if not run.row or (run.phase == phase and run.kind in kinds)]
        prefix = f"{phase}: " if len(places) > 1 else ""
        behind = "; pale: latency" if any(map(_latency, here)) else ""
        yield Facet(title=f"{prefix}{time_title(kind)} per call{behind}", groups=_groups(here))


def _groups(runs: Sequence[_Run]) -> dict[str, tuple[Bar, ...]]:
    """Bars by model if there are several with several runs, each group and the groups sorted by their times."""
    models = {run.model for run in runs}
    has_groups = len(models - {""}) > 1 and len(models) < len(runs)
    groups: dict[str, tuple[Bar, ...]] = {}
    for run in sorted(runs, key=lambda run: run.seconds):
        name = run.model if has_groups else ""
        groups[name] = (*groups.get(name, ()), _bar(run, MODEL_AXES if has_groups else ()))
    return groups


def _bar(run: _Run, left_out: Sequence[str]) -> Bar:
    axes = (
        _axis_text(name, value) for name, value in run.child.axes.items() if name not in left_out
    )
    name = " · ".join(axes) or one_line(run.child.name)
    if run.row is None or run.row.time is None:
        status, error = (run.row or run.child).status, (run.row or run.child).error
        return Bar(
            label=name,
            value=None,
            text=f"{status.value}: {one_line(error)}" if error else status.value,
        )
    median, ratio = run.row.time.median, " · baseline" if run.is_baseline else ""
    if run.ratio:
        kind = "time per sample" if run.kind == "throughput" else run.kind
        ratio = f" · {'≈ ' * run.ratio.is_open}{digits(run.ratio.value, 3)} × {kind}"
    text = f"{'≈ ' * (median.low is None)}{bare(median)}{ratio}"
    return Bar(label=name, value=median, text=text, behind=_latency(run))


def _meaning(ratios: Sequence[TimeRatio]) -> list[str]:
    """The meaning of the ratios at the ends of bars, and of `≈` before one; empty without any."""
    words = {Verdict.UNDECIDED: "undecided", Verdict.NOT_COMPARABLE: "not comparable"}
    of = " or ".join(
        word for verdict, word in words.items() if any(ratio.verdict is verdict for ratio in ratios)
    )
    return (
        [f"× is the ratio to the baseline{f', ≈ before it: {of}' if of else ''}"] if ratios else []
    )


def _latency(run: _Run) -> Interval | None:
    """The latency of a run that has it besides the device's own time; None for others."""
    has_both = run.row and run.kind in DEVICE_TIMES and "latency" in run.row.times
    return run.row.times["latency"].median if run.row and has_both else None


def _label(axes: dict[str, str], key: Key, fields: Sequence[str], axis: str) -> str:
    """The values of the axes that are not the horizontal one, then other differences of a point but its phase."""
    words = [
        _axis_text(name, value) for name, value in axes.items() if name not in (*NUMERIC, "mode")
    ]
    rest = [
        name
        for name in fields
        if name not in (axis, "phase") and (name not in axes or name in NUMERIC)
    ]
    return " · ".join([*words, *filter(None, [label(key, rest)])])


def _axis_text(name: str, value: str) -> str:
    """The value of an axis, with its name unless the value is a word."""
    return (
        one_line(value) if value[:1].isalpha() else one_line(f"{name.rsplit('.', 1)[-1]}={value}")
    )
