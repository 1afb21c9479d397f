"""Priors: known variation between processes, by class of figures.

A run repeats a point in a few processes only, too few to estimate how much processes vary. So the
interval of a figure combines the observed variance with a prior: the typical variance for figures
of this class, fitted on many runs. `Repeats` in `statistics.moderated` combines the two. Classes
are `latency`, `rate`, `device`, `memory` and `host-bound`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from perfexp.records import diagnostics
from perfexp.records.point_times import DEVICE_TIMES, is_forked, is_of_gpu
from perfexp.records.record import Point, Record
from perfexp.statistics.prior import Prior

#: Priors by device kind and class, fitted by `validation/process_components.py`.
TABLE = Path(__file__).with_name("process_priors.json")
#: Class for host times that the device does not limit.
HOST_BOUND = "host-bound"
#: Classes of figures that do not depend on the host's pace, by figure.
_CLASSES = dict.fromkeys((*DEVICE_TIMES, "cycles", "energy"), "device") | {"memory": "memory"}
#: Figures that are proportional to a mean time.
_RATES = ("throughput", "samples_per_second", "epoch", "runtime")


def class_of(figure: str, bound_by: str | None) -> str:
    """Return a figure's class, which selects its prior.

    Args:
        figure: figure name, a key of `Row.figures` such as `latency` or `energy`.
        bound_by: the loop's bottleneck, for example `gpu` for the device; None if unknown.
    """
    if figure_class := _CLASSES.get(figure):
        return figure_class
    if bound_by != "gpu":
        return HOST_BOUND
    if figure in _RATES:
        return "rate"
    return "latency"


@cache
def shipped() -> dict[str, dict[str, Prior]]:
    """Return the package's priors by device kind, `cuda` or `cpu`.

    The table is in process_priors.json.
    """
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, dict[str, Prior]])


def of_kind(kind: str | None) -> dict[str, Prior]:
    """Return the package's priors by class: those for `cpu`, or for CUDA with any other kind.

    `perfexp doctor` and runs refine them with what this machine's earlier runs show.
    """
    return shipped()["cpu" if kind == "cpu" else "cuda"]


@cache
def of_any(kind: str | None) -> dict[str, Prior]:
    """Return the priors by class for a device of this kind on a machine without measurements.

    They allow for the differences between machines.
    """
    return {name: prior.on([]) for name, prior in of_kind(kind).items()}


def of_record(record: Record) -> dict[str, Prior]:
    """Return a record's priors by class.

    These are the priors stored when it was measured, otherwise the package's priors. The analysis
    of a record combines them with what its processes show.
    """
    device = record.environment.get("device")
    kind = device.get("kind") if isinstance(device, dict) else None
    return record.priors or of_any("cpu" if kind == "cpu" else None)


def free_cores(record: Record) -> int:
    """Return how many cores a CPU run's threads leave free for other work; 0 if unknown.

    With several ranks the threads of all ranks are unknown.
    """
    session, cpu = record.environment.get("session"), record.environment.get("cpu")
    if "ranks" in record.environment or not (isinstance(session, dict) and isinstance(cpu, dict)):
        return 0
    threads, affinity, cores = session.get("threads"), cpu.get("affinity"), cpu.get("logical_cores")
    if isinstance(affinity, list) and affinity:
        cores = len(affinity)
    if not isinstance(cores, int) or not isinstance(threads, int):
        return 0
    return max(cores - threads, 0)


def find(
    priors: Mapping[str, Prior], points: Sequence[Point], figure: str, free: int = 0
) -> Prior | None:
    """Return the prior for a figure that a point's processes measured; None without a prior.

    Its `server` is the variance that all processes of the run share, so more of them do not lower
    it. Processes forked from one server share the server's. On a CPU, all processes also share the
    run's time span and the other work in it.

    Args:
        priors: priors by class, from `of_record` or `of_any`.
        points: results from each process that measured the point.
        figure: figure name, as in `class_of`.
        free: cores that the run's threads leave free for other work.
    """
    first = points[0]
    name = class_of(figure, first.facts.get("bound_by"))
    # records of earlier versions lack some classes; these are the nearest
    substitute = "device" if name == "latency" else HOST_BOUND
    prior = priors.get(name) or priors.get(substitute)
    if prior is None:
        return None
    shared = prior.server if is_forked(first) else 0.0
    if name == HOST_BOUND and not is_of_gpu(first):
        shared += statistics.fmean(_slowdown(point, free) for point in points) ** 2
    return msgspec.structs.replace(prior, server=shared)


def _slowdown(point: Point, free: int) -> float:
    """Return the logarithm of the factor that other work slows a process down by; 0 without any.

    A call waits for its slowest thread, which shares its core with other processes part of the
    time. At worst they take turns, so the factor is two.
    """
    cores = point.facts.get("other_cpu_cores")
    if not isinstance(cores, float) or not diagnostics.has(point.doubts, "busy_host"):
        return 0.0
    return math.log1p(min(max(cores - free, 0.0), 1.0))
