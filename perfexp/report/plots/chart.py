"""Chart: plot contents as plain data, in SI units.

`record_plots` and `sweep_plots` fill these classes without matplotlib, and `drawing` draws them.
There are three kinds of plots: a `Chart` over a number, `Bars` of runs, and `Strips` of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perfexp.records import wording
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Series
from perfexp.statistics.blockwise import Summary
from perfexp.statistics.estimators import Interval

#: Colors that are distinct with any color vision, also from the gray; a test checks it.
COLORS = ("#0072B2", "#E69F00", "#882255", "#88CCEE", "#117733")
#: Color of everything but data, for example fits and gaps.
GREY = "#9a9a9a"
#: Values further apart than this factor get a logarithmic axis.
_LOG_FROM = 10.0
#: Units of shown values, largest first.
_SCALES = {
    "seconds": ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")),
    "bytes": ((2**-30, "GiB"), (2**-20, "MiB"), (2**-10, "KiB")),
    "joules": ((1e-3, "kJ"), (1.0, "J"), (1e3, "mJ"), (1e6, "µJ")),
}


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """Points that belong together.

    Attributes:
        label: text that distinguishes the line from others.
        x: positions on the horizontal axis.
        y: values with intervals, one per position.
        color: position in `COLORS`, from 0; it wraps around.
        is_light: whether the line is in the background of a line with the same color, such as
            latency behind device time.
        rough: reasons for hollow markers, one per point; empty text for a filled marker.
        odd: positions to ring, each with its text.
        predicted: predictions with intervals by position; they replace the line between points.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[Interval, ...]
    color: int = 0
    is_light: bool = False
    rough: tuple[str, ...] = ()
    odd: Mapping[float, str] = field(default_factory=dict)
    predicted: Mapping[float, Interval] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FittedCurve:
    """A fitted scaling model between a line's points, with a label for the legend."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A pair of axes over the common horizontal axis.

    Attributes:
        title: title of the vertical axis, without its unit.
        unit: SI unit of the values.
        heading: text above the axes, such as the model of a campaign.
        note: text beside the heading, such as the names of lines without a value.
        curves: fitted models behind the lines.
        marks: positions of vertical lines, with labels.
        best: the best line by position, shown above the axes: its color and whether it is alone,
            as opposed to one of several lines that are not shown to differ; None if undecided.
    """

    title: str
    lines: tuple[ChartLine, ...]
    unit: str = "samples/s"
    heading: str = ""
    note: str = ""
    curves: tuple[FittedCurve, ...] = ()
    marks: Mapping[float, str] = field(default_factory=dict)
    best: Mapping[float, tuple[int, bool] | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Caption:
    """Text around a plot: title and subtitle above, footer with diagnostics below."""

    title: str
    subtitle: str
    footer: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels over a numeric axis.

    Attributes:
        axis: title of the horizontal axis.
        ticks: labels of measured positions.
        gaps: status of failures by position.
        is_doubling: whether the axis is logarithmic with base 2.
        across: number of panels in a row.
    """

    caption: Caption
    axis: str
    ticks: Mapping[float, str]
    panels: tuple[Panel, ...]
    gaps: Mapping[float, str]
    is_doubling: bool = False
    across: int = 1


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A run's time in seconds; None with the reason in `text`.

    Attributes:
        text: text at the end of the bar.
        behind: the caller's time, drawn as a pale bar behind the device time; None for none.
    """

    label: str
    value: Interval | None
    text: str
    behind: Interval | None = None

    @property
    def is_hollow(self) -> bool:
        """Return whether the time has no useful interval."""
        return self.value is not None and (
            self.value.low is None or wording.says_nothing(self.value)
        )

    @property
    def end(self) -> float:
        """Return the largest value to draw, in seconds; 0 without a time.

        The longest bar of a facet sets the scale of its axis.
        """
        ends = [
            interval.high or interval.value for interval in (self.value, self.behind) if interval
        ]
        return max(ends, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Facet:
    """A pair of axes for one kind of time.

    Attributes:
        groups: bars by group name; a single group has an empty name.
    """

    title: str
    groups: Mapping[str, tuple[Bar, ...]]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Times of runs that differ in more than a number."""

    caption: Caption
    facets: tuple[Facet, ...]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """All samples of a time over all processes, with statistics and text.

    Attributes:
        name: title of the time.
        meaning: explanation in a few words.
        series: samples in seconds; each process is a block.
        time: statistics over all processes.
        text: median with its interval.
    """

    name: str
    meaning: str
    series: Series
    time: Summary
    text: str

    @property
    def is_dotted(self) -> bool:
        """Return whether the median has no useful interval."""
        return self.time.median.low is None or wording.says_nothing(self.time.median)

    @property
    def center(self) -> str:
        """Return the name of the statistic for all samples. Blocks are processes.

        Legends and titles of the strips name it.
        """
        if len(self.series.blocks) > 1:
            return "mean of the processes' medians"
        return "median"


@dataclass(frozen=True, kw_only=True)
class Strips:
    """All times at a few points, from zero.

    Attributes:
        points: label and times for each point, the representative time first.
    """

    caption: Caption
    points: tuple[tuple[str, tuple[Taken, ...]], ...]


def footer_of(diagnostics: Iterable[Diagnostic]) -> str:
    """Return the codes of warnings and errors as a footer; empty without any."""
    codes = dict.fromkeys(diagnostic.code for diagnostic in diagnostics if not diagnostic.is_note)
    if codes:
        return f"warnings: {', '.join(codes)}"
    return ""


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether positive values span more than a factor of 10, for a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM


def unit_of(unit: str, most: float) -> tuple[float, str]:
    """Return a factor from an SI unit and the name of the unit to show.

    In that unit the largest value is at least 1, for example `(1e3, "ms")` for 0.02 seconds.

    Args:
        unit: SI unit; units without other scales are returned unchanged.
        most: largest value in that unit.
    """
    for factor, name in _SCALES.get(unit, ()):
        if most * factor >= 1:
            return factor, name
    return 1.0, unit
