"""Priors: how much the figures of a point are known to differ between processes, by their class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from perfexp.records.point_times import DEVICE_TIMES
from perfexp.records.record import Record
from perfexp.statistics.prior import Prior

#: Priors by kind of device and class, fitted by `benchmarks/process_components.py`.
TABLE = Path(__file__).with_name("process_priors.json")
#: Class of host times that the device does not limit.
HOST_BOUND = "host-bound"
#: Diagnostics of other work beside a measurement, which says nothing of the next one.
DISTURBED = frozenset({"busy_host", "shared_device", "shared_host", "shared_node", "pace_changed"})
#: Figures other than the host's times, by their class.
_CLASSES = dict.fromkeys((*DEVICE_TIMES, "cycles", "energy"), "device") | {"memory": "memory"}
#: Figures in proportion to a mean time.
_RATES = ("throughput", "samples_per_second", "epoch", "runtime")


def class_of(figure: str, bound_by: str | None) -> str:
    """Return the class of a figure, by the limit of its point's loop: the device (`gpu`), another, or unknown."""
    if known := _CLASSES.get(figure):
        return known
    if bound_by != "gpu":
        return HOST_BOUND
    return "rate" if figure in _RATES else "latency"


@cache
def shipped() -> dict[str, dict[str, Prior]]:
    """The priors of the package by kind of device, `cuda` or `cpu`."""
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, dict[str, Prior]])


def of_kind(kind: str | None) -> dict[str, Prior]:
    """The fitted priors for a kind of device: those of a CPU, or of another one."""
    return shipped()["cpu" if kind == "cpu" else "cuda"]


@cache
def of_any(kind: str | None) -> dict[str, Prior]:
    """The priors of a device of this kind of which nothing else is known."""
    return {name: prior.on([]) for name, prior in of_kind(kind).items()}


def of_record(record: Record) -> dict[str, Prior]:
    """The priors of a record by class: those that were known when it was measured, otherwise those of the package."""
    return record.priors or of_any(record.environment.get("device", {}).get("kind"))


def find(priors: Mapping[str, Prior], figure: str, bound_by: str | None, *, is_forked: bool) -> Prior | None:
    """Return the prior of a figure; a server is shared by processes that are forked from it."""
    name = class_of(figure, bound_by)
    prior = priors.get(name) or (priors.get("device") if name == "latency" else priors.get(HOST_BOUND))
    return prior if prior is None or is_forked else msgspec.structs.replace(prior, server=0.0)
