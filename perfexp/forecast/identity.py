"""Identity of the measured work of a plan: equal for plans whose times at one point are those of the same work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Nodes that determine the time of a point, beside the mode of its phase and the device.
_NODES = ("model", "algorithm", "precision", "execution", "data", "cache")
#: Settings that leave the time of a point alone: places of files, and the batch sizes, which its key has.
_WITHOUT_EFFECT = frozenset(
    {"root", "cache_dir", "weights", "weights_dir", "resume_from", "batch_size"}
)


def identity(plan: Mapping[str, Any], phase: str) -> str:
    """Return the SHA-256 of the settings of a resolved plan that determine the times of a phase."""
    mode = plan.get("mode")
    nodes = {name: plan.get(name) for name in _NODES} | {
        "mode": mode.get(phase) if isinstance(mode, Mapping) else mode
    }
    return hashlib.sha256(
        json.dumps(_effective(nodes), sort_keys=True, default=str).encode()
    ).hexdigest()


def _effective(node: Any) -> Any:
    """Leave out settings without effect, and those without a value, which older plans lack."""
    if not isinstance(node, Mapping):
        return node
    items = {
        str(name): _effective(value) for name, value in node.items() if name not in _WITHOUT_EFFECT
    }
    return {name: value for name, value in items.items() if value is not None}
