"""Layer lines: read the lines of a point's layers (`facts["layers"]["lines"]`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Diagnostic of a point whose lines are shares only.
DISAGREES = "layers_disagree"
#: Beginning of its help where the layers are far from the call.
IGNORE = "ignore the layers"


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
