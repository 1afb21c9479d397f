"""Run parameters and datasets: settings people choose or group by.

The whole plan is an artifact.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from perfexp.diagnosis.environment import fact_at
from perfexp.host.credentials import hide
from perfexp.records.record import LARGEST, Key, Record
from perfexp.records.sweep_record import Sweep
from perfexp.summaries.subject import one_line, subject
from perfexp.tracking import run_names
from perfexp.tracking.delivery import Dataset
from perfexp.tracking.descriptions import fact
from perfexp.tracking.store import NAME_LENGTH, PARAM_LENGTH, allowed, clean

#: Parameter limit per run: pages and comparisons list all of them.
MOST = 25
#: Configuration groups whose chosen option is a parameter.
_GROUPS = ("stopping", "data")
#: Keys that other parameters already show.
_SHOWN = (
    "model",
    "model.name",
    "algorithm",
    "mode",
    "precision",
    "batch_size",
    "input_size",
    "gpu",
    "execution",
    *_GROUPS,
)
#: Key groups that do not affect measurements.
_NOT_MEASURED = (
    "tracking",
    "output_dir",
    "speed_dir",
    "export",
    "compare",
    "stage",
    "quiet",
    "device_lock",
    "host_sharing",
    "timeout_seconds",
    "resume",
    "cluster",
    "hydra",
)
#: Longest dataset source that every store accepts, in characters.
_SOURCE_LENGTH = 16_000


def of_keys(record: Record, keys: Sequence[Key]) -> dict[str, str]:
    """Return parameters for some points: subject, sizes, device and libraries."""
    about = subject(record.plan, record.environment)
    named = {
        "model": about.model,
        "algorithm": about.algorithm,
        "mode": about.mode,
        "precision": about.precision,
        "execution": about.execution,
        "phase": ", ".join(_phases(keys)),
        "batch_size": _batch_sizes(keys),
        "input_size": ", ".join(dict.fromkeys(key.size_label for key in keys)),
        "device": about.device or "",
        "torch": fact(record.environment, "torch"),
        "cudnn": fact(record.environment, "cudnn"),
    }
    return _cleaned(named)


def _phases(keys: Sequence[Key]) -> dict[str, None]:
    return dict.fromkeys(key.phase for key in keys if key.is_timed)


def _batch_sizes(keys: Sequence[Key]) -> str:
    """Return the points' batch sizes, or an empty string while the largest batch is searched for.

    MLflow parameters never change, so an unknown batch size must stay unset.
    """
    sizes = dict.fromkeys(key.batch_size for key in keys)
    if LARGEST in sizes:
        return ""
    return ", ".join(map(str, sizes))


def of_run(record: Record) -> dict[str, str]:
    """Return a run's parameters, from its points, some group options and its command line."""
    texts = of_keys(record, [point.key for point in record.points])
    for group in _GROUPS:
        texts[group] = str(fact_at(record.plan, f"choices.{group}") or "")
    axes = record.sweep.axes if record.sweep else {}
    return _cleaned(texts | dict(_chosen(record, axes)), axes)


def of_sweep(sweep: Sweep, records: Sequence[Record]) -> dict[str, str]:
    """Return a sweep's parameters: its axes and its runs' parameters, each with all values."""
    children = sorted(sweep.children, key=lambda child: child.job)
    axes = _joined(child.axes for child in children)
    axes = {"model" if name == "model.name" else name: text for name, text in axes.items()}
    keys = list[Key]()
    for record in records:
        for point in record.points:
            keys.append(point.key)
    joined = _joined(map(of_run, records))
    return _cleaned({**joined, "batch_size": _batch_sizes(keys), **axes}, axes)


def _joined(of_runs: Iterable[Mapping[str, str]]) -> dict[str, str]:
    values: dict[str, dict[str, None]] = {}
    for texts in of_runs:
        for name, text in texts.items():
            values.setdefault(name, {})[text] = None
    return {name: ", ".join(texts) for name, texts in values.items()}


def _chosen(record: Record, axes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the command-line keys and values that no other parameter shows.

    For swept keys the value is this run's.
    """
    typed: dict[str, str] = {}
    for argument in record.command:
        if not argument.startswith("-"):
            name, _, text = argument.lstrip("+~").partition("=")
            typed[name] = text
    for name, text in {**typed, **axes}.items():
        if name not in _SHOWN and re.split("[./]", name)[0] not in _NOT_MEASURED:
            # the command of a sweep's run spells values the way Python does
            value = fact_at(record.plan, name)
            if value is not None and not isinstance(value, str | dict):
                text = json.dumps(value)
            yield name, text


def _cleaned(texts: Mapping[str, str], axes: Iterable[str] = ()) -> dict[str, str]:
    """Return at most `MOST` parameters in the form that MLflow accepts, sweep axes first."""
    cleaned = {_name(name): clean(text, PARAM_LENGTH) for name, text in texts.items() if text}
    first = set(map(_name, axes))
    return dict(islice(sorted(cleaned.items(), key=lambda item: item[0] not in first), MOST))


def _name(name: str) -> str:
    return allowed(name)[:NAME_LENGTH].strip(" .")


def datasets(record: Record, keys: Sequence[Key]) -> list[Dataset]:
    """Return the points' data, one dataset per phase.

    None if the plan has no data. Phases whose largest batch is being searched for are left out.
    """
    node = record.plan.get("data")
    if not isinstance(node, Mapping):
        return []
    kind = one_line(str(node.get("name") or fact_at(record.plan, "choices.data") or "data"))
    source = json.dumps(hide({**node}), default=str, sort_keys=True)
    found = []
    for phase in _phases(keys):
        of_phase = [key for key in keys if key.phase == phase]
        if any(key.batch_size == LARGEST for key in of_phase):
            continue
        name = clean(f"{kind} {run_names.shape(of_phase)}", NAME_LENGTH)
        identity = json.dumps([source, name, record.plan.get("seed")], default=str)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        context = "training" if phase == "train" else phase
        found.append(
            Dataset(name=name, digest=digest, source=clean(source, _SOURCE_LENGTH), context=context)
        )
    return found
