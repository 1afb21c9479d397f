"""The content of a plot as plain data; `record_plots` and `sweep_plots` fill it, `drawing` draws it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Series
from perfexp.statistics.blockwise import Summary
from perfexp.statistics.estimators import Interval

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


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that belong together; `label` distinguishes them from others.

    Attributes:
        color: position in `COLORS`, from 0; it starts again after the last.
        is_light: whether it stands behind the line of the same color, as the latency behind the device's time.
        rough: reasons why markers are hollow, one per point; empty text for a filled marker.
        odd: positions to ring, each with its words.
        predicted: predictions with their intervals by position; they replace the line between the points.
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
class Curve:
    """A fitted scaling model between the points of a line; `label` is for the legend."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes over the common horizontal one; the title of the vertical axis is without its unit.

    Attributes:
        marks: positions of vertical lines with their labels.
    """

    title: str
    lines: tuple[Line, ...]
    unit: str = "samples/s"
    curves: tuple[Curve, ...] = ()
    marks: Mapping[float, str] = field(default_factory=dict)


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
    ticks: Mapping[float, str]
    panels: tuple[Panel, ...]
    gaps: Mapping[float, str]
    is_doubling: bool = False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The time of one run in seconds, or None with the reason in `text`.

    Attributes:
        text: words at the end of the bar.
        behind: time of a caller, drawn as a pale bar behind a device's time; None for none.
    """

    label: str
    value: Interval | None
    text: str
    behind: Interval | None = None

    @property
    def is_hollow(self) -> bool:
        """Whether the time has no interval."""
        return self.value is not None and self.value.low is None


@dataclass(frozen=True, kw_only=True)
class Facet:
    """One pair of axes with one kind of time; the bars by their group, whose name is empty for a single one."""

    title: str
    groups: Mapping[str, tuple[Bar, ...]]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Times of runs that differ in more than a number."""

    caption: Caption
    facets: tuple[Facet, ...]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """All samples of one time over all processes, with its statistics and the words for them."""

    name: str
    meaning: str
    series: Series
    time: Summary
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


def footer_of(diagnostics: Iterable[Diagnostic]) -> str:
    """The codes of warnings and errors, as a footer; empty without any."""
    codes = dict.fromkeys(diagnostic.code for diagnostic in diagnostics if not diagnostic.is_note)
    return f"warnings: {', '.join(codes)}" if codes else ""


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values span so much that their axis is logarithmic."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM


def unit_of(unit: str, most: float) -> tuple[float, str]:
    """A factor, and the name of the unit in which a value times it is at least 1."""
    return next(
        ((factor, name) for factor, name in _SCALES.get(unit, ()) if most * factor >= 1),
        (1.0, unit),
    )
