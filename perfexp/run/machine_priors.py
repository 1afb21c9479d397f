"""How much processes differ on this device, learned from its earlier runs.

The variance between a run's processes is estimated poorly from two or three of them. Earlier runs
on the same device give a prior for it, by class of figures (for example `device` or `latency`),
which makes intervals more reliable. The figures are in the user's cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from perfexp.host.cache import JsonCache, cache_folder
from perfexp.records import priors
from perfexp.records.fact_lookup import fact_at
from perfexp.records.record import Record
from perfexp.records.summary import SINGLES, rows
from perfexp.statistics.prior import Component, Prior

#: A figure's class, its variance between processes, and that variance's degrees of freedom.
_Figure = tuple[str, Annotated[float, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(gt=0)]]
#: Limit on cached figures per class; the newest are used.
_MOST_FIGURES = 100
#: Device kinds that a machine has only once; other devices have a UUID.
_SINGLE = ("cpu", "mps", "fake")


def known_of(record: Record) -> dict[str, Prior]:
    """Return priors by class for a record's device, refined by earlier runs outside its sweep."""
    return known(_cache(record), fact_at(record.environment, "device.kind"), without=_group(record))


def add(record: Record) -> None:
    """Cache a record's figures for later runs, if several processes measured them.

    `Job.save` calls it.
    """
    if (cache := _cache(record)) and (shown := _shown(record)):
        cache.add(f"{_group(record)}/{record.uid}", shown)
        cache.remove(list(cache.entries())[:-_MOST_FIGURES])


def _group(record: Record) -> str:
    """Return the group of runs that are measured together and must not inform each other."""
    if record.sweep:
        return record.sweep.uid
    return record.uid


def _cache(record: Record) -> JsonCache | None:
    """Return the cache of a record's device; None if the device cannot be identified."""
    device = record.environment.get("device", {})
    if not (device.get("uuid") or device.get("kind") in _SINGLE):
        return None
    return cache_of(
        record.environment, str(device.get("uuid") or device["name"]), device.get("driver")
    )


def known(cache: JsonCache | None, kind: str | None, *, without: str = "") -> dict[str, Prior]:
    """Return priors by class for a kind of device, refined by one device's cached figures.

    The doctor shows them, and each record stores those that it used.

    Args:
        without: group of runs to ignore.
    """
    figures: dict[str, list[Component]] = {}
    for uid, shown in cache.entries().items() if cache else ():
        try:
            is_other = not without or not uid.startswith(f"{without}/")
            of_run = msgspec.convert(shown if is_other else [], list[_Figure])
        except msgspec.ValidationError:  # another version of perfexp wrote it
            continue
        for name, variance, degrees in of_run:
            figures.setdefault(name, []).append(Component(variance=variance, degrees=degrees))
    fitted = {}
    for name, prior in priors.of_kind(kind).items():
        fitted[name] = prior.on(figures.get(name, ())[-_MOST_FIGURES:])
    return fitted


def _shown(record: Record) -> list[_Figure]:
    """Return a record's figures that several processes measured without disturbance."""
    figures = []
    for row in rows(record):
        if any(doubt.rule.disturbs for doubt in (*row.doubts, *record.doubts)):
            continue
        for name, figure in row.figures.items():
            if name not in ("p95", "throughput", *SINGLES) and figure.own:
                measure = priors.class_of(name, row.bound_by)
                figures.append((measure, figure.own.variance, figure.own.degrees))
    return figures


def cache_of(facts: Mapping[str, Any], device: str, driver: str | None) -> JsonCache:
    """Return a device's cache.

    Another driver or torch version begins a new history.

    Args:
        facts: machine facts, as in a record's environment.
        device: GPU UUID, or CPU product name.
        driver: GPU driver version.
    """
    torch = fact_at(dict(facts), "packages.torch")
    return JsonCache(
        cache_folder("processes"), {"device": device, "driver": driver, "torch": torch}
    )
