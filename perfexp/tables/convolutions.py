"""The algorithm of each convolution of a model, as lines of a table and as sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfexp.records.record import Point, Record
from perfexp.records.units import format_seconds
from perfexp.summaries.subject import label, subject, varying
from perfexp.tables.csv_tables import Cell, Line

#: Engines whose times are compared with those of the chosen ones.
_BASELINES = ("default", "benchmark")


def lines(record: Record) -> list[Line]:
    """Return one line for each point, layer, shape and pass; none unless an algorithm was selected."""
    about = subject(record.plan, record.environment)
    found: list[Line] = []
    for point in record.points:
        for layer, each in _passes(point):
            shape = layer["input_shape"]
            found.append(
                {
                    "model": about.model,
                    "algorithm": about.algorithm,
                    "phase": point.key.phase,
                    "input_size": point.key.size_label,
                    "batch_size": point.key.batch_size,
                    "precision": point.key.precision,
                    "layer": layer["name"],
                    "input_shape": "×".join(map(str, shape)),
                    "dtype": layer["dtype"],
                    "pass": each["which"],
                    "requested": layer["requested"],
                    "selected": each["selected"],
                    "ran": each["ran"],
                    "status": each["status"],
                    "reason": each["reason"],
                    "math": layer["math"],
                    "flops": each["flops"],
                    "workspace_bytes": each["workspace_bytes"],
                    **_tried(each),
                    "kernels": "; ".join(each["kernels"]) or None,
                }
            )
    return found


def sentences(record: Record) -> list[str]:
    """Return the algorithms that were chosen layer by layer, with the times of choice and baselines."""
    points = [point for point in record.points if any(each["seconds"] for _, each in _passes(point))]
    fields = varying(point.key for point in points)
    return [f"{label(point.key, fields)}: {text}" if fields else text for point in points for text in _of(point)]


def _of(point: Point) -> Iterator[str]:
    passes = [each for _, each in _passes(point) if each["seconds"]]
    for which in dict.fromkeys(each["which"] for each in passes):
        own = [each for each in passes if each["which"] == which]
        chosen = Counter(each["selected"] for each in own)
        sums = {"chosen": sum(each["seconds"][each["selected"]] for each in own)}
        for baseline in _BASELINES:
            if all(baseline in each["seconds"] for each in own):
                sums[baseline] = sum(each["seconds"][baseline] for each in own)
        times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in sums.items())
        engines = ", ".join(f"{count} {engine}" for engine, count in chosen.most_common())
        since = sorted({each["kept_since"] for each in own if each.get("kept_since")})
        cached = f"; cached on {since[0]} (algorithm.reuse=false measures again)" if since else ""
        yield f"{which.replace('_', ' ')}: {engines}; sum of the layers alone: {times}{cached}"


def _passes(point: Point) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Layers with their passes; records of earlier versions have none."""
    for layer in point.facts.get("algorithm", {}).get("layers", ()):
        for each in layer.get("passes", ()):
            yield layer, each


def _tried(each: Mapping[str, Any]) -> dict[str, Cell]:
    """Times in milliseconds, and errors, of the candidates."""
    seconds, errors = each["seconds"], each["errors"]
    if not seconds:
        return {}
    names: Sequence[str] = sorted(errors, key=lambda name: (name not in _BASELINES, name))
    times = {f"{name}_ms": 1e3 * seconds[name] if name in seconds else None for name in names}
    return {
        "selected_ms": 1e3 * seconds[each["selected"]],
        "selected_error": errors.get(each["selected"]),
        **times,
    }
