"""The content of a plot as plain data; `record_plots` fills it, `canvas` draws it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.summary import Row
from perfexp.statistics import estimators


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that belong together; `label` distinguishes them from others."""

    label: str
    x: tuple[float, ...]
    y: tuple[estimators.Interval, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A fitted scaling model between the points of the line whose label is `line`; `label` is for the legend."""

    label: str
    line: str
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
    """One pair of axes over the common horizontal one; the title of the vertical axis is without its unit."""

    title: str
    lines: tuple[Line, ...]
    unit: str = "samples/s"
    curves: tuple[Curve, ...] = ()
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Caption:
    """The words around a plot: title and subtitle above, footer with the diagnostics below."""

    title: str
    subtitle: str
    footer: str


def footer_of(diagnostics: Iterable[Diagnostic]) -> str:
    """The codes of warnings and errors, as a footer; empty without any."""
    codes = dict.fromkeys(diagnostic.code for diagnostic in diagnostics if not diagnostic.is_note)
    return f"warnings: {', '.join(codes)}" if codes else ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels over a numeric axis with that title, with labels of measured positions and the status of failures."""

    caption: Caption
    axis: str
    ticks: dict[float, str]
    panels: tuple[Panel, ...]
    gaps: dict[float, str]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Times of unordered things in seconds; a missing bar is None and has its remark instead."""

    caption: Caption
    labels: tuple[str, ...]
    values: tuple[estimators.Interval | None, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Strips:
    """Every sample of a few points in the order of time; each row has a label, a time and a series."""

    caption: Caption
    rows: tuple[tuple[str, Row], ...]
