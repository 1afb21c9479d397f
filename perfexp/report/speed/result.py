"""A training's speed as the JSON of a speed file, that file's name, and the speeds in a record."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from perfexp.host.files import safe_name
from perfexp.records import priors
from perfexp.records.paths import RunPaths
from perfexp.records.point_times import loop_interval
from perfexp.records.record import Key, Point, Record, Status, without_replicate
from perfexp.records.subject import one_line
from perfexp.statistics import estimators
from perfexp.statistics.moderated import Repeats

#: Constants of the format that are in neither logs nor records; the mission is image segmentation.
MISSION = "图像分割"
UNIT = "images/s"
#: Longest part of a file name.
_LONGEST_NAME = 100
#: JSON keys in order.
KEYS = (
    *("log_file", "model_name", "mission_name", "direction_id", "run_mode", "index", "gpu_num"),
    *("FINAL_RESULT", "JOB_FAIL_FLAG", "UNIT"),
)


class Mode(StrEnum):
    """Run mode of a training: `sp` on a single GPU, `mp` on several with a process each."""

    sp = "sp"
    mp = "mp"

    @classmethod
    def of(cls, num_gpus: int) -> Mode:
        """Return the mode for this number of GPUs."""
        if num_gpus > 1:
            return cls.mp
        return cls.sp


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed of a training.

    Attributes:
        batch_size: images per GPU and step.
        images_per_second: total over all GPUs; 0 if the training failed.
        remark: how the value was obtained, or why there is none.
        label: part of the file name that distinguishes trainings with the same name, for example
            the input size; empty for a single training.
    """

    log_file: str
    model: str
    mode: Mode
    num_gpus: int
    batch_size: int
    precision: str
    images_per_second: float = 0.0
    interval: estimators.Interval | None = None
    failed: bool = False
    remark: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a speed that is not finite, or zero unless the training failed."""
        good = math.isfinite(self.images_per_second) and self.images_per_second >= 0
        if not good or (self.images_per_second == 0) != self.failed:
            raise ValueError(f"{self.images_per_second} images/s with failed={self.failed}")

    @property
    def file_name(self) -> str:
        """Return `MODEL_RUNMODE_bsN_PRECISION_GPUS_speed.json`, with the label after the model."""
        name = safe_name(self.model)[:_LONGEST_NAME]
        if self.label:
            name += f"_{safe_name(self.label)}"
        precision = safe_name(self.precision)[:_LONGEST_NAME]
        return f"{name}_{self.mode}_bs{self.batch_size}_{precision}_{self.num_gpus}_speed.json"

    def document(self) -> dict[str, Any]:
        """Return the JSON content by key, in the format's order."""
        values = (
            *(self.log_file, self.model, MISSION, 0, str(self.mode), 1, self.num_gpus),
            *(float(f"{self.images_per_second:.6g}"), int(self.failed), UNIT),
        )
        return dict(zip(KEYS, values, strict=True))

    def to_json(self) -> bytes:
        """Return the JSON in UTF-8, one key per line."""
        text = json.dumps(self.document(), ensure_ascii=False, indent=0, allow_nan=False)
        return text.encode("utf-8", errors="replace") + b"\n"

    def line(self, path: Path | None) -> str:
        """Return file path if there is one, figure and origin in one line, for the console."""
        figure = "failed" if self.failed else f"{self.images_per_second:.6g} images/s"
        return one_line(f"{path or 'no file'}: {figure} ({self.remark})")


_PHASE = "train"


def of_record(record: Record, folder: Path) -> list[Speed]:
    """Return the speed of each training point in a run, whatever its status.

    images/s = batch size per GPU × GPUs / mean time of a pipelined step. This matches
    `samples_per_second` and the speed from a log. A point's processes share a speed, unless the
    plan sets their number (`processes`). `perfexp speed` and a run that ends write them as speed
    files.

    Args:
        folder: the run's folder.
    """
    log_file = str(RunPaths(folder.resolve()).log)
    together: dict[Key, list[Point]] = defaultdict(list)
    for point in record.points:
        if point.key.phase == _PHASE:
            key = point.key if record.plan.get("processes") else without_replicate(point.key)
            together[key].append(point)
    speeds = [(key, _of_point(points, record, log_file)) for key, points in together.items()]
    keys_by_file: dict[str, list[Key]] = defaultdict(list)
    for key, speed in speeds:
        keys_by_file[speed.file_name].append(key)
    return [
        replace(speed, label=_label(key, keys_by_file[speed.file_name])) for key, speed in speeds
    ]


def _of_point(processes: Sequence[Point], record: Record, log_file: str) -> Speed:
    """Return the speed of one training point, failed if no process measured a time.

    Args:
        processes: results from the processes that measured the point.
        log_file: path that the speed file names.
    """
    point, plan = processes[0], record.plan
    num_gpus = _num_gpus(point.facts, plan)
    times = list[estimators.Interval]()
    for process in processes:
        time = loop_interval(process)
        if time and time.value > 0 and process.status is Status.OK:
            times.append(time)
    prior = priors.find(priors.of_record(record), processes, "samples_per_second")
    time = rate = None
    if times and point.status is Status.OK:
        time = Repeats.of(times, prior).interval
        rate = _rate(time, point.key.batch_size * num_gpus)
    if time is None or rate is None:
        remark = "no time was measured"
        if point.status is not Status.OK:
            remark = str(point.status)
        if point.error:
            remark += f": {point.error}"
    else:
        remark = f"mean {time.value:.4g} s for a step of {point.key.batch_size} × {num_gpus} images"
    return Speed(
        log_file=log_file,
        model=_model(plan),
        mode=Mode.of(num_gpus),
        num_gpus=num_gpus,
        batch_size=point.key.batch_size,
        precision=point.key.precision,
        images_per_second=rate.value if rate else 0.0,
        interval=rate,
        failed=rate is None,
        remark=remark,
    )


def _rate(time: estimators.Interval, images: int) -> estimators.Interval | None:
    """Return images/s with an interval; None for a time of zero.

    Its low end comes from the time's high end, and vice versa.

    Args:
        time: seconds per step.
        images: images per step over all GPUs.
    """
    rate = images / time.value if time.value > 0 else math.inf
    if not 0 < rate < math.inf:
        return None
    if time.low is None or time.high is None or time.low <= 0:
        return estimators.Interval(value=rate, low=None, high=None)
    return estimators.Interval(value=rate, low=images / time.high, high=images / time.low)


def _num_gpus(facts: Mapping[str, Any], plan: Mapping[str, Any]) -> int:
    """Return the number of GPUs that trained together; 1 if unknown.

    A measured number takes precedence over the requested number.
    """
    gpu = plan.get("gpu")
    for value in (facts.get("world_size"), gpu.get("count") if isinstance(gpu, Mapping) else None):
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
    return 1


def _model(plan: Mapping[str, Any]) -> str:
    """Return the model's name in a plan, otherwise the chosen YAML file; `unknown` without both."""
    node = plan.get("model")
    name = node.get("name") if isinstance(node, Mapping) else node
    return str(name or plan.get("choices", {}).get("model") or "unknown")


def _label(key: Key, alike: list[Key]) -> str:
    """Return what distinguishes a point from others with the same file name: size, replicate.

    Empty for a single point.
    """
    parts = []
    if len({other.input_size for other in alike}) > 1:
        parts.append(key.size_label)
    if len({other.replicate for other in alike}) > 1:
        parts.append(f"replicate{key.replicate}")
    return "_".join(parts)
