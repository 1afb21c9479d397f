"""The speed of each training in a record."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfexp.records import priors
from perfexp.records.paths import RunPaths
from perfexp.records.point_times import loop_interval
from perfexp.records.record import Key, Point, Record, Status, without_replicate
from perfexp.speed.result import Mode, Speed
from perfexp.statistics import estimators
from perfexp.statistics.moderated import Repeats

_PHASE = "train"


def of_record(record: Record, folder: Path) -> list[Speed]:
    """Return the speed of each training point in a run, whatever its status.

    images/s = batch size per GPU × GPUs / mean time of a pipelined step. This matches
    `samples_per_second` and the speed from a log. A point's processes share a speed, unless the
    plan sets their number (`processes`).

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
    alike: dict[str, list[Key]] = defaultdict(list)
    for key, speed in speeds:
        alike[speed.file_name].append(key)
    return [replace(speed, label=_label(key, alike[speed.file_name])) for key, speed in speeds]


def _of_point(processes: Sequence[Point], record: Record, log_file: str) -> Speed:
    point, plan = processes[0], record.plan
    num_gpus = _num_gpus(point.facts, plan)
    times = list[estimators.Interval]()
    for one in processes:
        time = loop_interval(one)
        if time and time.value > 0 and one.status is Status.OK:
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
    node = plan.get("model")
    name = node.get("name") if isinstance(node, Mapping) else node
    return str(name or plan.get("choices", {}).get("model") or "unknown")


def _label(key: Key, alike: list[Key]) -> str:
    parts = []
    if len({other.input_size for other in alike}) > 1:
        parts.append(key.size_label)
    if len({other.replicate for other in alike}) > 1:
        parts.append(f"replicate{key.replicate}")
    return "_".join(parts)
