"""Races: engines that computed a point's convolutions, and times in `algorithm=fastest` races."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from perfexp.records.record import Point
from perfexp.statistics.estimators import Interval

#: Engines that stand for torch's own, unobserved choice; the chosen engines are compared with them.
BASELINES = ("default", "benchmark")
#: Name parts of engines that multiply less than a direct convolution.
_MULTIPLY_LESS = re.compile("winograd|fft")

#: Layer and pass.
LayerPass = tuple[Mapping[str, Any], Mapping[str, Any]]


def passes(point: Point, group: str = "algorithm") -> Iterator[LayerPass]:
    """Yield layers with their passes; records of earlier versions have none.

    Args:
        group: `algorithm`, or `attention` for a model's shapes of attention.
    """
    for layer in (point.facts.get(group) or {}).get("layers", ()):
        for one_pass in layer.get("passes", ()):
            yield layer, one_pass


def saving_engines(point: Point) -> list[str]:
    """Return a point's engines that multiply less than a direct convolution."""
    engines = dict.fromkeys(str(one_pass["selected"]) for _, one_pass in passes(point))
    return list(filter(_MULTIPLY_LESS.search, engines))


def is_own_choice(selected: object, status: object) -> bool:
    """Return whether torch's own, unobserved choice computed a pass as requested."""
    return selected in BASELINES and status == "ok"


def own_choice_share(point: Point) -> float:
    """Return the share of convolution FLOPs by torch's own choice; 0 without convolutions."""
    return _flops_share(point, is_own_choice) or 0.0


def proven_share(point: Point) -> float | None:
    """Return the share of convolution FLOPs by a proven algorithm; None for older records."""
    return _flops_share(
        point, lambda selected, status: status == "ok" and not is_own_choice(selected, status)
    )


def _flops_share(point: Point, condition: Callable[[object, object], bool]) -> float | None:
    total = known = 0
    for _, one_pass in passes(point):
        flops = one_pass.get("flops") or 0
        total += flops
        if condition(one_pass.get("selected"), one_pass.get("status")):
            known += flops
    if total:
        return known / total
    return None


def timed_passes(point: Point, group: str = "algorithm") -> list[LayerPass]:
    """Return layers with their raced passes; `group` as in `passes`."""
    return [each for each in passes(point, group) if each[1]["seconds"]]


def seconds_of(
    one_pass: Mapping[str, Any], engine: str, launching: str | None = None
) -> Interval | None:
    """Return an engine's time in the race; None if it did not take part.

    Args:
        launching: how the raced calls were launched; by default as in the race that decided.
    """
    raced = one_pass.get("races", {}).get(launching or one_pass.get("launching"), {}).get(engine)
    if raced is not None:
        return Interval(
            value=raced["seconds"], low=raced["seconds_low"], high=raced["seconds_high"]
        )
    value = one_pass["seconds"].get(engine)
    if launching or value is None:
        return None
    return Interval(value=value, low=None, high=None)


def sums(timed: Iterable[LayerPass]) -> dict[str, Interval]:
    """Return the summed time of all isolated convolution calls, by engine.

    Keys are `chosen` and each baseline that ran in all races. Equal convolutions share a race and
    its error; errors in different races are independent.
    """
    totals, races = {}, _distinct(timed)
    for name in ("chosen", *BASELINES):
        value, errors = 0.0, []
        for calls, race in races:
            time = seconds_of(race, _engine(race, name))
            if time is None:
                break
            value += calls * time.value
            errors.append(calls * _error(time))
        else:
            if races:
                totals[name] = _around(value, errors)
    return totals


def promised(timed: Iterable[LayerPass]) -> dict[str, Interval]:
    """Return each baseline's time divided by the chosen engines' time, from `sums`."""
    layers = list(timed)
    totals, ratios = sums(layers), {}
    for baseline in BASELINES:
        if baseline not in totals:
            continue
        chosen = totals["chosen"].value
        ratio, errors = totals[baseline].value / chosen, []
        for calls, race in _distinct(layers):
            own = seconds_of(race, _engine(race, "chosen"))
            other = seconds_of(race, baseline)
            assert own is not None and other is not None  # both have a sum
            error = math.hypot(_error(other), ratio * _error(own))
            if race["selected"] == baseline:  # then both have the same error
                error = (1 - ratio) * _error(own)
            errors.append(calls * error / chosen)
        ratios[baseline] = _around(ratio, errors)
    return ratios


def _distinct(timed: Iterable[LayerPass]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return each race's number of calls and pass."""
    calls: Counter[Any] = Counter()
    races: dict[Any, Mapping[str, Any]] = {}
    for layer, one_pass in timed:
        key = (one_pass["which"], one_pass["selected"], tuple(one_pass["seconds"].items()))
        calls[key] += layer.get("calls") or 1
        races[key] = one_pass
    return [(calls[key], race) for key, race in races.items()]


def _engine(race: Mapping[str, Any], name: str) -> str:
    if name == "chosen":
        return str(race["selected"])
    return name


def _error(interval: Interval) -> float:
    """Return half the width of an interval; NaN without an interval."""
    if interval.low is None or interval.high is None:
        return math.nan
    return (interval.high - interval.low) / 2


def _around(value: float, errors: list[float]) -> Interval:
    half = math.hypot(*errors)
    if math.isnan(half):
        return Interval(value=value, low=None, high=None)
    return Interval(value=value, low=value - half, high=value + half)
