"""Naming: the names and folders of runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path

from perfexp.devices import auto
from perfexp.host import gpu_sheets
from perfexp.host.files import safe_name
from perfexp.host.installation import conf_dir
from perfexp.plan.config import Plan
from perfexp.records.record import LARGEST, USUAL_PRECISION

#: Default folder of all runs.
_OUTPUTS = Path("outputs")
#: Axes that a run's name shows by value only.
_PLAIN_AXES = ("model", "model.name", "algorithm", "mode", "precision", "gpu", "experiment")
#: Axes that the folder of a stage's run names already.
_IN_STAGE_FOLDER = ("model", "model.name", "algorithm", "gpu", "experiment")


def run_name(parts: Sequence[str], axes: Mapping[str, str]) -> str:
    """Return the name of a run: values of its sweep's axes first, since lists cut names off, then the other parts."""
    varying = [
        value if axis in _PLAIN_AXES else f"{axis.rsplit('.', 1)[-1]}={value}"
        for axis, value in axes.items()
    ]
    fixed = [part for part in parts if part not in axes.values()]
    return "-".join([*varying, *fixed])


def run_folder(plan: Plan, *more: str) -> Path:
    """Return the folder of a single run: `outputs/2026-11-28/212524-resnet18-train-b32-amp_fp16`.

    Args:
        more: further words of its name.
    """
    if plan.output_dir:
        return Path(plan.output_dir)
    if plan.stage:
        return _stage_folder(plan, {})
    return _dated_folder(*_words(plan), *more)


def sweep_folder(axes: Iterable[str], kind: str = "sweep") -> Path:
    """Return the folder of a sweep: `outputs/2026-11-28/212702-sweep-model-batch_size`."""
    return _dated_folder(kind, *(axis.rpartition(".")[2] for axis in axes))


def _dated_folder(*words: str) -> Path:
    """Return an unused `outputs/DATE/TIME-WORDS`."""
    now = datetime.now()
    first = _OUTPUTS / f"{now:%Y-%m-%d}" / safe_name("-".join([f"{now:%H%M%S}", *words]))[:100]
    return next(path for path in numbered(first) if not path.exists())


def _words(plan: Plan) -> Iterator[str]:
    """Yield what a plan measures, without the usual mode, precision and algorithm."""
    yield plan.model_name
    if plan.mode.name != "inference":
        yield plan.mode.name
    keys = sorted(plan.keys(), key=lambda key: (key.batch_size == LARGEST, key.batch_size))
    if keys:
        yield "b" + "-".join(dict.fromkeys([keys[0].batch_label, keys[-1].batch_label]))
    if plan.precision.name != USUAL_PRECISION:
        yield plan.precision.name
    if plan.algorithm_name != "default":
        yield plan.algorithm_name


def child_folder(plan: Plan | None, sweep: Path, job: int, axes: Mapping[str, str]) -> Path:
    """Return the folder of a sweep's run; the plan is None if the configuration is invalid."""
    if plan is not None and plan.stage:
        return _stage_folder(plan, axes)
    folders = plan.config_dirs() if plan is not None else [conf_dir()]
    values = [
        _device(value, 0, folders) if axis == "gpu" else value for axis, value in axes.items()
    ]
    older = sweep / safe_name("_".join([str(job), *values]))[:100]
    if older.is_dir():  # a sweep of an older version goes on where it began
        return older
    words = [str(job)]
    for axis, value in zip(axes, values, strict=True):
        key = axis.rpartition(".")[2]
        if axis in _PLAIN_AXES:
            words.append(value)
        else:
            words.append(f"b{value.strip('[]')}" if key == "batch_size" else f"{key}-{value}")
    return sweep / safe_name("-".join(words))[:100]


def _stage_folder(plan: Plan, axes: Mapping[str, str]) -> Path:
    """Return `outputs/STAGE/MODEL_ALGORITHM_GPU`, with the values of other axes."""
    others = [f"{axis}={value}" for axis, value in axes.items() if axis not in _IN_STAGE_FOLDER]
    device = _device(plan.gpu_name, plan.gpu.get("index") or 0, plan.config_dirs())
    parts = [plan.model_name, plan.algorithm_name, device, *others]
    return _OUTPUTS / safe_name(plan.stage or "") / safe_name("_".join(parts))


def _device(gpu: str, index: int, folders: Sequence[Path]) -> str:
    """Return the option of the group `gpu`; for `auto` the option or product that is going to be used."""
    product = auto.predicted_name(index) if gpu == "auto" else None
    return gpu_sheets.matching(gpu_sheets.read(folders), product) or product if product else gpu


def earlier_stages(stage: str | None, folder: Path) -> list[Path]:
    """List folders of the same combination in earlier stages, by the numbers of the stages; latest first."""
    number = _number_of(stage or "")
    if number is None or folder.parent.name != safe_name(stage or ""):
        return []
    others = {other: _number_of(other.name) for other in folder.parent.parent.iterdir()}
    before = [
        (earlier, other)
        for other, earlier in others.items()
        if earlier is not None and earlier < number
    ]
    names = (
        folder.name,
        re.sub(r"-\d+$", "", folder.name),
    )  # another plan's folder ends in a number
    candidates = [[other / name for name in names] for _, other in sorted(before, reverse=True)]
    return [path for paths in candidates if (path := next(filter(Path.is_dir, paths), None))]


def _number_of(stage: str) -> int | None:
    digits = re.match(r"\d+", stage)
    return int(digits[0]) if digits else None


def numbered(path: Path) -> Iterator[Path]:
    """Yield a path, then the path with `-2`, `-3`, … at its end."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")
