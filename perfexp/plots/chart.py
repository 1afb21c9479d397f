"""The content of a plot as plain data; `record_plots` fills it, `canvas` draws it."""

from __future__ import annotations

from dataclasses import dataclass

from perfexp.records.summary import Row
from perfexp.statistics import estimators


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that belong together.

    Attributes:
        label: text that distinguishes the line from others.
        x: positions.
        y: values with their intervals.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[estimators.Interval, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A fitted scaling model between the points of a line.

    Attributes:
        label: text of the legend, or empty.
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
        title: title of the vertical axis, without its unit.
        lines: lines in the panel.
        unit: unit of the values: `seconds`, `bytes`, `joules` or `samples/s`.
        curves: fitted models, behind the points.
    """

    title: str
    lines: tuple[Line, ...]
    unit: str = "samples/s"
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The words around a plot.

    Attributes:
        title: subject of the measurement.
        subtitle: kind of time, and device.
        footer: diagnostics.
    """

    title: str
    subtitle: str
    footer: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Figures over a numeric axis.

    Attributes:
        caption: words around it.
        axis: title of the horizontal axis.
        ticks: measured positions with their labels.
        panels: panels from top to bottom.
        gaps: positions of failures with their status.
    """

    caption: Caption
    axis: str
    ticks: dict[float, str]
    panels: tuple[Panel, ...]
    gaps: dict[float, str]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Times of unordered things.

    Attributes:
        caption: words around it.
        labels: one for each bar.
        values: seconds with their intervals; None for a missing bar.
        remarks: text in place of a missing bar.
    """

    caption: Caption
    labels: tuple[str, ...]
    values: tuple[estimators.Interval | None, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Strips:
    """Every sample of a few points, in the order of time.

    Attributes:
        caption: words around it.
        rows: label and row of each point, with a time and a series.
    """

    caption: Caption
    rows: tuple[tuple[str, Row], ...]
