"""Races: engines that computed a point's convolutions, and times in `algorithm=fastest` races.

An engine is one way to compute a convolution pass, such as a cuDNN algorithm. With
`algorithm=fastest`, a race times all engines for each layer and pass before the calls are timed,
and the fastest is chosen. Results are in a point's `facts["algorithm"]["layers"]`: each layer has
its `passes`, each pass the `selected` engine and the `seconds` by engine.
"""

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

#: Facts about a layer, and about one of its passes (forward, or a part of backward).
LayerPass = tuple[Mapping[str, Any], Mapping[str, Any]]


def passes(point: Point, group: str = "algorithm") -> Iterator[LayerPass]:
    """Yield facts about each layer and pass of a point; records of earlier versions have none.

    Args:
        group: `algorithm`, or `attention` for a model's shapes of attention.
    """
    for layer in (point.facts.get(group) or {}).get("layers", ()):
        for one_pass in layer.get("passes", ()):
            yield layer, one_pass


def saving_engines(point: Point) -> list[str]:
    """Return a point's engines that multiply less than a direct convolution: Winograd and FFT.

    Their FLOP rate and MFU, which count a direct convolution's FLOPs, are too high.
    """
    engines = dict.fromkeys(str(one_pass["selected"]) for _, one_pass in passes(point))
    return list(filter(_MULTIPLY_LESS.search, engines))


def is_own_choice(selected: object, status: object) -> bool:
    """Return whether torch's own, unobserved choice computed a pass as requested.

    Such passes count as covered, but not as proven.
    """
    return selected in BASELINES and status == "ok"


def own_choice_share(point: Point) -> float:
    """Return the share, 0 to 1, of convolution FLOPs computed by torch's own choice of algorithm.

    0 without convolutions.
    """
    return _flops_share(point, is_own_choice) or 0.0


def proven_share(point: Point) -> float | None:
    """Return the share, 0 to 1, of convolution FLOPs computed by a proven algorithm.

    None for older records, which do not list passes.
    """
    return _flops_share(
        point, lambda selected, status: status == "ok" and not is_own_choice(selected, status)
    )


def _flops_share(point: Point, condition: Callable[[object, object], bool]) -> float | None:
    """Return the share of FLOPs in passes that meet a condition on engine and status.

    None without FLOPs.
    """
    total = share = 0
    for _, one_pass in passes(point):
        flops = one_pass.get("flops") or 0
        total += flops
        if condition(one_pass.get("selected"), one_pass.get("status")):
            share += flops
    if total:
        return share / total
    return None


def timed_passes(point: Point, group: str = "algorithm") -> list[LayerPass]:
    """Return facts about each layer and pass that was raced; `group` as in `passes`.

    Reports and `promised` use only these.
    """
    return [(layer, one_pass) for layer, one_pass in passes(point, group) if one_pass["seconds"]]


def seconds_of(
    one_pass: Mapping[str, Any], engine: str, launching: str | None = None
) -> Interval | None:
    """Return an engine's seconds per call in the race; None if it did not take part.

    Records of earlier versions have no intervals.

    Args:
        one_pass: facts about a pass.
        launching: how the raced calls were launched, kernel by kernel or as a CUDA graph; by
            default as in the race that decided.
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
    """Return the seconds of all of a model's convolutions, each timed alone, by engine.

    Keys are `chosen` and each baseline that ran in all races. Equal convolutions share a race and
    its error; errors in different races are independent.
    """
    totals, races = {}, _distinct_races(timed)
    for name in ("chosen", *BASELINES):
        value, errors = 0.0, []
        for calls, race in races:
            time = seconds_of(race, str(race["selected"]) if name == "chosen" else name)
            if time is None:
                break
            value += calls * time.value
            errors.append(calls * _half_width(time))
        else:
            if races:
                totals[name] = _with_errors(value, errors)
    return totals


def promised(timed: Iterable[LayerPass]) -> dict[str, Interval]:
    """Return the speedup over each baseline that the races promise for the convolutions.

    It is the baseline's sum divided by the chosen engines' sum (see `sums`). Baselines that did not
    run in all races are left out.
    """
    layers = list(timed)
    totals, ratios = sums(layers), {}
    for baseline in BASELINES:
        if baseline not in totals:
            continue
        chosen = totals["chosen"].value
        ratio, errors = totals[baseline].value / chosen, []
        for calls, race in _distinct_races(layers):
            chosen_time = seconds_of(race, str(race["selected"]))
            baseline_time = seconds_of(race, baseline)
            assert chosen_time is not None and baseline_time is not None  # both have a sum
            # error propagation for the ratio of two independent times
            error = math.hypot(_half_width(baseline_time), ratio * _half_width(chosen_time))
            if race["selected"] == baseline:  # then both have the same error
                error = (1 - ratio) * _half_width(chosen_time)
            errors.append(calls * error / chosen)
        ratios[baseline] = _with_errors(ratio, errors)
    return ratios


def _distinct_races(timed: Iterable[LayerPass]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return each race's number of convolution calls in the model, and the facts about its pass.

    Equal convolutions have one race; its seconds identify it.
    """
    calls: Counter[Any] = Counter()
    races: dict[Any, Mapping[str, Any]] = {}
    for layer, one_pass in timed:
        key = (one_pass["which"], one_pass["selected"], tuple(one_pass["seconds"].items()))
        calls[key] += layer.get("calls") or 1
        races[key] = one_pass
    return [(calls[key], race) for key, race in races.items()]


def _half_width(interval: Interval) -> float:
    """Return half the width of an interval; NaN without an interval."""
    if interval.low is None or interval.high is None:
        return math.nan
    return (interval.high - interval.low) / 2


def _with_errors(value: float, errors: list[float]) -> Interval:
    """Return a value with its interval; independent errors add in squares.

    Without an interval if any error is NaN.

    Args:
        value: a sum, or a ratio of sums.
        errors: half-widths that single races contribute to the value's interval, in its unit.
    """
    half = math.hypot(*errors)
    if math.isnan(half):
        return Interval(value=value, low=None, high=None)
    return Interval(value=value, low=value - half, high=value + half)
