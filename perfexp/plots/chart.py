"""Chart: what a picture shows, as plain data; `pictures` fills it, `canvas` draws it."""

from __future__ import annotations

from dataclasses import dataclass

from perfexp.records.summary import Row
from perfexp.statistics import estimators


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that belong together.

    Attributes:
        label: what they have in common that others have not.
        x: positions.
        y: values with their intervals.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[estimators.Interval, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a law says between the points of a line.

    Attributes:
        label: what the legend says, or nothing.
        line: label of the line that it belongs to.
        x: positions.
        y: values.
    """

    label: str
    line: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes over the common horizontal one.

    Attributes:
        title: of the vertical axis, without its unit.
        lines: what is drawn.
        unit: of the values: `seconds`, `bytes`, `joules` or `samples/s`.
        curves: fitted laws, behind the points.
    """

    title: str
    lines: tuple[Line, ...]
    unit: str = "samples/s"
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The words around a picture.

    Attributes:
        title: what was measured.
        subtitle: which time, on which device.
        footer: codes of errors and warnings.
    """

    title: str
    subtitle: str
    footer: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Figures over a numeric axis.

    Attributes:
        caption: the words around it.
        axis: title of the horizontal axis.
        ticks: positions that were measured, with their labels.
        panels: from top to bottom.
        gaps: positions at which something failed, with how.
    """

    caption: Caption
    axis: str
    ticks: dict[float, str]
    panels: tuple[Panel, ...]
    gaps: dict[float, str]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Times of things that have no order.

    Attributes:
        caption: the words around it.
        labels: one for each bar.
        values: seconds with their intervals; None where there is none.
        remarks: what stands beside a bar that is missing.
    """

    caption: Caption
    labels: tuple[str, ...]
    values: tuple[estimators.Interval | None, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Strips:
    """Every sample of a few points, in the order of time.

    Attributes:
        caption: the words around it.
        rows: with a time, a series and a label each.
    """

    caption: Caption
    rows: tuple[tuple[str, Row], ...]
