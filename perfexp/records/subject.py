"""Subject of a measurement in words: the plan's names and its points' keys.

Headlines, table columns, labels and messages name a run and its points with these functions, for
example `resnet50 · inference · 224 · batch 4`. A key identifies a point by phase, input size, batch
size, precision and replicate (process number).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from perfexp.records.number_formats import tf32_flags
from perfexp.records.record import LARGEST, USUAL_PRECISION, Key

#: Keys of `execution` in a plan that are named besides the compile mode, if they are set.
_SWITCHES = ("channels_last", "cuda_graph", "cudnn_benchmark", "deterministic")
_NUMBERS = ("threads", "interop_threads")
#: Settings that the execution text shows.
EXECUTION_KEYS = frozenset({"compile", *_SWITCHES, *_NUMBERS})
#: Float32 precisions in words, alone and with TF32 flags for matrix products and convolutions.
_FLOAT32 = {"torch": "float32"}
_FLAGS = {
    "torch": {
        (False, True): "float32, TF32 convolutions (PyTorch's default)",
        (True, True): "float32, TF32 convolutions and products",
        (True, False): "float32, TF32 products",
        (False, False): "float32, no TF32",
    },
    "fp32": {(False, False): "fp32 (no TF32)"},
}
#: Sweep axes for models.
MODEL_AXES = ("model", "model.name")
_KEY_FIELDS = ("phase", "input_size", "batch_size", "precision", "replicate")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of a plan, with the names that its user chose.

    Attributes:
        algorithm: how convolutions are computed; `+layers` if layers have algorithms of their own.
        number_format: precision in words, including the device's TF32 setting.
        execution: `eager`, or the settings that differ from it.
        device: device name, for example `2 × NVIDIA H200`, or None.
    """

    model: str
    algorithm: str
    mode: str
    precision: str
    number_format: str
    execution: str
    device: str | None

    def __str__(self) -> str:
        return " · ".join(
            (self.model, self.algorithm, self.mode, self.number_format, self.execution)
        )


def subject(plan: Mapping[str, Any], environment: Mapping[str, Any] | None = None) -> Subject:
    """Return the subject of a resolved plan, with the device from a record's environment.

    Without an environment, device and TF32 setting are unknown. Names that a stored plan lacks
    become `unknown`.
    """
    algorithm, facts = plan.get("algorithm"), environment or {}
    # layers may override the algorithm
    has_layers = isinstance(algorithm, Mapping) and bool(algorithm.get("layers"))
    precision = _node_name(plan, "precision")
    return Subject(
        model=_node_name(plan, "model"),
        algorithm=_node_name(plan, "algorithm") + ("+layers" if has_layers else ""),
        mode=_node_name(plan, "mode"),
        precision=precision,
        number_format=number_format(precision, [facts]),
        execution=_execution(plan.get("execution")),
        device=_devices(facts.get("device"), facts.get("ranks")),
    )


def headline(about: Subject, keys: Iterable[Key] = ()) -> str:
    """Return a run's first line: its subject, the keys' common size and batch, and its device.

    Algorithm and execution are left out if they are the defaults.
    """
    algorithm = "" if about.algorithm == "default" else about.algorithm
    execution = about.execution.removeprefix("eager").removeprefix(", ")
    # CPU names contain "(R)", "(TM)" and "Processor"
    device = re.sub(r"\((R|TM)\)| Processor\b", "", about.device or "")
    parts = (
        about.model,
        algorithm,
        about.mode,
        shape(keys),
        about.number_format,
        execution,
        device,
    )
    return " · ".join(filter(None, parts))


def number_format(precision: str, environments: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return a precision in words, for example `float32, TF32 convolutions (PyTorch's default)`.

    TF32 is only named if all environments agree.

    Args:
        precision: precision name in a plan, such as `torch`, `fp32` or `amp_bf16`.
        environments: records' environments, with torch's TF32 flags.
    """
    usual, by_flags = _FLOAT32.get(precision, precision), _FLAGS.get(precision, {})
    texts = set()
    for environment in environments:
        flags = tf32_flags(environment)
        texts.add(by_flags.get(flags, usual) if flags else usual)
    if len(texts) == 1:
        return texts.pop()
    return usual


def _devices(device: Any, ranks: Any) -> str | None:
    """Return a device name with the number of devices, for example `2 × NVIDIA H200 on 2 nodes`.

    None without a device name. Both arguments are entries of a record's environment.
    """
    if not isinstance(device, Mapping) or not device.get("name"):
        return None
    name = one_line(str(device["name"]))
    devices = ranks.get("devices") if isinstance(ranks, Mapping) else None
    if not isinstance(devices, list) or len(devices) < 2:
        return name
    hosts = ranks.get("hosts")
    nodes = f" on {len(hosts)} nodes" if isinstance(hosts, list) else ""
    if ranks.get("backend") == "gloo":  # processes that share a CPU
        return f"{name} ({len(devices)} ranks{nodes})"
    return f"{len(devices)} × {name}{nodes}"


def common_device(environments: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the device that all environments share; None for several kinds.

    Runs with different device counts are listed: `NVIDIA H200 or 2 × NVIDIA H200`.
    """
    names, devices = set(), set[str]()
    for environment in environments:
        device = environment.get("device")
        names.add(_devices(device, None))
        devices |= set(filter(None, [_devices(device, environment.get("ranks"))]))
    if len(names) != 1:
        return None
    return " or ".join(sorted(devices, key=lambda text: (len(text), text))) or None


def varying(keys: Iterable[Key]) -> tuple[str, ...]:
    """Return the names of the fields that differ between keys, such as `batch_size`."""
    # a generator can be read only once
    key_list = list(keys)
    fields = []
    for field in _KEY_FIELDS:
        if len(set(map(attrgetter(field), key_list))) > 1:
            fields.append(field)
    return tuple(fields)


def distinguishing(keys: Iterable[Key]) -> tuple[str, ...]:
    """Return the fields that distinguish rows; size and batch size if the keys are equal.

    Tables make a column for each, and texts name them.
    """
    return varying(keys) or ("input_size", "batch_size")


def constant(keys: Iterable[Key]) -> tuple[str, ...]:
    """Return the names of the fields that all keys share, for a header; never the replicate."""
    fields = varying(keys)
    return tuple(field for field in _KEY_FIELDS[:-1] if field not in fields)


def shape(keys: Iterable[Key]) -> str:
    """Return the keys' common input size and batch size: `224 · batch 4`; empty if both vary."""
    key_list = list(keys)
    if not key_list:
        return ""
    return label(key_list[0], [field for field in constant(key_list) if field.endswith("_size")])


def label(
    key: Key, fields: Sequence[str] = _KEY_FIELDS, environments: Collection[Mapping[str, Any]] = ()
) -> str:
    """Return a key's fields as words, for example `train · 256 · batch 4`.

    Args:
        fields: names of the fields to use. By default all, without a usual precision and without
            the first process's replicate.
        environments: environments of the key's runs, with torch's flags.
    """
    usual: dict[str, object] = {}
    if fields is _KEY_FIELDS:
        usual = {"replicate": 0, "precision": USUAL_PRECISION}
    words = []
    for field in _KEY_FIELDS:
        if field in fields and getattr(key, field) != usual.get(field, ""):
            words.append(field_text(key, field, environments, named=True))
    return " · ".join(words)


def field_text(
    key: Key, field: str, environments: Collection[Mapping[str, Any]] = (), *, named: bool = False
) -> str:
    """Return a key's field (`phase`, `input_size`, …) as a word.

    Args:
        named: whether to add a noun to a number, as in `batch 4`. A table column has it in its
            title instead.
    """
    if field == "input_size":
        return key.size_label
    if field == "batch_size" and key.batch_size == LARGEST:
        if named:
            return "largest batch"
        return key.batch_label
    if field == "precision":
        return number_format(key.precision, environments)
    if field == "phase" and key.phase == "ttfp":
        return "cold start"
    text = str(getattr(key, field))
    if named and field in ("batch_size", "replicate"):
        return f"{field.removesuffix('_size')} {text}"
    return text


def one_line(text: str) -> str:
    """Return a text without line breaks and control characters, safe in terminals and tables."""
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(text.split())


def _node_name(plan: Mapping[str, Any], group: str) -> str:
    """Return the name in a plan's config group, such as `model`; `unknown` without one.

    It is the node's own `name`, otherwise the YAML file that the user chose (`plan["choices"]`).
    """
    node, choices = plan.get(group), plan.get("choices")
    name = node.get("name") if isinstance(node, Mapping) else node
    choice = choices.get(group) if isinstance(choices, Mapping) else None
    return one_line(str(name or choice or "unknown"))


def _execution(node: object) -> str:
    """Return a plan's `execution` in words: `eager`, or `compile=default, cuda_graph`."""
    if not isinstance(node, Mapping):
        return one_line(str(node or "eager"))
    mode = node.get("compile")
    words = [f"compile={mode}" if mode else "eager"]
    words += filter(node.get, _SWITCHES)
    words += [f"{name}={node[name]}" for name in filter(node.get, _NUMBERS)]
    return ", ".join(map(one_line, words))
