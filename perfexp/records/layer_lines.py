"""Layer lines: read a point's layer lines (`facts["layers"]["lines"]`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Point

#: Largest relative difference between layers and call that still lets you read them as shares.
READABLE = 0.25


def disagreement(*points: Point) -> Diagnostic | None:
    """Return the diagnostic that reduces layer times to shares; None if the times are reliable."""
    for point in points:
        for doubt in point.doubts:
            if doubt.rule.leaves_shares:
                return doubt
    return None


def seconds_of(line: Mapping[str, Any]) -> float:
    """Return a line's median time, without the gap before it."""
    return float(line["seconds"]["median"])


def gap_of(line: Mapping[str, Any]) -> float:
    """Return the median gap before a line, in seconds."""
    return float(line["gap_seconds"]["median"])


def pass_of(line: Mapping[str, Any]) -> str:
    """Return a line's pass, for example `forward`; `unattributed` outside of modules."""
    if isinstance(line["key"], Mapping):
        return str(line["key"]["which"])
    return "unattributed"


def name_of(line: Mapping[str, Any]) -> str:
    """Return the module path, followed by the operation if the line is one call in its code."""
    kind, key = str(line["kind"]), line["key"]
    if not isinstance(key, Mapping) or not key.get("path"):
        return kind
    if key.get("operation") is not None:
        return f"{key['path']}.{kind}"
    return str(key["path"])
