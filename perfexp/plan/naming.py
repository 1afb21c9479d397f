"""Name runs, and choose their folders."""

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
#: Axes (keys that vary in a sweep) that a run's name shows by value only.
_PLAIN_AXES = ("model", "model.name", "algorithm", "mode", "precision", "gpu", "experiment")
#: Axes that the folder of a stage's run names already.
_IN_STAGE_FOLDER = ("model", "model.name", "algorithm", "gpu", "experiment")


def run_name(parts: Sequence[str], axes: Mapping[str, str]) -> str:
    """Return a run's name for MLflow and lists, such as `batch_size=8-resnet18-inference`.

    Values of sweep axes come first, since lists cut names off.

    Args:
        parts: other words, for example the model and the mode.
        axes: values of the sweep's axes in this run.
    """
    words = []
    for axis, value in axes.items():
        words.append(value if axis in _PLAIN_AXES else f"{axis.rsplit('.', 1)[-1]}={value}")
    return "-".join([*words, *(part for part in parts if part not in axes.values())])


def run_folder(plan: Plan, *more: str) -> Path:
    """Return a run's folder, for example `outputs/2026-11-28/212524-resnet18-train-b32-amp_fp16`.

    `output_dir` sets it; a run of a stage has `outputs/STAGE/MODEL_ALGORITHM_GPU`.

    Args:
        more: further words for its name.
    """
    if plan.output_dir:
        return Path(plan.output_dir)
    if plan.stage:
        return _stage_folder(plan, {})
    return _dated_folder(*_words(plan), *more)


def sweep_folder(axes: Iterable[str], kind: str = "sweep") -> Path:
    """Return a sweep's folder, for example `outputs/2026-11-28/212702-sweep-model-batch_size`.

    Args:
        axes: keys that vary.
    """
    return _dated_folder(kind, *(axis.rpartition(".")[2] for axis in axes))


def _dated_folder(*words: str) -> Path:
    """Return an unused `outputs/DATE/TIME-WORDS`."""
    now = datetime.now()
    first = _OUTPUTS / f"{now:%Y-%m-%d}" / safe_name("-".join([f"{now:%H%M%S}", *words]))[:100]
    return next(path for path in numbered(first) if not path.exists())


def _words(plan: Plan) -> Iterator[str]:
    """Yield words for a plan's settings, without the usual mode, precision and algorithm."""
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
    """Return the folder for one run of a sweep, for example `SWEEP/3-resnet18-b8`.

    `main` calls it for each run; a refused run gets one as well.

    Args:
        plan: the run's plan; None if its configuration is invalid.
        sweep: folder of the sweep.
        job: number of the run in the sweep.
        axes: values of the sweep's axes in this run.
    """
    if plan is not None and plan.stage:
        return _stage_folder(plan, axes)
    folders = plan.config_dirs() if plan is not None else [conf_dir()]
    values = list(axes.values())
    if "gpu" in axes:
        values[list(axes).index("gpu")] = _device(axes["gpu"], 0, folders)
    older = sweep / safe_name("_".join([str(job), *values]))[:100]
    if older.is_dir():  # a sweep of an older version goes on where it began
        return older
    words = [str(job)]
    for axis, value in zip(axes, values, strict=True):
        key = axis.rpartition(".")[2]
        if axis in _PLAIN_AXES:
            words.append(value)
        elif key == "batch_size":
            words.append(f"b{value.strip('[]')}")
        else:
            words.append(f"{key}-{value}")
    return sweep / safe_name("-".join(words))[:100]


def _stage_folder(plan: Plan, axes: Mapping[str, str]) -> Path:
    """Return `outputs/STAGE/MODEL_ALGORITHM_GPU`, with the values of other axes at its end."""
    others = [f"{axis}={value}" for axis, value in axes.items() if axis not in _IN_STAGE_FOLDER]
    device = _device(plan.gpu_name, plan.gpu.get("index") or 0, plan.config_dirs())
    parts = [plan.model_name, plan.algorithm_name, device, *others]
    return _OUTPUTS / safe_name(plan.stage or "") / safe_name("_".join(parts))


def _device(gpu: str, index: int, folders: Sequence[Path]) -> str:
    """Return a device's name for a folder: the `gpu` option.

    For `auto` it is the option that matches the predicted GPU, or the GPU's product name.
    """
    product = auto.predicted_name(index) if gpu == "auto" else None
    if not product:
        return gpu
    return gpu_sheets.matching(gpu_sheets.read(folders), product) or product


def earlier_stages(stage: str | None, folder: Path) -> list[Path]:
    """Return the folders with the same combination in earlier stages, latest stage first.

    Stages are numbered, such as `1_sanity` and `2_quick`. The driver repeats warnings from them.

    Args:
        folder: folder of this run.
    """
    number = _number_of(stage or "")
    if number is None or folder.parent.name != safe_name(stage or ""):
        return []
    before = []
    for other in folder.parent.parent.iterdir():
        earlier = _number_of(other.name)
        if earlier is not None and earlier < number:
            before.append((earlier, other))
    folders = []
    for _, other in sorted(before, reverse=True):
        # another plan's folder ends in a number
        for name in (folder.name, re.sub(r"-\d+$", "", folder.name)):
            if (other / name).is_dir():
                folders.append(other / name)
                break
    return folders


def _number_of(stage: str) -> int | None:
    """Return the number that a stage's name begins with; None without one."""
    digits = re.match(r"\d+", stage)
    if not digits:
        return None
    return int(digits[0])


def numbered(path: Path) -> Iterator[Path]:
    """Yield a path, then the path with `-2`, `-3`, … at its end.

    Folders and files that must not replace others take the first free path.
    """
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")
