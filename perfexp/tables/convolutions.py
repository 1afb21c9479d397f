"""The algorithm of each convolution of a model, as lines of a table and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.records.record import Point, Record
from perfexp.records.units import format_seconds
from perfexp.summaries.subject import label, subject, varying
from perfexp.tables.csv_tables import Cell, Line, columns_of, to_ms

#: Engines whose times are compared with those of the chosen ones.
_BASELINES = ("default", "benchmark")


def lines(record: Record) -> list[Line]:
    """Return one line for each point, layer, shape and pass; none unless an algorithm was selected."""
    about = subject(record.plan, record.environment)
    return [
        {
            **columns_of(about, point.key),
            "layer": layer["name"],
            "input_shape": "×".join(map(str, layer["input_shape"])),
            "dtype": layer["dtype"],
            "pass": one_pass["which"],
            "requested": layer["requested"],
            **{name: one_pass[name] for name in ("selected", "ran", "status", "reason")},
            "math": layer["math"],
            "flops": one_pass["flops"],
            "workspace_bytes": one_pass["workspace_bytes"],
            **_tried(one_pass),
            "kernels": "; ".join(one_pass["kernels"]) or None,
        }
        for point in record.points
        for layer, one_pass in passes(point)
    ]


def sentences(record: Record) -> list[str]:
    """Return the algorithms that were chosen layer by layer, with the times of choice and baselines."""
    points = [point for point in record.points if any(one_pass["seconds"] for _, one_pass in passes(point))]
    fields = varying(point.key for point in points)
    return [f"{label(point.key, fields)}: {text}" if fields else text for point in points for text in _of(point)]


def _of(point: Point) -> Iterator[str]:
    timed = [one_pass for _, one_pass in passes(point) if one_pass["seconds"]]
    for which in dict.fromkeys(one_pass["which"] for one_pass in timed):
        own = [one_pass for one_pass in timed if one_pass["which"] == which]
        chosen = Counter(one_pass["selected"] for one_pass in own)
        sums = {"chosen": sum(one_pass["seconds"][one_pass["selected"]] for one_pass in own)}
        for baseline in _BASELINES:
            if all(baseline in one_pass["seconds"] for one_pass in own):
                sums[baseline] = sum(one_pass["seconds"][baseline] for one_pass in own)
        times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in sums.items())
        engines = ", ".join(f"{count} {engine}" for engine, count in chosen.most_common())
        since = sorted({one_pass["kept_since"] for one_pass in own if one_pass.get("kept_since")})
        cached = f"; cached on {since[0]} (algorithm.reuse=false measures again)" if since else ""
        yield f"{which.replace('_', ' ')}: {engines}; sum of the layers alone: {times}{cached}"


def passes(point: Point) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield layers with their passes; records of earlier versions have none."""
    for layer in (point.facts.get("algorithm") or {}).get("layers", ()):
        for one_pass in layer.get("passes", ()):
            yield layer, one_pass


def _tried(one_pass: Mapping[str, Any]) -> dict[str, Cell]:
    seconds, errors = one_pass["seconds"], one_pass["errors"]
    if not seconds:
        return {}
    names = sorted(errors, key=lambda name: (name not in _BASELINES, name))
    selected = one_pass["selected"]
    times = {f"{name}_ms": to_ms(seconds.get(name)) for name in names}
    return {"selected_ms": to_ms(seconds[selected]), "selected_error": errors.get(selected), **times}
