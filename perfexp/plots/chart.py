"""The content of a plot as plain data; `record_plots` and `sweep_plots` fill it, `canvas` draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Series
from perfexp.statistics import blockwise, estimators

#: Colors that people of any color vision can tell apart, also from the grey; a test checks it.
COLORS = ("#0072B2", "#E69F00", "#882255", "#88CCEE", "#117733")
#: Color of whatever is not data: fits, gaps, the rest.
GREY = "#9a9a9a"
#: Values further apart than this factor get a logarithmic axis.
_LOG_FROM = 10.0
#: Units of shown values, the largest first.
_SCALES = {
    "seconds": ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")),
    "bytes": ((2**-30, "GiB"), (2**-20, "MiB"), (2**-10, "KiB")),
    "joules": ((1e-3, "kJ"), (1.0, "J"), (1e3, "mJ"), (1e6, "µJ")),
}


#: Meaning of hollow marks and dotted lines.
NO_INTERVAL = "no interval"


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that belong together; `label` distinguishes them from others.

    Attributes:
        color: position in `COLORS`, from 0; it starts again after the last.
        is_light: whether it stands behind the line of the same color, as the latency behind the device's time.
        estimated: positions whose values are estimated.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[estimators.Interval, ...]
    color: int = 0
    is_light: bool = False
    estimated: frozenset[float] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A fitted scaling model between the points of a line; `label` is for the legend."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Band:
    """Predictions with intervals beside the line whose label is `line`; `label` is for the legend."""

    label: str
    line: str
    x: tuple[float, ...]
    y: tuple[estimators.Interval, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes over the common horizontal one; the title of the vertical axis is without its unit.

    Attributes:
        odd: points to ring, by position and line's label, each with its label; an empty one has none.
        marks: positions of vertical lines with their labels.
    """

    title: str
    lines: tuple[Line, ...]
    unit: str = "samples/s"
    curves: tuple[Curve, ...] = ()
    bands: tuple[Band, ...] = ()
    odd: dict[tuple[float, str], str] = field(default_factory=dict)
    marks: dict[float, str] = field(default_factory=dict)

    @property
    def has_intervals(self) -> bool:
        """Whether a value without an interval is one that should have one: not a peak of the memory."""
        return self.unit != "bytes"

    def hollow(self, line: Line) -> list[bool]:
        """For each point of a line whether its marker is hollow."""
        return [
            x in line.estimated or (self.has_intervals and y.low is None) for x, y in zip(line.x, line.y, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The words around a plot: title and subtitle above, footer with the diagnostics below."""

    title: str
    subtitle: str
    footer: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels over a numeric axis with that title, with labels of measured positions and the status of failures.

    Attributes:
        is_doubling: whether the axis is logarithmic with base 2.
    """

    caption: Caption
    axis: str
    ticks: dict[float, str]
    panels: tuple[Panel, ...]
    gaps: dict[float, str]
    is_doubling: bool = False

    @property
    def hollow(self) -> str:
        """Meaning of hollow markers; empty without one."""
        lines = [(panel, line) for panel in self.panels for line in panel.lines]
        is_bare = any(panel.has_intervals and any(y.low is None for y in line.y) for panel, line in lines)
        is_estimated = any(line.estimated for _, line in lines)
        return " or ".join(filter(None, (NO_INTERVAL * is_bare, "estimated" * is_estimated)))


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The time of one run in seconds, or None with the reason in `text`.

    Attributes:
        text: words at the end of the bar.
        behind: time of a caller, drawn as a pale bar behind a device's time; None for none.
    """

    label: str
    value: estimators.Interval | None
    text: str
    behind: estimators.Interval | None = None

    @property
    def is_hollow(self) -> bool:
        """Whether the time has no interval."""
        return self.value is not None and self.value.low is None


@dataclass(frozen=True, kw_only=True)
class Facet:
    """One pair of axes with one kind of time; the bars by their group, whose name is empty for a single one."""

    title: str
    groups: dict[str, tuple[Bar, ...]]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Times of runs that differ in more than a number."""

    caption: Caption
    facets: tuple[Facet, ...]

    @property
    def hollow(self) -> str:
        """Meaning of hollow bars; empty without one."""
        bars = (bar for facet in self.facets for group in facet.groups.values() for bar in group)
        return NO_INTERVAL * any(bar.is_hollow for bar in bars)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """All samples of one time over all processes, with its statistics and the words for them."""

    name: str
    meaning: str
    series: Series
    time: blockwise.Summary
    text: str

    @property
    def is_dotted(self) -> bool:
        """Whether the median has no interval."""
        return self.time.median.low is None

    @property
    def center(self) -> str:
        """The figure that stands for all samples, whose blocks are processes."""
        return "mean of the processes' medians" if len(self.series.blocks) > 1 else "median"


@dataclass(frozen=True, kw_only=True)
class Strips:
    """All times of a few points, from zero; each point has a label and its times, the representative one first."""

    caption: Caption
    points: tuple[tuple[str, tuple[Taken, ...]], ...]


def centers(taken: Iterable[Taken]) -> str:
    """Return what the black lines through the samples are."""
    return " or ".join(dict.fromkeys(one.center for one in taken))


def dotted(taken: Iterable[Taken]) -> str:
    """Return the meaning of dotted medians; empty without one."""
    return NO_INTERVAL * any(one.is_dotted for one in taken)


def footer_of(diagnostics: Iterable[Diagnostic]) -> str:
    """The codes of warnings and errors, as a footer; empty without any."""
    codes = dict.fromkeys(diagnostic.code for diagnostic in diagnostics if not diagnostic.is_note)
    return f"warnings: {', '.join(codes)}" if codes else ""


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values span so much that their axis is logarithmic."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM


def unit_of(unit: str, values: Iterable[float]) -> tuple[float, str]:
    """A factor, and the name of the unit in which the largest value times it is at least 1."""
    most = max(values, default=0.0)
    return next(((factor, name) for factor, name in _SCALES.get(unit, ()) if most * factor >= 1), (1.0, unit))
