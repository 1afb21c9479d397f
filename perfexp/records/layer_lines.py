"""Layer lines: read the lines of a point's layers (`facts["layers"]["lines"]`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Point

#: Relative difference of the layers from the call up to which they can be read as shares.
READABLE = 0.25


def disagreement(*points: Point) -> Diagnostic | None:
    """The diagnostic by which the layers of points are shares only; None where their times hold, too."""
    doubts = (doubt for point in points for doubt in point.doubts)
    return next((doubt for doubt in doubts if doubt.rule.leaves_shares), None)


def seconds_of(line: Mapping[str, Any]) -> float:
    """Median time of a line, without the gap before it."""
    return float(line["seconds"]["median"])


def gap_of(line: Mapping[str, Any]) -> float:
    """Median gap before a line, in seconds."""
    return float(line["gap_seconds"]["median"])


def pass_of(line: Mapping[str, Any]) -> str:
    """`forward`, …; `unattributed` outside of modules."""
    return str(line["key"]["which"]) if isinstance(line["key"], Mapping) else "unattributed"


def name_of(line: Mapping[str, Any]) -> str:
    """The module's path, followed by the operation that its code calls."""
    key = line["key"] if isinstance(line["key"], Mapping) else {}
    operation = line["kind"] if key.get("operation") is not None else None
    return ".".join(str(part) for part in (key.get("path"), operation) if part) or str(line["kind"])
