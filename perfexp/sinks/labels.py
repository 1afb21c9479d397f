"""Labels: a record as the parameters and tags of a tracking run: texts to filter and to sort by."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perfexp.paths import safe_name
from perfexp.record import Record
from perfexp.sinks.figures import Figures
from perfexp.sinks.remarks import raised_doubts
from perfexp.sinks.store import without_password
from perfexp.sinks.subject import subject
from perfexp.summary import Row

#: Longer texts MLflow cuts without a word.
PARAM_LENGTH, TAG_LENGTH = 6_000, 8_000

_KEY_LENGTH = 250
_CUT = " … (cut)"
#: Tags of facts, and where in the environment they are found; the first place that has one counts.
_FACTS = {
    "device": ("device.name",),
    "driver": ("device.driver", "device.driver_version"),
    "cuda": ("device.cuda", "torch.cuda"),
    "cudnn": ("device.cudnn", "torch.cudnn"),
    "rocm": ("device.rocm", "torch.rocm"),
    "torch": ("packages.torch",),
    "python": ("python",),
    "host": ("host",),
    "git_commit": ("git.commit",),
    "mlflow.source.git.commit": ("git.commit",),
}


def params(record: Record) -> dict[str, str]:
    """The short axes (model, algorithm, mode, precision, batch_size, input_size) and the flattened plan.

    Args:
        record: of any run.
    """
    about = subject(record.plan)
    keys = [point.key for point in record.points]
    axes = {
        "model": about.model,
        "algorithm": about.algorithm,
        "mode": about.mode,
        "precision": about.precision,
        "batch_size": ", ".join(dict.fromkeys(str(key.batch_size) for key in keys)),
        "input_size": ", ".join(dict.fromkeys(key.size_label for key in keys)),
    }
    found = dict(_flattened(record.plan)) | {name: text for name, text in axes.items() if text}
    return {_key(name): clean(text, PARAM_LENGTH) for name, text in found.items()}


def tags(record: Record, known: Sequence[Row], figures: Figures) -> dict[str, str]:
    """What the run is, how it ended, what is doubtful, and on what machine it was measured.

    Args:
        record: of any run.
        known: its rows.
        figures: of the record.
    """
    statuses = Counter(point.status.value for point in record.points)
    found = {
        "perfexp.kind": "run",
        "perfexp.uid": uid(record.uid),
        "perfexp.point": record.plan_hash,
        "perfexp.version": record.perfexp_version,
        "perfexp.status": record.status.value,
        "perfexp.points": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "perfexp.doubts": ", ".join(raised.doubt.code for raised in raised_doubts(record, known)),
        "perfexp.dropped_metrics": "; ".join(f"{name}: {reason}" for name, reason in figures.dropped.items()),
        "perfexp.estimated_metrics": ", ".join(figures.estimated),
        "mlflow.source.name": "perfexp",
        **_facts(record.environment),
    }
    if record.sweep:
        found |= {"perfexp.sweep": uid(record.sweep.uid), "perfexp.job": str(record.sweep.job)}
    return {name: clean(text, TAG_LENGTH) for name, text in found.items() if text}


def uid(text: str) -> str:
    """A uid that can stand in a query, whatever the file that it comes from says.

    Args:
        text: a record's or a sweep's uid.
    """
    return safe_name(text)[:_KEY_LENGTH]


def clean(text: str, length: int) -> str:
    """A text that every store takes and that gives no password away; where it has to be cut it says so.

    Args:
        text: any text.
        length: at most so many characters.
    """
    text = without_password(text.replace("\0", "").encode(errors="replace").decode())
    return text if len(text) <= length else text[: length - len(_CUT)] + _CUT


def _flattened(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`model.name`, and the value as text, of every leaf."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _key(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_\-.: ]+", "_", name)[:_KEY_LENGTH].strip(" .") or "unnamed"


def _facts(environment: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _first(environment, places) for name, places in _FACTS.items()}
    device = environment.get("device")
    if isinstance(device, Mapping) and device.get("kind") != "cpu":
        found["gpu"] = found["device"]
    return {name: text for name, text in found.items() if text}


def _first(environment: Mapping[str, Any], places: Iterable[str]) -> str:
    """The first of these facts that is known, as text."""
    for place in places:
        node: Any = environment
        for name in place.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        if isinstance(node, (str, int, float)):
            return str(node)
    return ""
