"""Labels: a record or a sweep as the parameters, the tags and the status of a tracking run: what is filtered by."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from perfexp.host.credentials import mask
from perfexp.host.files import safe_name
from perfexp.records.record import Key, Record, Status
from perfexp.records.summary import Row
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.remarks import raised_diagnostics
from perfexp.summaries.subject import subject
from perfexp.tracking.mlflow_metrics import Figures

#: Longer texts MLflow cuts without a word.
PARAM_LENGTH, TAG_LENGTH = 6_000, 8_000
#: Longer names a database does not take.
NAME_LENGTH = 250

_CUT = " … (cut)"
#: Tags of facts, and where in the environment they are found; the first place that has one counts.
_FACTS = {
    "driver": ("device.driver", "device.driver_version"),
    "cuda": ("device.cuda", "torch.cuda"),
    "cudnn": ("device.cudnn", "torch.cudnn"),
    "rocm": ("device.rocm", "torch.rocm"),
    "torch": ("packages.torch",),
    "python": ("python",),
    "host": ("host",),
    "mlflow.source.git.commit": ("git.commit",),
}


def params(record: Record) -> dict[str, str]:
    """The short axes (see `axes`) and the flattened plan.

    Args:
        record: of any run.
    """
    known = axes(record, [point.key for point in record.points])
    found = known | dict(_flattened(record.plan)) | known
    return {_key(name): clean(text, PARAM_LENGTH) for name, text in found.items()}


def axes(record: Record, keys: Sequence[Key]) -> dict[str, str]:
    """What runs are grouped by: model, algorithm, mode, precision, phase, batch_size, input_size.

    Args:
        record: record of any run.
        keys: keys of all its points, or of some of them.
    """
    about = subject(record.plan)
    found = {
        "model": about.model,
        "algorithm": about.algorithm,
        "mode": about.mode,
        "precision": about.precision,
        "phase": ", ".join(dict.fromkeys(key.phase for key in keys if key.is_timed)),
        "batch_size": ", ".join(dict.fromkeys(str(key.batch_size) for key in keys)),
        "input_size": ", ".join(dict.fromkeys(key.size_label for key in keys)),
    }
    return {name: clean(text, PARAM_LENGTH) for name, text in found.items() if text}


def run_tags(record: Record, known: Sequence[Row], figures: Figures, skipped: Mapping[str, str]) -> dict[str, str]:
    """What the run is, how it ended, what is doubtful, and on what machine it was measured.

    Args:
        record: of any run.
        known: its rows.
        figures: of the record.
        skipped: why files are not sent, by their names.
    """
    found = {
        "perfexp.point": record.plan_hash,
        "perfexp.version": record.perfexp_version,
        "perfexp.status": record.status.value,
        "perfexp.skipped_files": _reasons(skipped),
    }
    return point_tags(record, known, figures) | {name: clean(text, TAG_LENGTH) for name, text in found.items() if text}


def point_tags(record: Record, known: Sequence[Row], figures: Figures) -> dict[str, str]:
    """How some points of a run ended, what is doubtful about them, and on what machine they were measured.

    Args:
        record: record of any run.
        known: rows of that record.
        figures: what is sent of these rows.
    """
    statuses = Counter(row.status.value for row in known)
    found = {
        "perfexp.points": ", ".join(f"{count} {status}" for status, count in statuses.items()),
        "perfexp.doubts": ", ".join(raised.worst.code for raised in raised_diagnostics(record, known)),
        "perfexp.dropped_metrics": _reasons(figures.dropped),
        "perfexp.estimated_metrics": ", ".join(figures.estimated),
        "mlflow.source.name": "perfexp",
        **_facts(record.environment),
    }
    if record.sweep:
        found |= {"perfexp.sweep": uid(record.sweep.uid), "perfexp.orchestration.job": str(record.sweep.job)}
    return {name: clean(text, TAG_LENGTH) for name, text in found.items() if text}


def sweep_tags(sweep: Sweep) -> dict[str, str]:
    """What a sweep is, and how many of its runs were to be, have ended well, and have not.

    Args:
        sweep: finished or not.
    """
    finished = sum(child.status is Status.OK for child in sweep.children)
    found = {
        "perfexp.expected": "" if sweep.jobs is None else str(sweep.jobs),
        "perfexp.finished": str(finished),
        "perfexp.failed": str(len(sweep.children) - finished),
        "mlflow.source.name": "perfexp",
    }
    return {name: clean(text, TAG_LENGTH) for name, text in found.items() if text}


def run_identity(text: str) -> dict[str, str]:
    """The tags that a run is found by.

    Args:
        text: uid of its record.
    """
    return {"perfexp.kind": "run", "perfexp.uid": uid(text)}


def point_identity(text: str, phase: str, batch_size: int) -> dict[str, str]:
    """The tags that the run of one phase and batch size is found by.

    Args:
        text: uid of its record.
        phase: phase of its points.
        batch_size: batch size of its points.
    """
    found = {"perfexp.kind": "point", "perfexp.uid": uid(text)}
    return found | {"perfexp.phase": uid(phase), "perfexp.batch_size": str(batch_size)}


def sweep_identity(text: str) -> dict[str, str]:
    """The tags that a sweep's own run is found by.

    Args:
        text: uid of the sweep.
    """
    return {"perfexp.kind": "sweep", "perfexp.sweep": uid(text)}


def run_status(statuses: Collection[Status]) -> str:
    """MLflow's status for what ended in these ways.

    FINISHED means that measuring it again would tell nothing new: something was measured, and what was not can't be
    (too little memory, a size that the model does not take). KILLED is incomplete because somebody ended it; FAILED is
    everything else, also a run without a single figure.

    Args:
        statuses: of a run and its points, or of a sweep's runs.
    """
    if {Status.INTERRUPTED, Status.KILLED} & set(statuses):
        return "KILLED"
    if Status.OK not in statuses or {Status.FAILED, Status.TIMEOUT} & set(statuses):
        return "FAILED"
    return "FINISHED"


def sweep_status(sweep: Sweep) -> str:
    """MLflow's status for a sweep: SCHEDULED while runs may still come; RUNNING would outlive one that is killed.

    Args:
        sweep: finished or not.
    """
    if sweep.jobs is not None and len(sweep.children) < sweep.jobs:
        return "KILLED" if sweep.ended else "SCHEDULED"
    return run_status([child.status for child in sweep.children])


def uid(text: str) -> str:
    """A uid that can stand in a query, whatever the file that it comes from says.

    Args:
        text: a record's or a sweep's uid.
    """
    return safe_name(text)[:NAME_LENGTH]


def clean(text: str, length: int) -> str:
    """A text that every store takes and that gives no password away; where it has to be cut it says so.

    Args:
        text: any text.
        length: at most so many characters.
    """
    text = mask(text.replace("\0", "").encode(errors="replace").decode())
    return text if len(text) <= length else text[: length - len(_CUT)] + _CUT


def _flattened(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`model.name`, and the value as text, of every leaf."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def _reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _key(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_\-.: ]+", "_", name)[:NAME_LENGTH].strip(" .") or "unnamed"


def _facts(environment: Mapping[str, Any]) -> dict[str, str]:
    found = {name: _first(environment, places) for name, places in _FACTS.items()}
    found["cpu" if _first(environment, ["device.kind"]) == "cpu" else "gpu"] = _first(environment, ["device.name"])
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
