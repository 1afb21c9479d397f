"""Layers: the time of a call by layer, as lines of a table and as a summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.records.record import Point, Record, is_layers, timed_key
from perfexp.records.units import format_seconds
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import label, one_line, subject, varying
from perfexp.tables.csv_tables import Line

#: Rows on console and report; the table has all.
_TOP = 7
_WORK = ("macs", "flops", "bytes_min", "activation_bytes", "parameters", "arithmetic_intensity", "flops_per_second")


def lines(record: Record) -> list[Line]:
    """Return one line for each point, row and pass; none unless layers were profiled."""
    about = subject(record.plan, record.environment)
    timed = {point.key: point for point in record.points}
    table_lines: list[Line] = []
    for point in points(record):
        key = timed_key(point.key)
        engines, joules = _engines(timed.get(key)), _joules(timed.get(key))
        for line in point.facts["layers"]["lines"]:
            place, geometry = line["key"] or {}, line["convolution"] or {}
            seconds, which = line["seconds"], place.get("which")
            table_lines.append(
                {
                    "layer": _name(line),
                    "in_channels": geometry.get("in_channels"),
                    "out_channels": geometry.get("out_channels"),
                    "kernel_size": _sizes(geometry.get("kernel")),
                    "mean_ms": seconds["mean"] * 1e3,
                    "percentage": line["share"] * 1e2,
                    "model": about.model,
                    "algorithm": about.algorithm,
                    "phase": key.phase,
                    "input_size": key.size_label,
                    "batch_size": key.batch_size,
                    "precision": key.precision,
                    "kind": line["kind"],
                    "pass": which,
                    "call": place.get("call"),
                    "operation": place.get("operation"),
                    "p50_ms": seconds["median"] * 1e3,
                    "p50_ci95_low_ms": _ms(seconds["low"]),
                    "p50_ci95_high_ms": _ms(seconds["high"]),
                    "gap_ms": line["gap_seconds"]["median"] * 1e3,
                    "energy_apportioned_j": joules * line["share"] if joules is not None else None,
                    **{name: line[name] for name in _WORK},
                    **{name: _sizes(geometry.get(name)) for name in ("stride", "padding", "dilation")},
                    "groups": geometry.get("groups"),
                    "transposed": geometry.get("transposed"),
                    "inputs": _shapes(line["inputs"]),
                    "outputs": _shapes(line["outputs"]),
                    "computed_by": engines.get((_path(line), which or "")),
                    "ran": line.get("ran"),
                    "kernels": "; ".join(f"{count:g} × {name}" for name, count in line["kernels"].items()) or None,
                }
            )
    return table_lines


def representative_point(record: Record) -> Point | None:
    """Return the point whose layers are shown: the largest that agrees with the call without profiling, or of all."""
    profiled = list(points(record))
    candidates = [point for point in profiled if agrees(point)] or profiled
    return max(candidates, key=lambda point: (point.key.pixels, point.key.batch_size), default=None)


def agrees(point: Point) -> bool:
    """Whether the profiled call took as long as the timed one."""
    return all(doubt.code != "layers_disagree" for doubt in point.doubts)


def table(record: Record) -> tuple[str, Grid] | None:
    """Return the rows with the largest share of a call, with a title; None unless layers were profiled."""
    point = representative_point(record)
    lines = [line for line in point.facts["layers"]["lines"] if line["share"] > 0] if point else []
    if point is None or not lines:
        return None
    most = sorted(lines, key=lambda line: -line["share"])[:_TOP]
    fields = varying(other.key for other in points(record))
    which = f" of {label(timed_key(point.key), fields)}" if fields else ""
    seconds = [line["seconds"]["median"] + line["gap_seconds"]["median"] for line in most]
    grid = Grid(
        columns=(
            Column(title="share", cells=tuple(f"{line['share'] * 1e2:.1f} %" for line in most)),
            Column(title="p50", cells=tuple(map(format_seconds, seconds))),
            Column(title="pass", cells=tuple(line["key"]["which"] if line["key"] else "" for line in most), prose=True),
            Column(title="kind", cells=tuple(one_line(line["kind"]) for line in most), prose=True),
            Column(title="layer", cells=tuple(one_line(_name(line)) for line in most), prose=True, is_key=True),
        )
    )
    return f"the top {len(most)} of {len(lines)} rows{which}, gaps before them included", grid


def points(record: Record) -> Iterator[Point]:
    """Yield the points with profiled layers."""
    return (point for point in record.points if is_layers(point.key) and "layers" in point.facts)


def _engines(timed: Point | None) -> dict[tuple[str, str], str]:
    """Algorithms of each convolution in each pass, if one was selected."""
    engines: dict[tuple[str, str], list[str]] = {}
    for layer in (timed.facts.get("algorithm") or {}).get("layers", []) if timed else []:
        for one_pass in layer["passes"]:
            which = "forward" if one_pass["which"] == "forward" else "backward"
            names = engines.setdefault((layer["name"], which), [])
            if one_pass["selected"] not in names:
                names.append(one_pass["selected"])
    return {place: ", ".join(names) for place, names in engines.items()}


def _joules(timed: Point | None) -> float | None:
    """Measured energy of a call."""
    metric = timed.metric("energy/per_call_joules") if timed else None
    return metric.value if metric else None


def _name(line: Mapping[str, Any]) -> str:
    """The module's path, followed by the operation that its code calls."""
    operation = line["key"] is not None and line["key"]["operation"] is not None
    return ".".join(filter(None, (_path(line), line["kind"] if operation else ""))) or str(line["kind"])


def _path(line: Mapping[str, Any]) -> str:
    key = line["key"]
    return str(key["path"] or "") if key else ""


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _sizes(values: Any) -> str | None:
    return "×".join(map(str, values)) if values else None


def _shapes(shapes: Any) -> str | None:
    return "; ".join("×".join(map(str, shape)) or "scalar" for shape in shapes) or None
