"""The fastest algorithm for each layer, over the records of many runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.records.record import Point, Record, timed_key
from perfexp.summaries.subject import subject
from perfexp.tables import layer_tables
from perfexp.tables.csv_tables import Cell, Line

#: Columns that comparable lines have in common: everything but the algorithm.
_COMPARABLE = (
    *("device_name", "model", "execution", "phase", "input_size", "batch_size", "precision"),
    *("layer", "call", "operation", "pass"),
)
#: Status of passes that another algorithm computed than the selected one.
_NOT_OWN = ("fallback", "substituted")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of layers, and whether it can win.

    Attributes:
        line: all columns but those of the winner.
        is_leaf: whether it is a layer or an operation; not the model, a module around others, or outside of modules.
        is_own: whether its algorithm computed it: `default` everything, another one all that it did not leave to torch.
    """

    line: Line
    is_leaf: bool
    is_own: bool


def rows(record: Record) -> list[Row]:
    """Return the lines of a record's layers, with their parts in the comparison."""
    algorithm = subject(record.plan, record.environment).algorithm
    timed = {point.key: point for point in record.points}
    flags: list[tuple[bool, bool]] = []
    for point in layer_tables.points(record):
        keys = [line["key"] or {} for line in point.facts["layers"]["lines"]]
        around, own = _around(keys), _own(timed.get(timed_key(point.key)))
        flags += [
            (_is_leaf(key, around), algorithm == "default" or (key.get("path"), key.get("which")) in own)
            for key in keys
        ]
    return [
        Row(line=line, is_leaf=is_leaf, is_own=is_own and not _ran_another(line))
        for line, (is_leaf, is_own) in zip(layer_tables.lines(record), flags, strict=True)
    ]


def named(competing: Sequence[Row]) -> list[Line]:
    """Add to each line of layers the fastest algorithm for the same row, and the ratio of the times.

    Rows that another algorithm computed neither win nor are compared. Only a layer or an operation has a winner, and
    only if several algorithms were measured.

    Args:
        competing: rows of several runs, with the device and the execution of each.
    """
    fastest: dict[tuple[Any, ...], Line] = {}
    lines = [row.line for row in competing if row.is_leaf and row.is_own and row.line["p50_ms"]]
    for line in sorted(lines, key=_milliseconds):
        fastest.setdefault(_comparable(line), line)
    compared_lines: list[Line] = []
    baselines: dict[tuple[Any, ...], set[Cell]] = {}
    for row in competing:
        baselines.setdefault(_comparable(row.line), set()).add(row.line["algorithm"])
    for row in competing:
        place = _comparable(row.line)
        best = fastest.get(place) if row.is_leaf and len(baselines.get(place, ())) > 1 else None
        compared = best is not None and row.is_own and row.line["p50_ms"]
        ratio = _milliseconds(row.line) / _milliseconds(best) if best is not None and compared else None
        compared_lines.append(
            {**row.line, "fastest_algorithm": best["algorithm"] if best else None, "p50_over_fastest": ratio}
        )
    return compared_lines


def _comparable(line: Line) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in _COMPARABLE)


def _milliseconds(line: Line) -> float:
    return float(line["p50_ms"] or 0.0)


def _around(keys: Iterable[Mapping[str, Any]]) -> set[str]:
    """Paths of the modules that contain others, or operations."""
    paths: set[str] = set()
    for key in keys:
        if key.get("path") is not None:
            parts = key["path"].split(".") if key["path"] else []
            paths |= {".".join(parts[:count]) for count in range(len(parts) + (key["operation"] is not None))}
    return paths


def _is_leaf(key: Mapping[str, Any], around: Collection[str]) -> bool:
    """Whether a row is a layer or an operation."""
    return key.get("path") is not None and (key["operation"] is not None or key["path"] not in around)


def _own(timed: Point | None) -> set[tuple[str, str]]:
    """The convolutions, by path and pass, that the selected algorithm computed itself."""
    own: dict[tuple[str, str], bool] = {}
    for layer in (timed.facts.get("algorithm") or {}).get("layers", []) if timed else []:
        for one_pass in layer["passes"]:
            place = layer["name"], "forward" if one_pass["which"] == "forward" else "backward"
            left = one_pass.get("status") in _NOT_OWN or one_pass["selected"] == "default"
            own[place] = own.get(place, True) and not left
    return {place for place, is_own in own.items() if is_own}


def _ran_another(line: Line) -> bool:
    """Whether the kernels of a row belong to another algorithm than the one handed to cuDNN."""
    handed, ran = str(line["computed_by"]).rpartition(".")[2], line["ran"]
    return ran is not None and handed not in str(ran).split(" or ")
