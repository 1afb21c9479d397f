"""Layer differences: which layers explain the difference of two calls."""

from __future__ import annotations

from perfexp.comparison.document import LayerDifference
from perfexp.comparison.pairing import Measurement
from perfexp.records.layer_lines import gap_of, name_of, pass_of, seconds_of
from perfexp.records.record import layers_key


def of_pair(side: str, point: str, baseline: Measurement, other: Measurement) -> list[LayerDifference]:
    """The layers of a pair, the largest contribution first; none unless both sides have layers."""
    before, after = _seconds(baseline), _seconds(other)
    total = sum(after.values()) - sum(before.values())
    if not (before and after):
        return []
    found = [
        LayerDifference(
            side=side,
            point=point,
            layer=layer,
            which=which,
            baseline_seconds=(one := before.get((layer, which), 0.0)),
            other_seconds=(two := after.get((layer, which), 0.0)),
            share=(two - one) / total if total else 0.0,
        )
        for layer, which in dict.fromkeys((*before, *after))
    ]
    return sorted(found, key=lambda line: -abs(line.other_seconds - line.baseline_seconds))


def _seconds(one: Measurement) -> dict[tuple[str, str], float]:
    """Seconds of a call by layer and pass, gaps included."""
    key = layers_key(one.key)
    point = next((point for point in one.record.points if point.key == key), None)
    seconds: dict[tuple[str, str], float] = {}
    for line in (point.facts.get("layers") or {}).get("lines", ()) if point else ():
        place = name_of(line), pass_of(line)
        seconds[place] = seconds.get(place, 0.0) + seconds_of(line) + gap_of(line)
    return seconds
