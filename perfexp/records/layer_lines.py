"""Layer lines: read a point's layer lines (`facts["layers"]["lines"]`).

A line is the device time of one layer in one pass, for example `forward` of `layer1.0.conv1`, as
`record.Layers` describes it. Layer tables, plots, rooflines and comparisons read lines with these
functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Point

#: Largest relative difference between layers and call that still lets you read them as shares.
READABLE = 0.25


def disagreement(*points: Point) -> Diagnostic | None:
    """Return the first diagnostic that makes layer times unreliable, so that only shares are shown.

    For example, the layers together take longer than the call without profiling. None if the times
    are reliable.
    """
    for point in points:
        for doubt in point.doubts:
            if doubt.rule.leaves_shares:
                return doubt
    return None


def seconds_of(line: Mapping[str, Any]) -> float:
    """Return a line's median device time in seconds per call, without the gap before it."""
    return float(line["seconds"]["median"])


def gap_of(line: Mapping[str, Any]) -> float:
    """Return the median idle time of the device before a line, in seconds per call."""
    return float(line["gap_seconds"]["median"])


def pass_of(line: Mapping[str, Any]) -> str:
    """Return a line's pass, for example `forward`; `unattributed` outside of modules."""
    if isinstance(line["key"], Mapping):
        return str(line["key"]["which"])
    return "unattributed"


def name_of(line: Mapping[str, Any]) -> str:
    """Return a line's name: the module path, for example `layer1.0.conv1`.

    The operation follows if the line is one call in the module's own code (`layer1.0.add`). Device
    time outside of modules is named after its operation alone.
    """
    kind, key = str(line["kind"]), line["key"]
    if not isinstance(key, Mapping) or not key.get("path"):
        return kind
    if key.get("operation") is not None:
        return f"{key['path']}.{kind}"
    return str(key["path"])
