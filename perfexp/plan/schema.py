"""Schema: the typed settings of each option that selects code, generated from the signature of its `_target_`.

Hydra refuses misspelt keys and wrong types by these classes. Signatures are read from source text: importing several
of the targets would import torch, which takes seconds.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from perfexp.algorithms import Backend, Objective, OnUnsupported
from perfexp.devices import Pipeline
from perfexp.host.gpu_sheets import GpuFacts
from perfexp.models import Schedule, Stem
from perfexp.stopping import Steady


@dataclass(kw_only=True)
class Gpu:
    """The device to measure on.

    Attributes:
        match: regular expression that the name reported by the driver must contain.
        count: number of devices, each with a process (rank) and a batch of its own.
        port: port of this host at which the ranks meet; None for a free one.
    """

    _target_: str = MISSING
    name: str = MISSING
    match: str | None = None
    index: int = 0
    count: int = 1
    port: int | None = None
    facts: GpuFacts = field(default_factory=GpuFacts)


@dataclass(kw_only=True)
class ModeSettings:
    """The measured phases, each a node with the code of its calls."""

    name: str = MISSING
    train: Any = None
    inference: Any = None


@dataclass(kw_only=True)
class FakeFaults:
    """Faults of `perfexp.models.fake.FakeModel`, each for batches of more than this number of pixels."""

    oom: int | None = None
    fail: int | None = None
    lost: int | None = None
    hang: int | None = None
    kill: int | None = None
    crash: int | None = None


#: The class or function that each generated schema describes.
TARGETS = {
    "mode/train": "perfexp.modes.train.Train",
    "model/torchvision": "perfexp.models.torchvision.Torchvision",
    "model/timm": "perfexp.models.timm_models.Timm",
    "model/mmseg": "perfexp.models.mmseg.Mmseg",
    "model/fake": "perfexp.models.fake.FakeModel",
    "algorithm/forced": "perfexp.algorithms.forced.Forced",
    "profiler/nsys": "perfexp.profilers.nsys.Nsys",
    "profiler/ncu": "perfexp.profilers.ncu.Ncu",
    "profiler/torch": "perfexp.profilers.kineto.Torch",
    "profiler/nvtx": "perfexp.profilers.nvtx.Nvtx",
    "data/synthetic": "perfexp.data.synthetic.Synthetic",
    "data/images": "perfexp.data.images.Images",
    "data/cityscapes": "perfexp.data.cityscapes.Cityscapes",
    "data/cifar": "perfexp.data.cifar.Cifar",
    "stopping/precision": "perfexp.stopping.Precision",
    "stopping/fixed": "perfexp.stopping.Fixed",
    "sweep/point": "perfexp.sweep.Point",
    "sweep/sizes": "perfexp.sweep.Sizes",
    "sweep/batch": "perfexp.sweep.BatchSizes",
    "tracking/mlflow": "perfexp.tracking.mlflow_sink.MlflowSink",
}
#: Arguments that need another type than the signature's: a mapping takes new keys only if their names are fixed.
_FIXED_KEYS = {("model/fake", "faults"): FakeFaults}
#: Names in annotations and defaults. A `Mapping` has no type: Hydra adds no keys to a typed one.
_NAMES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, dict, Backend, Objective, OnUnsupported, Steady)},
    **{kind.__name__: kind for kind in (Pipeline, Schedule, Stem)},
    "Any": Any,
    "Mapping": Any,
    "Sequence": list,
}


@cache
def settings() -> tuple[tuple[str, str, type], ...]:
    """Return all settings classes, each with its config group and name."""
    generated = []
    for name, target in TARGETS.items():
        group, _, option = name.partition("/")
        generated.append((f"schema/{group}", option, _settings_class(name, target)))
    return ("schema", "gpu", Gpu), *generated


def _settings_class(name: str, target: str) -> type:
    fields: list[Any] = [("_target_", str, field(default=MISSING))]
    for argument, kind, default in _signature(target):
        if (fixed := _FIXED_KEYS.get((name, argument))) is not None:
            fields.append((argument, fixed, field(default_factory=fixed)))
        elif isinstance(default, list | dict):
            fields.append((argument, kind, field(default_factory=default.copy)))
        else:
            fields.append((argument, kind, field(default=default)))
    return make_dataclass(target.rpartition(".")[2], fields, kw_only=True)


def _signature(target: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and default of the keyword-only arguments of a class's constructor."""
    module, _, name = target.rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    [owner] = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    [constructor] = (node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    for argument, default in zip(constructor.args.kwonlyargs, constructor.args.kw_defaults, strict=True):
        assert argument.annotation is not None
        kind = _type(argument.annotation)
        value = MISSING if default is None else _value(default, module)
        if value is None and ast.unparse(argument.annotation).startswith("dict["):  # filled key by key
            kind, value = dict[str, Any], {}
        yield argument.arg, kind, list(value) if isinstance(value, tuple) else value


def _type(node: ast.expr) -> Any:
    match node:
        case ast.Constant(None):
            return None
        case ast.Name(name):
            return _NAMES[name]
        case ast.BinOp(left, ast.BitOr(), right):
            kind = _type(left)
            return Any if kind is Any else kind | _type(right)
        case ast.Subscript(ast.Name("Mapping")):
            return Any
        case ast.Subscript(origin, ast.Tuple(parts)):
            return _type(origin)[tuple(map(_type, parts))]
        case ast.Subscript(origin, part):
            return _type(origin)[_type(part)]
    raise TypeError(f"the schema cannot read the annotation {ast.unparse(node)}")


def _value(node: ast.expr, module: str) -> Any:
    """Evaluate a default: a literal, a member of an enum, or a constant, for which the module is imported."""
    with suppress(ValueError):
        return ast.literal_eval(node)
    owner, *names = ast.unparse(node).split(".")
    value = _NAMES[owner] if owner in _NAMES else getattr(importlib.import_module(module), owner)
    return reduce(getattr, names, value)
