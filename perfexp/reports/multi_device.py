"""Several: what ranks that worked together did, in a sentence for each point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.records import units
from perfexp.records.record import Point, Record
from perfexp.summaries.subject import label, varying
from perfexp.summaries.wording import percent

#: Figures that are told here begin with this.
PREFIX = "ranks/"
_SHARES = {"communication_share": "waiting for gradients", "scaling_efficiency": "scaling efficiency"}


def sentences(record: Record) -> list[str]:
    """Rates together and of each, and the shares with their intervals.

    Args:
        record: of any run.
    """
    told = [point for point in record.points if any(metric.name.startswith(PREFIX) for metric in point.metrics)]
    fields = varying(point.key for point in told)
    return [f"{f'{label(point.key, fields)}: ' if fields else ''}{', '.join(_parts(point))}" for point in told]


def _parts(point: Point) -> Iterator[str]:
    found = {metric.name.removeprefix(PREFIX): metric for metric in point.metrics if metric.name.startswith(PREFIX)}
    together = found.pop("samples_per_second", None)
    if together is not None:
        rate = f"{units.digits(together.value, 3)} samples/s" if together.value is not None else together.reason or ""
        gradients = " but through the gradients" if point.key.phase == "train" else ""
        yield f"together {rate} where no rank hears of another{gradients}"
    own = [metric.value for name, metric in found.items() if name not in _SHARES and metric.value is not None]
    if own:
        least, most = (units.digits(value, 3) for value in (min(own), max(own)))
        yield f"each {least if least == most else f'{least} … {most}'}"
    intervals: Mapping[str, Any] = point.facts.get("ranks") or {}
    for name, words in _SHARES.items():
        if name in found and found[name].value is not None:
            yield f"{words} {percent(found[name].value or 0.0)}{_ends(intervals.get(name) or {})}"


def _ends(interval: Mapping[str, Any]) -> str:
    low, high = interval.get("low"), interval.get("high")
    return " (no interval)" if low is None or high is None else f" ({percent(low)} … {percent(high)})"
