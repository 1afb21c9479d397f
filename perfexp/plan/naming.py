"""Naming: what runs are called and in which folder each lies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path

from perfexp.devices import auto
from perfexp.host import gpu_sheets
from perfexp.host.files import safe_name
from perfexp.host.installation import conf_dir
from perfexp.plan.config import Plan

#: Where runs go that have no folder of their own.
_OUTPUTS = Path("outputs")
#: Axes whose value speaks for itself in a run's name.
_PLAIN_AXES = ("model", "model.name", "algorithm", "mode", "precision", "gpu", "experiment")
#: Axes that the folder of a stage's run names already.
_IN_STAGE_FOLDER = ("model", "model.name", "algorithm", "gpu", "experiment")


def run_name(parts: Sequence[str], axes: Mapping[str, str]) -> str:
    """A run's name: what varies first, because lists cut names off.

    Args:
        parts: model, algorithm and mode.
        axes: the overrides that vary in the sweep; empty for a single run.
    """
    varying = [value if axis in _PLAIN_AXES else f"{axis.rsplit('.', 1)[-1]}={value}" for axis, value in axes.items()]
    fixed = [part for part in parts if part not in axes.values()]
    return "-".join([*varying, *fixed])


def run_folder(plan: Plan, name: str) -> Path:
    """Where a single run's files go.

    Args:
        plan: of the run.
        name: of the run.
    """
    if plan.output_dir:
        return Path(plan.output_dir)
    if plan.stage:
        return _stage_folder(plan, {})
    now = datetime.now()
    wanted = _OUTPUTS / now.strftime("%Y-%m-%d") / safe_name(f"{now:%H-%M-%S}-{name}")
    return next(path for path in numbered(wanted) if not path.exists())


def child_folder(plan: Plan | None, sweep: Path, job: int, axes: Mapping[str, str]) -> Path:
    """Where the files of a sweep's run go.

    Args:
        plan: of the run; None where its configuration makes none.
        sweep: the sweep's folder.
        job: number of the run.
        axes: the overrides that vary, with the run's values.
    """
    if plan is not None and plan.stage:
        return _stage_folder(plan, axes)
    folders = plan.config_dirs() if plan is not None else [conf_dir()]
    values = [_device(value, 0, folders) if axis == "gpu" else value for axis, value in axes.items()]
    return sweep / safe_name("_".join([str(job), *values]))[:100]


def _stage_folder(plan: Plan, axes: Mapping[str, str]) -> Path:
    """`outputs/STAGE/MODEL_ALGORITHM_GPU`, and what else varies in a sweep."""
    others = [f"{axis}={value}" for axis, value in axes.items() if axis not in _IN_STAGE_FOLDER]
    parts = [
        plan.model_name,
        plan.algorithm_name,
        _device(plan.gpu_name, plan.gpu.get("index") or 0, plan.config_dirs()),
        *others,
    ]
    return _OUTPUTS / safe_name(plan.stage or "") / safe_name("_".join(parts))


def _device(gpu: str, index: int, folders: Sequence[Path]) -> str:
    """The option of the group `gpu`; where that is `auto`, the option or the product that it is going to be."""
    product = auto.foreseen(index) if gpu == "auto" else None
    return gpu_sheets.matching(gpu_sheets.read(folders), product) or product if product else gpu


def earlier_stages(stage: str | None, folder: Path) -> list[Path]:
    """Folders of the same combination in the stages before, by the numbers that their names begin with; the last first.

    Args:
        stage: of the run.
        folder: of the run.
    """
    number = _number_of(stage or "")
    if number is None or folder.parent.name != safe_name(stage or ""):
        return []
    others = {other: _number_of(other.name) for other in folder.parent.parent.iterdir()}
    before = [(found, other) for other, found in others.items() if found is not None and found < number]
    names = (folder.name, re.sub(r"-\d+$", "", folder.name))  # another plan's folder ends in a number
    candidates = [[other / name for name in names] for _, other in sorted(before, reverse=True)]
    return [path for paths in candidates if (path := next(filter(Path.is_dir, paths), None))]


def _number_of(stage: str) -> int | None:
    digits = re.match(r"\d+", stage)
    return int(digits[0]) if digits else None


def numbered(path: Path) -> Iterator[Path]:
    """A path, then with `-2`, `-3`, … at its end.

    Args:
        path: folder.
    """
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")
