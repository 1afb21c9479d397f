"""Typed settings for options that select code, generated from their classes' signatures.

Hydra uses these classes to refuse misspelt keys and wrong types. Signatures are read from source
text: importing several targets would import torch, which takes seconds.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from perfexp.convolution import Backend, Objective, OnUnsupported
from perfexp.devices import Pipeline
from perfexp.host.gpu_sheets import GpuFacts
from perfexp.models import Backbone, ClipSize, Schedule, Stem
from perfexp.plan.sweep import Oom
from perfexp.records import old_names
from perfexp.timing.stopping import Steady


@dataclass(kw_only=True)
class Gpu:
    """The device to measure on."""

    _target_: str = MISSING
    name: str = MISSING
    match: str | None = None
    index: int = 0
    count: int = 1
    nodes: int | None = None
    port: int | None = None
    facts: GpuFacts = field(default_factory=GpuFacts)


@dataclass(kw_only=True)
class ClusterGpu:
    """SLURM requests for one GPU kind; settings here replace the cluster's.

    Attributes:
        constraint: node features, as in `sbatch --constraint`.
        gres: type in `--gres=TYPE:COUNT`, such as `gpu:l40s`; null for `gpu`, empty for none.
    """

    constraint: str | None = None
    gres: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None


@dataclass(kw_only=True)
class Cluster:
    """A site's SLURM: requests for every job, and the site's names for `gpu=KIND`."""

    name: str = MISSING
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None
    cpus_per_gpu: int | None = None
    memory: str | None = None
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    container: str | None = None
    scratch: str | None = None
    options: list[str] = field(default_factory=list)
    gpus: dict[str, ClusterGpu] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModeSettings:
    """The measured phases, each a node with the code for its calls."""

    name: str = MISSING
    train: Any = None
    inference: Any = None


@dataclass(kw_only=True)
class FakeFaults:
    """Faults in `perfexp.models.fake.FakeModel`, each for batches above this number of pixels."""

    oom: int | None = None
    fail: int | None = None
    lost: int | None = None
    hang: int | None = None
    kill: int | None = None
    crash: int | None = None


#: The class or function that each generated schema describes.
TARGETS = {
    "mode/train": "perfexp.measuring.modes.train.Train",
    "mode/inference": "perfexp.measuring.modes.inference.Inference",
    "model/torchvision": "perfexp.models.torchvision.Torchvision",
    "model/timm": "perfexp.models.timm_models.Timm",
    "model/hf": "perfexp.models.hf.HuggingFace",
    "model/mmseg": "perfexp.models.mmseg.Mmseg",
    "model/clip_gesture": "perfexp.models.clip_gesture.ClipGesture",
    "model/fake": "perfexp.models.fake.FakeModel",
    "algorithm/forced": "perfexp.convolution.forced.Forced",
    "profiler/nsys": "perfexp.measuring.profilers.nsys.Nsys",
    "profiler/ncu": "perfexp.measuring.profilers.ncu.Ncu",
    "profiler/torch": "perfexp.measuring.profilers.kineto.Torch",
    "profiler/nvtx": "perfexp.measuring.profilers.nvtx.Nvtx",
    "data/synthetic": "perfexp.data.synthetic.Synthetic",
    "data/images": "perfexp.data.images.Images",
    "data/cityscapes": "perfexp.data.cityscapes.Cityscapes",
    "data/cifar": "perfexp.data.cifar.Cifar",
    "data/clips": "perfexp.data.clips.Clips",
    "data/skeletons": "perfexp.data.skeletons.Skeletons",
    "stopping/precision": "perfexp.timing.stopping.Precision",
    "stopping/fixed": "perfexp.timing.stopping.Fixed",
    "sweep/point": "perfexp.plan.sweep.Point",
    "sweep/sizes": "perfexp.plan.sweep.Sizes",
    "sweep/batch": "perfexp.plan.sweep.BatchSizes",
    "sweep/sparse": "perfexp.plan.sparse.Sparse",
    "tracking/mlflow": "perfexp.report.tracking.mlflow_sink.MlflowSink",
}
#: Arguments that need another type than the signature's: Hydra adds keys to a mapping only if their
#: names are fixed.
_FIXED_KEYS = {("model/fake", "faults"): FakeFaults}
#: Names in annotations and defaults. A `Mapping` has no type: Hydra adds no keys to a typed one.
_NAMES: dict[str, Any] = {"Any": Any, "Mapping": Any, "Sequence": list}
_ENUMS = (Backbone, Backend, ClipSize, Objective, OnUnsupported, Oom, Pipeline, Schedule, Steady)
_NAMES |= {kind.__name__: kind for kind in (bool, int, float, str, dict, *_ENUMS, Stem)}


@cache
def settings() -> dict[str, type]:
    """Return the settings class for each schema, for example `gpu` or `model/timm`.

    `config.register` gives them to Hydra; `perfexp help keys` lists them.
    """
    generated = {name: _settings_class(name, target) for name, target in TARGETS.items()}
    return {"gpu": Gpu, "cluster": Cluster, **generated}


def with_earlier_names(name: str, node: type) -> type:
    """Return a settings class with earlier key names, too, which users' files may have.

    Each class is stored for Hydra this way.

    Args:
        name: schema name, such as `gpu` or `model/timm`.
        node: its settings class.
    """
    keys = {entry.name for entry in fields(node)}
    group = name.partition("/")[0]
    earlier: list[Any] = []
    for old, new in old_names.NAMES.items():
        owner, _, key = old.rpartition(".")
        if owner == group and new.removeprefix(f"{owner}.") in keys:
            earlier.append((key, Any, field(default=None)))
    if not earlier:
        return node
    return make_dataclass(node.__name__, earlier, bases=(node,), kw_only=True)


def _settings_class(name: str, target: str) -> type:
    """Return a dataclass with a field for each argument of a target.

    Args:
        name: schema name.
        target: dotted name of a class.
    """
    members: dict[str, Any] = {"_target_": (str, field(default=MISSING))}
    for argument, kind, default in _signature(target):
        if argument in members:
            continue
        if (fixed := _FIXED_KEYS.get((name, argument))) is not None:
            members[argument] = fixed, field(default_factory=fixed)
        elif isinstance(default, list | dict):
            members[argument] = kind, field(default_factory=default.copy)
        else:
            members[argument] = kind, field(default=default)
    of_class = [(argument, *kind) for argument, kind in members.items()]
    return make_dataclass(target.rpartition(".")[2], of_class, kw_only=True)


def _signature(target: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default for a constructor's keyword-only arguments.

    For a dataclass they are its fields, then those of its bases. If a name repeats, the first
    counts.
    """
    module, _, name = target.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    [owner] = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    constructors = [
        node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    arguments: list[tuple[str, ast.expr | None, ast.expr | None]] = []
    for constructor in constructors:
        pairs = zip(constructor.args.kwonlyargs, constructor.args.kw_defaults, strict=True)
        arguments += ((argument.arg, argument.annotation, default) for argument, default in pairs)
    if not constructors:
        named = (node for node in owner.body if isinstance(node, ast.AnnAssign))
        arguments = [(ast.unparse(node.target), node.annotation, node.value) for node in named]
    for argument, annotation, default in arguments:
        assert annotation is not None
        kind = _type(annotation)
        value = MISSING if default is None else _value(default, module)
        if value is None and ast.unparse(annotation).startswith("dict["):  # filled key by key
            kind, value = dict[str, Any], {}
        yield argument, kind, list(value) if isinstance(value, tuple) else value
    if not constructors:  # a dataclass inherits its base's fields
        origins: dict[str, str | None] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                origins |= {alias.name: node.module for alias in node.names}
        for base in map(ast.unparse, owner.bases):
            yield from _signature(f"{origins.get(base, module)}.{base}")


def _type(node: ast.expr) -> Any:
    """Return the type that an annotation in source text stands for.

    Raises:
        TypeError: the annotation has another form than those that settings use.
    """
    match node:
        case ast.Constant(None):
            return None
        case ast.Name(name):
            return _NAMES[name]
        case ast.BinOp(left, ast.BitOr(), right):
            kind = _type(left)
            if kind is Any:
                return Any
            return kind | _type(right)
        case ast.Subscript(ast.Name("Mapping")):
            return Any
        case ast.Subscript(origin, ast.Tuple(parts)):
            return _type(origin)[tuple(map(_type, parts))]
        case ast.Subscript(origin, part):
            return _type(origin)[_type(part)]
    raise TypeError(f"the schema cannot read the annotation {ast.unparse(node)}")


def _value(node: ast.expr, module: str) -> Any:
    """Evaluate a default in source text: a literal, an enum member, or a constant of its module."""
    with suppress(ValueError):
        return ast.literal_eval(node)
    owner, *names = ast.unparse(node).split(".")
    value = _NAMES[owner] if owner in _NAMES else getattr(importlib.import_module(module), owner)
    return reduce(getattr, names, value)
