"""Layer differences: which layers explain the difference of two calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfexp.comparison.document import LayerDifference
from perfexp.comparison.pairing import Measurement
from perfexp.records.layer_lines import DISAGREES, gap_of, name_of, pass_of, seconds_of
from perfexp.records.record import Point
from perfexp.roofline.kernel_names import short


@dataclass
class _Place:
    """A layer in one pass: seconds of a call, gaps included, and the kernels that it ran."""

    seconds: float = 0.0
    kernels: dict[str, None] = field(default_factory=dict)


def of_pair(side: str, point: str, baseline: Measurement, other: Measurement) -> list[LayerDifference]:
    """The layers of a pair, the largest contribution first; none unless both sides have layers, and are one model."""
    if baseline.features["model"] != other.features["model"]:
        return []  # layers of one name need not be the same layer
    profiled = [baseline.profiled, other.profiled]
    before, after = map(_places, profiled)
    if not (before and after):
        return []
    agree = not any(doubt.code == DISAGREES for point in profiled if point for doubt in point.doubts)
    total = sum(place.seconds for place in after.values()) - sum(place.seconds for place in before.values())
    found = [
        LayerDifference(
            side=side,
            point=point,
            layer=layer,
            which=which,
            baseline_seconds=(one := before.get((layer, which), _Place())).seconds,
            other_seconds=(two := after.get((layer, which), _Place())).seconds,
            share=(two.seconds - one.seconds) / total if total else 0.0,
            baseline_kernels=tuple(one.kernels),
            other_kernels=tuple(two.kernels),
            agrees=agree,
        )
        for layer, which in dict.fromkeys((*before, *after))
    ]
    return sorted(found, key=lambda line: -abs(line.other_seconds - line.baseline_seconds))


def _places(point: Point | None) -> dict[tuple[str, str], _Place]:
    """The layers of a point by name and pass."""
    places: dict[tuple[str, str], _Place] = {}
    for line in (point.facts.get("layers") or {}).get("lines", ()) if point else ():
        place = places.setdefault((name_of(line), pass_of(line)), _Place())
        place.seconds += seconds_of(line) + gap_of(line)
        place.kernels |= dict.fromkeys(map(short, line.get("kernels") or {}))
    return places
