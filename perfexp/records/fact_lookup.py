"""Fact lookup: values of nested facts and plans by dotted place, and the device's vendor.

A record's facts and plan are nested dictionaries that may lack any entry.
"""

from __future__ import annotations

from typing import Any

#: Vendor by device kind. `cuda` with ROCm is AMD.
_VENDORS = {"cuda": "nvidia", "mps": "apple"}


def fact_at(facts: dict[str, Any], fact_path: str) -> Any:
    """Return the fact at a dotted place, such as `device.name`; None if there is none.

    Tables, comparisons and commands read records' environments and plans with it.
    """
    for name in fact_path.split("."):
        facts = facts.get(name) if isinstance(facts, dict) else None  # type: ignore[assignment]
    return facts


def vendor(environment: dict[str, Any]) -> str:
    """Return a record's device vendor: `nvidia`, `amd`, `apple`, or the device kind, such as `cpu`.

    `unknown` without a device. Names of vendor files contain it, and comparisons of TF32 settings
    depend on it.
    """
    if fact_at(environment, "device.rocm"):
        return "amd"
    kind = str(fact_at(environment, "device.kind") or "unknown")
    return _VENDORS.get(kind, kind)
