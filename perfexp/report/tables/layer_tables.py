"""Layer tables: call time by layer, as lines, as a summary, and with the fastest algorithms.

A layer line has the device time of one layer in one pass (`records.layer_lines`). `lines` become
MODEL_ALGORITHM_layers.csv, `table` is in the report, and `perfexp export` adds the fastest
algorithm for each layer over several runs (`with_winners`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.records import races
from perfexp.records.analysis import Analysis
from perfexp.records.grid import Column, Grid
from perfexp.records.layer_lines import READABLE, disagreement, gap_of, name_of, seconds_of
from perfexp.records.quantities import CLOSURE, ENERGY
from perfexp.records.record import Point, Record, is_layers, timed_key
from perfexp.records.subject import label, varying
from perfexp.records.units import format_seconds
from perfexp.report.tables import layer_groups
from perfexp.report.tables.flat import Cell, Line, columns_of, to_ms

#: Rows on the console and in the report; the table has all rows.
_TOP = 7
#: Texts for layers with times left out.
_SHARES_ONLY = "shares only: the layers disagree with the call"
_UNUSABLE = "not usable: the layers are far from the call"
#: Columns that comparable lines share: everything but the algorithm.
_COMPARABLE = (
    *("device_name", "model", "execution", "phase", "input_size", "batch_size", "precision"),
    *("layer", "call", "operation", "pass"),
)
#: Status of passes that another algorithm than the selected one computed.
_NOT_OWN = ("fallback", "substituted")
_WORK = (
    "macs",
    "flops",
    "bytes_min",
    "activation_bytes",
    "parameters",
    "arithmetic_intensity",
    "flops_per_second",
)


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Line of layers before winners are added, and whether it can win.

    Attributes:
        is_leaf: whether it is a layer or an operation, rather than the model, a module around
            others, or outside of modules.
        is_own: whether its algorithm computed it. With `default` this is always true. Other
            algorithms must have computed all of its passes themselves.
    """

    line: Line
    is_leaf: bool
    is_own: bool


def lines(analysis: Analysis) -> list[Line]:
    """Return a line for each point, layer and pass; empty unless layers were profiled.

    The run writes them as MODEL_ALGORITHM_layers.csv.
    """
    return [row.line for row in rows(analysis)]


def rows(analysis: Analysis) -> list[LayerRow]:
    """Return a record's layer lines, with their role in comparing algorithms.

    `lines` writes them to CSV; `perfexp export` passes them to `with_winners`.
    """
    about = analysis.about
    points_by_key = {point.key: point for point in analysis.record.points}
    table_rows: list[LayerRow] = []
    for point in points(analysis.record):
        key = timed_key(point.key)
        point_columns: Line = columns_of(about, key)
        timed = points_by_key.get(key)
        energy, passes = timed.metric(ENERGY) if timed else None, _passes(timed)
        joules = energy.value if energy else None
        profiled = point.facts["layers"]["lines"]
        around = _paths_around(line["key"] or {} for line in profiled)
        for line in profiled:
            row_key = line["key"] or {}
            own_passes = passes.get((row_key.get("path"), row_key.get("which")), [])
            cells = _line(line, point_columns, own_passes, joules)
            is_own = bool(own_passes) and all(map(_is_own, own_passes))
            if about.algorithm == "default":
                is_own = True
            is_own = is_own and not _ran_another(cells)
            table_rows.append(
                LayerRow(line=cells, is_leaf=_is_leaf(row_key, around), is_own=is_own)
            )
    return table_rows


def _line(
    line: Mapping[str, Any],
    point_columns: Line,
    own_passes: Sequence[Mapping[str, Any]],
    joules: float | None,
) -> Line:
    """Return a layer's cells: times in ms, share in percent, work, shapes and algorithms.

    Args:
        line: layer line in the record.
        point_columns: columns that identify the point.
        own_passes: facts about the convolution passes that the layer computes.
        joules: energy per call, apportioned by share; None if unknown.
    """
    key, geometry, seconds = line["key"] or {}, line["convolution"] or {}, line["seconds"]
    engines = dict.fromkeys(one_pass["selected"] for one_pass in own_passes)
    kernels = (f"{count:g} × {name}" for name, count in line["kernels"].items())
    cells: Line = {
        "layer": name_of(line),
        "in_channels": geometry.get("in_channels"),
        "out_channels": geometry.get("out_channels"),
        "kernel_size": _sizes(geometry.get("kernel")),
        "mean_ms": seconds["mean"] * 1e3,
        "percentage": line["share"] * 1e2,
        **point_columns,
        "kind": line["kind"],
        "pass": key.get("which"),
        "call": key.get("call"),
        "operation": key.get("operation"),
        "p50_ms": seconds_of(line) * 1e3,
        "p50_ci95_low_ms": to_ms(seconds["low"]),
        "p50_ci95_high_ms": to_ms(seconds["high"]),
        "gap_ms": gap_of(line) * 1e3,
        "energy_apportioned_j": joules * line["share"] if joules is not None else None,
    }
    for name in _WORK:
        cells[name] = line[name]
    for name in ("stride", "padding", "dilation"):
        cells[name] = _sizes(geometry.get(name))
    return {
        **cells,
        "groups": geometry.get("groups"),
        "transposed": geometry.get("transposed"),
        "inputs": _shapes(line["inputs"]),
        "outputs": _shapes(line["outputs"]),
        "computed_by": ", ".join(engines) or None,
        "ran": line.get("ran"),
        "kernels": "; ".join(kernels) or None,
    }


def representative_point(record: Record) -> Point | None:
    """Return the point to show layers for.

    It is the largest point that agrees with the call without profiling, otherwise the largest of
    all. The layer table and the layer plot show one point only.
    """
    profiled = list(points(record))
    candidates = [point for point in profiled if disagreement(point) is None] or profiled
    return max(candidates, key=lambda point: (point.key.pixels, point.key.batch_size), default=None)


def doubt_text(point: Point) -> str:
    """Return how usable a point's layers are, in a few words; empty if their times are reliable.

    Titles of layer tables and plots end with it.
    """
    if disagreement(point) is None:
        return ""
    closure = point.metric(CLOSURE)
    is_far = closure is not None and abs(closure.value or 0.0) > READABLE
    if is_far and point.facts["layers"]["method"] != "unheld":
        return _UNUSABLE
    return _SHARES_ONLY


def table(record: Record) -> tuple[str, Grid] | None:
    """Return the layers with the largest share of a call, with identical layers combined.

    Returns:
        title and table; None unless layers were profiled.
    """
    point = representative_point(record)
    layers = layer_groups.merged(point) if point else []
    if point is None or not layers:
        return None
    call_time = layer_groups.call_seconds(point)
    columns = [
        Column("share"),
        Column("time"),
        Column("pass", prose=True),
        Column("kind", prose=True),
        Column("layer", prose=True, is_key=True),
    ]
    cells = []
    for layer in layers[:_TOP]:
        share, time = f"{layer.share * 1e2:.1f} %", format_seconds(layer.share * call_time)
        cells.append((share, time, layer.which, layer.kind, layer.label))
    grid = Grid.of_cells(columns, cells)
    if disagreement(point) is not None:
        del columns[1]
    title = f"the top {len(cells)} of {len(layers)} rows"
    if fields := varying(other.key for other in points(record)):
        title += f" of {label(timed_key(point.key), fields)}"
    basis = doubt_text(point) or f"100 % is a call of {format_seconds(call_time)}"
    return f"{title}, identical ones together, gaps before them included; {basis}", grid


def points(record: Record) -> Iterator[Point]:
    """Yield the points with profiled layers."""
    return (point for point in record.points if is_layers(point.key) and "layers" in point.facts)


def _passes(timed: Point | None) -> dict[tuple[str | None, str | None], list[Mapping[str, Any]]]:
    """Return facts about convolution passes by layer and `forward` or `backward`; empty for None.

    Layer lines do not tell the two parts of a backward pass apart.
    """
    passes: dict[tuple[str | None, str | None], list[Mapping[str, Any]]] = defaultdict(list)
    for layer, one_pass in races.passes(timed) if timed else ():
        direction = "forward" if one_pass["which"] == "forward" else "backward"
        passes[layer["name"], direction].append(one_pass)
    return passes


def _sizes(values: Any) -> str | None:
    """Return sizes as text, for example `3×3`; None without any."""
    return "×".join(map(str, values or ())) or None


def _shapes(shapes: Any) -> str | None:
    """Return tensor shapes as text, for example `8×64×56×56; scalar`; None without any."""
    return "; ".join("×".join(map(str, shape)) or "scalar" for shape in shapes) or None


def _paths_around(keys: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the paths of modules that contain other lines: their own line is not a layer."""
    paths: set[str] = set()
    for key in keys:
        path = key.get("path")
        if path is not None and key["operation"] is not None:
            paths.add(path)
        while path:
            path = path.rpartition(".")[0]
            paths.add(path)
    return paths


def _is_leaf(key: Mapping[str, Any], around: Collection[str]) -> bool:
    """Return whether a line is a layer or an operation, not a module around others."""
    return key.get("path") is not None and (
        key["operation"] is not None or key["path"] not in around
    )


def _is_own(one_pass: Mapping[str, Any]) -> bool:
    """Return whether the selected algorithm, not a substitute or torch's choice, ran a pass."""
    return one_pass.get("status") not in _NOT_OWN and one_pass["selected"] != "default"


def _ran_another(line: Line) -> bool:
    """Return whether a row's kernels belong to another algorithm than requested from cuDNN."""
    requested, ran = str(line["computed_by"]).rpartition(".")[2], line["ran"]
    return ran is not None and requested not in str(ran).split(" or ")


def with_winners(competing: Sequence[LayerRow]) -> list[Line]:
    """Return layer lines with the fastest algorithm for the same layer, and the time ratio to it.

    Rows that another algorithm computed neither win nor are compared. Only a layer or an operation
    has a winner, and only if several algorithms were measured. `perfexp export` calls it for the
    layers of all exported runs.

    Args:
        competing: rows with device and execution in their lines.
    """
    fastest: dict[tuple[Cell, ...], LayerRow] = {}
    algorithms: dict[tuple[Cell, ...], set[Cell]] = defaultdict(set)
    for row in sorted(competing, key=_milliseconds):
        layer = _comparable(row.line)
        algorithms[layer].add(row.line["algorithm"])
        if row.is_leaf and row.is_own and _milliseconds(row):
            fastest.setdefault(layer, row)
    lines_with_winners: list[Line] = []
    for row in competing:
        layer = _comparable(row.line)
        winner: Line = {"fastest_algorithm": None, "p50_over_fastest": None}
        if row.is_leaf and layer in fastest and len(algorithms[layer]) > 1:
            best = fastest[layer]
            winner["fastest_algorithm"] = best.line["algorithm"]
            if row.is_own and _milliseconds(row):
                winner["p50_over_fastest"] = _milliseconds(row) / _milliseconds(best)
        lines_with_winners.append(row.line | winner)
    return lines_with_winners


def _comparable(line: Line) -> tuple[Cell, ...]:
    """Return the cells that lines must share to be compared: layer, pass, point and device."""
    return tuple(map(line.get, _COMPARABLE))


def _milliseconds(row: LayerRow) -> float:
    """Return a row's median in ms; 0 if it is unknown."""
    return float(row.line["p50_ms"] or 0.0)
