"""A sweep's plot as data; `drawing` draws it.

Runs that differ in input size, batch size or device count become lines over that number; any other
runs, such as models, become bars. A row is one point of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy

from perfexp.comparison import sweep_verdicts
from perfexp.comparison.document import Verdict
from perfexp.comparison.sweep_verdicts import TimeRatio
from perfexp.host import foreign
from perfexp.prediction.corpus import QUANTITIES
from perfexp.prediction.predictions import INTERPOLATED, key_of
from perfexp.records import units, wording
from perfexp.records.analysis import SweepAnalysis
from perfexp.records.paths import RunPaths
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.quantities import time_title
from perfexp.records.record import Key
from perfexp.records.rows import Row
from perfexp.records.sizes import Size
from perfexp.records.subject import MODEL_AXES, constant, label, one_line
from perfexp.records.summary import TIME_KINDS
from perfexp.records.sweep_record import GPU_COUNT, SweepChild
from perfexp.records.units import digits
from perfexp.records.wording import bare
from perfexp.report.plots.chart import (
    Bar,
    Bars,
    Caption,
    Chart,
    ChartLine,
    Facet,
    FittedCurve,
    Panel,
)
from perfexp.report.plots.record_plots import (
    NUMERIC,
    Placed,
    axes_of,
    chart_of,
    footer,
    gaps_of,
    lines_of,
    scale,
    subtitle,
)
from perfexp.statistics.estimators import Interval

#: From this many points of a line on, a text counts them instead of naming them.
_MOST_NAMED = 4
#: Meaning of the markers above a campaign's panels.
_ABOVE = "above each panel: its fastest line (hollow: others may be as fast, ×: undecided)"
#: Best lines by model and phase: position on the axis, then color and whether the line is alone.
_Best = dict[tuple[str, str], dict[float, tuple[int, bool] | None]]
#: Line segments of a proportional rate.
_SEGMENTS = 60


class _Place(msgspec.Struct):
    phase: str
    input_size: Size
    batch_size: int


class _Line(msgspec.Struct):
    predicted: _Place
    precision: str
    unit: str
    source: str
    value: float | None
    low: float | None
    high: float | None


class _PlottedRun(NamedTuple):
    """A row from a sweep's run, with its time relative to the baseline.

    Attributes:
        row: the row; None if the run left no record.
        ratio: None for a baseline, and for a run that was not compared.
        is_baseline: whether it was compared; if so, a run without `ratio` is the baseline.
    """

    child: SweepChild
    row: Row | None
    ratio: TimeRatio | None = None
    is_baseline: bool = False

    @property
    def phase(self) -> str:
        """Return the phase; empty without a row."""
        if self.row:
            return self.row.key.phase
        return ""

    @property
    def kind(self) -> str:
        """Return the kind of time; empty for a failed row."""
        return (self.row and self.row.time_kind) or ""

    @property
    def place(self) -> tuple[int, str, str]:
        """Return the key of its ratio: number, phase and kind of time."""
        return self.child.job, self.phase, self.kind

    @property
    def seconds(self) -> float:
        """Return the run's median time, by which bars are sorted; infinite without a time."""
        if self.row and self.row.time:
            return self.row.time.median.value
        return float("inf")

    @property
    def model(self) -> str:
        """Return the model if it is a sweep axis; otherwise empty."""
        for name in MODEL_AXES:
            if name in self.child.axes:
                return one_line(self.child.axes[name])
        return ""


class _Missing(NamedTuple):
    """Points of a line without a time, of a status; the phase is empty for a run without a record.

    Attributes:
        text: short name of the line, and the status.
    """

    model: str
    phase: str
    text: str


def plot(sweep_analysis: SweepAnalysis, folder: Path | None = None) -> Chart | Bars | None:
    """Return a sweep's plot; None if nothing was timed.

    It has lines over sizes, batches or device counts, otherwise bars. The sweep writes it as
    sweep.png, and the HTML page embeds it.

    Args:
        folder: the sweep's folder, for the predictions of sparse runs; None to leave them out.
    """
    runs = list[_PlottedRun]()
    for child, analysis in sweep_analysis.runs:
        for row in analysis.rows if analysis else [None]:
            runs.append(_PlottedRun(child, row))
    fields, axis = axes_of([run.row.key for run in runs if run.row])
    if not axis or not _continue_as_graphs(runs, fields, axis):
        runs = _by_one_time(runs)
    table = [run.row for run in runs if run.row]
    if not any(row.time for row in table):
        return None
    records = [analysis.record for analysis in sweep_analysis.analyses]
    devices = filter(None, [analysis.about.device for analysis in sweep_analysis.analyses])
    device = ", ".join(dict.fromkeys(devices))
    keys = [row.key for row in table]
    same = label(keys[0], constant(keys))
    models = {analysis.about.model for analysis in sweep_analysis.analyses}
    words = (
        models.pop() if len(models) == 1 else "",
        one_line(sweep_analysis.sweep.name),
        same,
        units.counted(len(sweep_analysis.runs), "run"),
    )
    warnings = footer(table, records, sweep_analysis.slower.values())
    caption = Caption(
        title=" · ".join(filter(None, words)), subtitle=subtitle(table, device), footer=warnings
    )
    if axis:
        return _over_sizes(caption, runs, sweep_analysis, folder, fields, axis)
    # no numeric axis: lines over device counts if they vary, else bars
    counts = {run.child.devices for run in runs}
    if len(counts - {None}) > 1:
        interval = "interval"
        if scope := wording.scope(table):
            interval += f" of {scope}"
        on_device = device or "unknown devices"
        text = f"samples/s of all devices with their 95 % {interval}, on {on_device}"
        return _over_devices(replace(caption, subtitle=text), runs, fields)
    # a baseline's entry is None; a run that was not compared has no entry
    ratios = sweep_verdicts.time_ratios(sweep_analysis)
    for number, run in enumerate(runs):
        runs[number] = run._replace(ratio=ratios.get(run.place), is_baseline=run.place in ratios)
    if meaning := _meaning([run.ratio for run in runs if run.ratio]):
        caption = replace(caption, subtitle=f"{caption.subtitle}; {meaning}")
    return Bars(caption=caption, facets=tuple(_facets(runs)))


def _over_sizes(
    caption: Caption,
    runs: Sequence[_PlottedRun],
    sweep_analysis: SweepAnalysis,
    folder: Path | None,
    fields: Sequence[str],
    axis: str,
) -> Chart:
    """Return lines over input or batch sizes, with predictions of sparse sweeps as bands.

    A campaign, several models with several lines each, has panels of its own for each model.
    """
    named, missing = list[tuple[str, Row]](), dict[_Missing, list[str]]()
    lines, places = dict[str, tuple[str, str, int]](), dict[str, int]()
    for run in runs:
        key = run.row.key if run.row else None
        name = _label(run.child.axes, key, fields, axis)
        short = _label(run.child.axes, key, fields, axis, MODEL_AXES)
        lines[name] = run.model, short, places.setdefault(short, len(places))
        if run.row:
            named.append((name, run.row))
        if not run.row or not run.row.time:
            status = (run.row or run.child).status.value
            phase = run.phase if "phase" in fields else ""
            without = _Missing(run.model, phase, f"{short}: {status}")
            missing.setdefault(without, []).append(label(key, [axis]) if key else "")
    predicted, shown = [], {(run.phase, run.kind) for run in runs}
    for child, analysis in sweep_analysis.runs:
        if folder and analysis:
            own = {
                row.key.phase for row in analysis.rows if (row.key.phase, row.time_kind) in shown
            }
            for quantity, key, interval in _interpolated(folder / child.directory):
                if key.phase in own or quantity != "time":  # not device times beside latencies
                    name = _label(child.axes, key, fields, axis)
                    predicted.append((quantity, name, key, interval))
    chart = chart_of(caption, named, axis, predicted=predicted)
    models = {model for model, _, _ in lines.values()}
    if len(models) < 2 or len(models) == len(lines):
        return chart
    _, position_of = scale([row.key for _, row in named], axis)
    best: _Best = {}
    for winner in sweep_verdicts.winners(sweep_analysis):
        key = winner.key
        name = _label(winner.best or winner.ties[0], key, fields, axis)
        if name in lines:
            model, _, color = lines[name]
            place = model, key.phase if "phase" in fields else ""
            found = (color, not winner.ties) if winner.best else None
            best.setdefault(place, {})[position_of(key)] = found
    return _campaign(chart, lines, missing, best)


def _campaign(
    chart: Chart,
    lines: Mapping[str, tuple[str, str, int]],
    missing: Mapping[_Missing, Sequence[str]],
    best: _Best,
) -> Chart:
    """Return a chart with panels for each model: its times, beside them its energies if any.

    A line has the same look in all panels.

    Args:
        chart: all lines in one panel for each quantity.
        lines: model, short name and color of each line.
        missing: sizes or batches of points without a time.
        best: the panels' best lines, by model and phase.
    """
    energies = {_phase(panel): panel for panel in chart.panels if panel.unit == "joules"}
    times = [panel for panel in chart.panels if panel.unit == "seconds"]
    panels = list[Panel]()
    models = dict.fromkeys(model for model, _, _ in lines.values())
    for model, time in product(models, times):
        phase = _phase(time)
        for panel in filter(None, (time, energies.get(phase))):
            own_lines = []
            for line in panel.lines:
                # latencies behind are in no list
                own_model, name, color = lines.get(line.label, ("", "", 0))
                if own_model == model:
                    own_lines.append(replace(line, label=name, color=color, odd={}))
            panels.append(replace(panel, heading=model, lines=tuple(own_lines)))
            if not own_lines:
                panels[-1] = replace(panels[-1], note="not measured")
        winners = best.get((model, phase), {})
        texts = []
        for part, places in missing.items():
            if part.model == model and part.phase in ("", phase):
                named = ", ".join(places) if len(places) < _MOST_NAMED else f"{len(places)} points"
                texts.append(f"{part.text} at {named}".removesuffix(" at "))
        place = -2 if phase in energies else -1
        panels[place] = replace(panels[place], best=winners, note="; ".join(texts))
    caption = replace(chart.caption, subtitle=f"{chart.caption.subtitle}; {_ABOVE}")
    return replace(chart, caption=caption, panels=tuple(panels), gaps={}, across=2)


def _phase(panel: Panel) -> str:
    """Return the phase in a panel's title; empty if all panels have the same phase."""
    return panel.title.rpartition(": ")[0]


def _over_devices(caption: Caption, runs: Sequence[_PlottedRun], fields: Sequence[str]) -> Chart:
    """Return the rates of all devices over their number: a panel per phase, a line per name.

    A dashed line is proportional to the device count, from the rate with the fewest devices. Runs
    without a rate are gaps.
    """
    placed, ticks = list[Placed](), dict[float, str]()
    by_phase: dict[str, list[Placed]] = {}
    for run in runs:
        if run.child.devices is None:
            continue
        words = _axis_texts(run.child.axes, [GPU_COUNT])
        if run.row:
            other_fields = [
                name for name in fields if name != "phase" and name not in run.child.axes
            ]
            words.append(label(run.row.key, other_fields))
        name = " · ".join(filter(None, words))
        status = (run.row or run.child).status.value
        point = Placed(name, run.child.devices or 0, run.row, status)
        placed.append(point)
        ticks[point.x] = f"{point.x:g}"
        if run.row:
            by_phase.setdefault(run.phase, []).append(point)
    panels = list[Panel]()
    for phase, phase_points in by_phase.items():
        lines = lines_of(phase_points, lambda row: row.samples_per_second)
        curves = tuple(_in_proportion(line) for line in lines if len(line.x) > 1)
        prefix = f"{phase}: " if len(by_phase) > 1 else ""
        if lines:
            panels.append(Panel(title=f"{prefix}throughput", lines=lines, curves=curves))
    return Chart(
        caption=caption,
        axis="devices, each with its own batch",
        ticks=ticks,
        panels=tuple(panels),
        gaps=gaps_of(placed),
    )


def _in_proportion(line: ChartLine) -> FittedCurve:
    """Return rates proportional to the device count, from a line's first point."""
    x = numpy.geomspace(line.x[0], line.x[-1], _SEGMENTS + 1)
    y = line.y[0].value * x / line.x[0]
    return FittedCurve(
        label="in proportion to the devices", x=tuple(x.tolist()), y=tuple(y.tolist())
    )


def _continue_as_graphs(runs: Sequence[_PlottedRun], fields: Sequence[str], axis: str) -> bool:
    """Return whether all lines are device times, at some points of the call as a CUDA graph."""
    kinds: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        if run.row and run.kind:
            name = _label(run.child.axes, run.row.key, fields, axis)
            kinds.setdefault((run.phase, name), set()).add(run.kind)
    return all(DEVICE_TIMES[0] in own <= set(DEVICE_TIMES) for own in kinds.values())


def _by_one_time(runs: Sequence[_PlottedRun]) -> list[_PlottedRun]:
    """Return the rows with the same kind of time within a phase, if all rows have one.

    Otherwise a bar of device time would stand beside a bar of latency. The first kind that all have
    is chosen; without one the rows are unchanged.
    """
    kinds: dict[str, list[str]] = {}
    for run in runs:
        if run.row and run.kind:
            common = kinds.get(run.phase, TIME_KINDS)
            kinds[run.phase] = [kind for kind in common if kind in run.row.times]
    runs_alike = []
    for run in runs:
        if run.row and run.kind and kinds[run.phase]:
            run = run._replace(row=replace(run.row, time_kind=kinds[run.phase][0]))
        runs_alike.append(run)
    return runs_alike


def _facets(runs: Sequence[_PlottedRun]) -> Iterator[Facet]:
    """Yield a facet per phase and kind of time. A run without a record is in each.

    Times of different kinds, such as latency and device time, have axes of their own.
    """
    places = list(dict.fromkeys((run.phase, run.kind) for run in runs if run.kind))
    first_kinds = dict(reversed(places))
    for phase, kind in places:
        facet_runs = []
        for run in runs:
            # a failed point has no kind of time, so it is shown with the first kind of its phase
            own_kind = run.kind or first_kinds.get(run.phase)
            if not run.row or (run.phase, own_kind) == (phase, kind):
                facet_runs.append(run)
        title = f"{time_title(kind)} per call"
        if len(places) > 1:
            title = f"{phase}: {title}"
        if any(map(_latency, facet_runs)):
            title += "; pale: latency"
        yield Facet(title=title, groups=_groups(facet_runs))


def _groups(runs: Sequence[_PlottedRun]) -> dict[str, tuple[Bar, ...]]:
    """Return bars by model if several models have several runs.

    Groups, and bars in a group, are sorted by time.
    """
    models = {run.model for run in runs}
    is_grouped = len(models - {""}) > 1 and len(models) < len(runs)
    groups: dict[str, tuple[Bar, ...]] = {}
    for run in sorted(runs, key=lambda run: run.seconds):
        if is_grouped:
            name, bar = run.model, _bar(run, MODEL_AXES)
        else:
            name, bar = "", _bar(run, ())
        groups[name] = (*groups.get(name, ()), bar)
    return groups


def _bar(run: _PlottedRun, left_out: Sequence[str]) -> Bar:
    """Return a run's bar: median, ratio to the baseline, or the reason why it has no time.

    Args:
        left_out: sweep axes that the name leaves out, because the group's name shows them.
    """
    name = " · ".join(_axis_texts(run.child.axes, left_out)) or one_line(run.child.name)
    if run.row is None or run.row.time is None:
        ended = run.row or run.child
        text = ended.status.value
        if ended.error:
            text += f": {one_line(ended.error)}"
        return Bar(label=name, value=None, text=text)
    median = run.row.time.median
    text = bare(median)
    if median.low is None:
        text = f"≈ {text}"
    if run.ratio:
        kind = "time per sample" if run.kind == "throughput" else run.kind
        about = "≈ " if run.ratio.is_open else ""
        text += f" · {about}{digits(run.ratio.value, 3)} × {kind}"
    elif run.is_baseline:
        text += " · baseline"
    return Bar(label=name, value=median, text=text, behind=_latency(run))


def _meaning(ratios: Sequence[TimeRatio]) -> str:
    """Return the meaning of ratios at bar ends, and of a leading `≈`; empty without any.

    The plot's subtitle ends with it.
    """
    if not ratios:
        return ""
    verdicts = {ratio.verdict for ratio in ratios}
    words = []
    if Verdict.UNDECIDED in verdicts:
        words.append("undecided")
    if Verdict.NOT_COMPARABLE in verdicts:
        words.append("not comparable")
    text = "× is the ratio to the baseline"
    if words:
        return f"{text}, ≈ before it: {' or '.join(words)}"
    return text


def _latency(run: _PlottedRun) -> Interval | None:
    """Return a run's latency, in addition to the device time; None without both."""
    if run.row and run.kind in DEVICE_TIMES and "latency" in run.row.times:
        return run.row.times["latency"].median
    return None


def _label(
    axes: Mapping[str, str],
    key: Key | None,
    fields: Sequence[str],
    axis: str,
    left_out: Sequence[str] = (),
) -> str:
    """Return a point's line name: values of other sweep axes, then other varying key fields.

    Args:
        axes: the run's sweep axes with their values.
        key: the point; None for a run without a record.
        fields: key fields that vary over all points.
        axis: key field for the horizontal axis.
        left_out: sweep axes that the name leaves out.
    """
    shown = set(axes) - set(NUMERIC)
    words = _axis_texts(axes, (*NUMERIC, "mode", *left_out))
    if key:
        other_fields = [name for name in fields if name not in (axis, "phase", *shown)]
        words.append(label(key, other_fields))
    return " · ".join(filter(None, words))


def _axis_texts(axes: Mapping[str, str], left_out: Sequence[str]) -> list[str]:
    """Return axis values, with the axis name unless the value is a word."""
    words = []
    for name, value in axes.items():
        if name not in left_out:
            text = value if value[:1].isalpha() else f"{name.rsplit('.', 1)[-1]}={value}"
            words.append(one_line(text))
    return words


def _interpolated(folder: Path) -> list[tuple[str, Key, Interval]]:
    """Return quantities, points and values that a run interpolated between its measured points.

    Values are in SI units; a quantity is `time` or `energy`.

    Args:
        folder: the run's folder. Without predictions in it, there are no values; a broken file has
            those up to its first broken line.
    """
    values = []
    quantities = {unit: quantity for quantity, unit in QUANTITIES.items()}
    with suppress(OSError, *foreign.DECODING_ERRORS):
        for content in foreign.read_bytes(RunPaths(folder).predicted).splitlines():
            line = foreign.from_json(content, _Line)
            if line.source == INTERPOLATED and line.value is not None and line.unit in quantities:
                place = line.predicted
                pair = place.input_size, place.batch_size
                key = key_of(pair, place.phase, line.precision)
                interval = Interval(value=line.value, low=line.low, high=line.high)
                values.append((quantities[line.unit], key, interval))
    return values
