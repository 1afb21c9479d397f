"""Identify the work that a plan measures: plans with the same identity do the same work.

A prediction takes values only from records with the same identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Nodes that determine a point's time, besides its phase's mode and the device.
_NODES = ("model", "algorithm", "precision", "execution", "data", "cache")
#: Settings that do not change a point's time: file locations, and batch sizes, which are in its
#: key.
_WITHOUT_EFFECT = frozenset(
    {"root", "cache_dir", "weights", "weights_dir", "resume_from", "batch_size"}
)


def identity(plan: Mapping[str, Any], phase: str) -> str:
    """Return the SHA-256 of the settings in a resolved plan that determine a phase's times.

    Curves with the same identity can be joined, and can answer for a plan.
    """
    mode = plan.get("mode")
    nodes = {name: plan.get(name) for name in _NODES}
    nodes["mode"] = mode.get(phase) if isinstance(mode, Mapping) else mode
    text = json.dumps(_effective(nodes), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _effective(node: Any) -> Any:
    """Return settings without those that change no time.

    Settings without a value are left out as well, since older plans lack them.
    """
    if not isinstance(node, Mapping):
        return node
    settings = {}
    for name, value in node.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            settings[str(name)] = _effective(value)
    return settings
