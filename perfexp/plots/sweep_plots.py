"""The plot of a sweep as data; `drawing` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from perfexp.comparison import sweep_verdicts
from perfexp.comparison.document import Verdict
from perfexp.comparison.sweep_verdicts import TimeRatio
from perfexp.plots import scaling_plot
from perfexp.plots.chart import Bar, Bars, Caption, Chart, Facet
from perfexp.plots.record_plots import NUMERIC, Named, axes_of, chart_of, footer, subtitle
from perfexp.records import units
from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import Key, Record
from perfexp.records.summary import TIME_KINDS, Row, rows
from perfexp.records.sweep_record import GPU_COUNT, Sweep, SweepChild
from perfexp.records.units import digits
from perfexp.statistics.estimators import Interval
from perfexp.summaries import wording
from perfexp.summaries.subject import MODEL_AXES, constant, label, one_line, subject
from perfexp.summaries.sweep_summary import diagnostics_of, paired
from perfexp.summaries.wording import bare

#: Ratios of the times of runs by number, phase and measure; None of a baseline.
_Ratios = Mapping[tuple[int, str, str], TimeRatio | None]


class _Run(NamedTuple):
    """A row of a run of a sweep; without a row the run left no record."""

    child: SweepChild
    row: Row | None

    @property
    def seconds(self) -> float:
        """The run's time, by which bars are sorted; infinite without one."""
        return self.row.time.median.value if self.row and self.row.time else float("inf")


def plot(sweep: Sweep, records: Sequence[Record]) -> Chart | Bars | None:
    """Return the plot of a sweep: lines over sizes, batches or numbers of devices, otherwise bars; None for none."""
    runs = [
        _Run(child, row) for child, record in paired(sweep, records) for row in (rows(record) if record else [None])
    ]
    runs = _by_one_time(runs)
    table = [run.row for run in runs if run.row]
    if not any(row.time for row in table):
        return None
    subjects = [subject(record.plan, record.environment) for record in records]
    device = ", ".join(dict.fromkeys(about.device for about in subjects if about.device))
    same = label(table[0].key, constant(row.key for row in table))
    title = " · ".join(filter(None, (one_line(sweep.name), same, units.counted(len(sweep.children), "run"))))
    warnings = footer(table, records, diagnostics_of(sweep, records).values())
    caption = Caption(title=title, subtitle=subtitle(table, device), footer=warnings)
    fields, axis = axes_of(table)
    if axis:
        named = [Named(_label(child.axes, row.key, fields, axis), row) for child, row in runs if row]
        return chart_of(caption, named, axis)
    sharing = [_sharing(run, devices, fields) for run in runs if (devices := run.child.devices) is not None]
    if len({run.devices for run in sharing}) > 1:
        of = f" of {scope}" if (scope := wording.scope(table)) else ""
        words = f"samples/s of all devices with their 95 % interval{of}, on {device or 'unknown devices'}"
        return scaling_plot.plot(replace(caption, subtitle=words), sharing)
    ratios = sweep_verdicts.time_ratios(sweep, records)
    shown = [ratio for run in runs if (ratio := _ratio(run, ratios))]
    caption = replace(caption, subtitle="; ".join([caption.subtitle, *_meaning(shown)]))
    return Bars(caption=caption, facets=tuple(_facets(runs, ratios)))


def _sharing(run: _Run, devices: int, fields: Sequence[str]) -> scaling_plot.Sharing:
    """A run of a sweep over numbers of devices; a failed one has the phase of no panel."""
    words = [_axis_text(name, value) for name, value in run.child.axes.items() if name != GPU_COUNT]
    if run.row:
        words.append(label(run.row.key, [name for name in fields if name != "phase" and name not in run.child.axes]))
    name, status = " · ".join(filter(None, words)), run.row.status if run.row else run.child.status
    return scaling_plot.Sharing(name, devices, run.row.key.phase if run.row else "", run.row, status.value)


def _by_one_time(runs: Sequence[_Run]) -> list[_Run]:
    """The rows of a sweep, those of a phase with the first kind of time that all have; unchanged if there is none."""
    kinds: dict[str, str | None] = {}
    for phase in {run.row.key.phase for run in runs if run.row}:
        timed = [run.row for run in runs if run.row and run.row.time and run.row.key.phase == phase]
        kinds[phase] = next((kind for kind in TIME_KINDS if all(kind in row.times for row in timed)), None)
    return [
        run._replace(row=replace(row, time_kind=kind))
        if (row := run.row) and row.time and (kind := kinds[row.key.phase])
        else run
        for run in runs
    ]


def _facets(runs: Sequence[_Run], ratios: _Ratios) -> list[Facet]:
    """One for each phase and kind of time; a run without a record is in each."""
    places = dict.fromkeys((run.row.key.phase, run.row.time_kind) for run in runs if run.row and run.row.time)
    facets = []
    for phase, kind in places:
        # a failed point has no kind of time: it is shown with the first kind of its phase
        first = next(other for one, other in places if one == phase)
        here = [
            run
            for run in runs
            if not run.row
            or (run.row.key.phase == phase and (run.row.time_kind == kind if run.row.time else kind == first))
        ]
        bare = any(one.low is None for run in here if (one := _latency(run)))
        behind = (
            f"; pale: latency{', without an interval where no whisker is' * bare}" if any(map(_latency, here)) else ""
        )
        prefix = f"{phase}: " if len(places) > 1 else ""
        facets.append(Facet(title=f"{prefix}{kind} per call{behind}", groups=_groups(here, ratios)))
    return facets


def _groups(runs: Sequence[_Run], ratios: _Ratios) -> dict[str, tuple[Bar, ...]]:
    """Bars by model if there are several, each group and the groups sorted by their times."""
    models = {model for run in runs if (model := _model(run))}
    groups: dict[str, list[_Run]] = {}
    for run in runs:
        groups.setdefault(_model(run) if len(models) > 1 else "", []).append(run)
    if all(len(group) == 1 for group in groups.values()):  # models alone need no groups
        groups = {"": list(runs)}
    ordered = sorted(groups.items(), key=lambda item: min(run.seconds for run in item[1]))
    return {name: tuple(_bars(group, ratios, is_group=bool(name))) for name, group in ordered}


def _bars(runs: Sequence[_Run], ratios: _Ratios, *, is_group: bool) -> list[Bar]:
    keys = [run.row.key for run in runs if run.row]
    varying = [name for name in NUMERIC if len({getattr(key, name) for key in keys}) > 1]
    bars = []
    for run in sorted(runs, key=lambda run: run.seconds):
        axes = {name: value for name, value in run.child.axes.items() if not (is_group and name in MODEL_AXES)}
        name = " · ".join(_axis_text(axis, value) for axis, value in axes.items()) or one_line(run.child.name)
        extra = label(run.row.key, [field for field in varying if field not in axes]) if run.row else ""
        name = " · ".join(filter(None, (name, extra)))
        if run.row is None or run.row.time is None:
            status, error = (run.row.status, run.row.error) if run.row else (run.child.status, run.child.error)
            text = f"{status.value}: {one_line(error)}" if error else status.value
            bars.append(Bar(label=name, value=None, text=text))
            continue
        median = run.row.time.median
        bar = Bar(label=name, value=median, text="", behind=_latency(run))
        bars.append(replace(bar, text=f"{'≈ ' * bar.is_hollow}{bare(median)}{_ratio_text(run, ratios)}"))
    return bars


def _ratio(run: _Run, ratios: _Ratios) -> TimeRatio | None:
    return ratios.get((run.child.job, run.row.key.phase, run.row.time_kind or "")) if run.row else None


def _ratio_text(run: _Run, ratios: _Ratios) -> str:
    """The time over that of the baseline, `≈` where the verdict is open; empty for a run that is not compared."""
    if ratio := _ratio(run, ratios):
        kind = run.row.time_kind if run.row else None
        name = "time per sample" if kind == "throughput" else kind
        return f" · {'≈ ' * ratio.is_open}{digits(ratio.value, 3)} × {name}"
    is_baseline = run.row and (run.child.job, run.row.key.phase, run.row.time_kind) in ratios
    return " · baseline" if is_baseline else ""


def _meaning(ratios: Sequence[TimeRatio]) -> list[str]:
    """The meaning of the ratios at the ends of bars, and of `≈` before one; empty without any."""
    if not ratios:
        return []
    words = {Verdict.UNDECIDED: "undecided", Verdict.NOT_COMPARABLE: "not comparable"}
    of = " or ".join(word for verdict, word in words.items() if any(ratio.verdict is verdict for ratio in ratios))
    return [f"× is the ratio to the baseline{f', ≈ before it: {of}' if of else ''}"]


def _latency(run: _Run) -> Interval | None:
    """The latency of a run that has it besides the device's own time; None for others."""
    if run.row is None or run.row.time_kind not in DEVICE_TIMES or "latency" not in run.row.times:
        return None
    return run.row.times["latency"].median


def _model(run: _Run) -> str:
    return next((one_line(run.child.axes[name]) for name in MODEL_AXES if name in run.child.axes), "")


def _label(axes: dict[str, str], key: Key, fields: Sequence[str], axis: str) -> str:
    """The values of the axes that are not the horizontal one, then other differences of a point but its phase."""
    words = [_axis_text(name, value) for name, value in axes.items() if name not in (*NUMERIC, "mode")]
    rest = [name for name in fields if name not in (axis, "phase") and (name not in axes or name in NUMERIC)]
    return " · ".join([*words, *filter(None, [label(key, rest)])])


def _axis_text(name: str, value: str) -> str:
    """The value of an axis, with its name unless the value is a word."""
    return one_line(value) if value[:1].isalpha() else one_line(f"{name.rsplit('.', 1)[-1]}={value}")
