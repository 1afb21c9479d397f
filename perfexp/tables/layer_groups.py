"""Layer groups: the layers of a call by kind, with identical layers together, and by their place in the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from perfexp.records.layer_lines import gap_of, name_of, pass_of, seconds_of
from perfexp.records.quantities import CLOSURE
from perfexp.records.record import Point
from perfexp.summaries.subject import one_line

#: Kinds of parts that are not layers.
GAPS, OTHERS = "gaps", "other kinds"
#: Limit on kinds with a name, and so with a color.
MOST_KINDS = 5
#: Least number of parts of the level of stages in a model's paths, share of the call of which none has more, and limit
#: on the level.
_LEAST_STAGES, _NEARLY_ALL, _MOST_DEPTH = 3, 0.8, 5
#: A number in a path; longer ones are parts of a name.
NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Identical layers of one pass: the same kind, shapes and kernels.

    Attributes:
        name: path, with the numbers that differ as ranges (`layer3.1-5.conv2`).
        seconds: their time together, without gaps before them.
        share: their share of the call, gaps before them included.
    """

    name: str
    kind: str
    which: str
    count: int
    seconds: float
    share: float
    kernels: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name with the number of layers if there are several: `layer3.1-5.conv2 ×5`."""
        return one_line(self.name) + (f" ×{self.count}" if self.count > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Neighbors in the order of execution that have the first parts of their paths in common.

    Attributes:
        label: the name without the part that the row above it shows.
        start: seconds of the call before them.
        seconds: their duration, gaps before them included.
        path: name of a layer, whose `name` is its kind; empty for others.
    """

    name: str
    label: str
    which: str
    start: float
    seconds: float
    path: str = ""


def call_seconds(point: Point) -> float:
    """The time that the shares are parts of: that of the call without profiling, so that share × call is the time.

    Where the queue was not pre-filled, the gaps are the host's: then it is the sum of the medians.
    """
    closure = point.metric(CLOSURE)
    if closure is None or closure.value is None or point.facts["layers"]["method"] == "unheld":
        return sum(seconds_of(line) + gap_of(line) for line in point.facts["layers"]["lines"])
    return float(np.median(point.facts["layers"]["call_seconds"])) / (1 + closure.value)


def merged(point: Point) -> list[Layer]:
    """The layers of a call, identical ones together, the longest first."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    lines = [line for line in point.facts["layers"]["lines"] if line["share"] > 0]
    for number, line in enumerate(lines):
        groups.setdefault(_identity(line) or (number,), []).append(line)
    scale = _scale(point)
    layers = [
        Layer(
            name=name_of_all([name_of(line) for line in group]),
            kind=one_line(group[0]["kind"]),
            which=pass_of(group[0]),
            count=len(group),
            seconds=scale * sum(map(seconds_of, group)),
            share=sum(line["share"] for line in group),
            kernels=tuple(dict.fromkeys(name for line in group for name in line["kernels"])),
        )
        for group in groups.values()
    ]
    return sorted(layers, key=lambda layer: -layer.share)


def by_kind(point: Point) -> dict[str, dict[str, float]]:
    """Seconds of the largest kinds by pass, then those of the others together and of the gaps, without empty ones."""
    sums: dict[str, dict[str, float]] = {}
    gaps, scale = dict[str, float](), _scale(point)
    for line in point.facts["layers"]["lines"]:
        kind, which = one_line(line["kind"]), pass_of(line)
        of_kind = sums.setdefault(kind, {})
        of_kind[which] = of_kind.get(which, 0.0) + scale * seconds_of(line)
        gaps[which] = gaps.get(which, 0.0) + scale * gap_of(line)
    ordered = sorted(sums, key=lambda kind: -sum(sums[kind].values()))
    rest = dict[str, float]()
    for kind in ordered[MOST_KINDS:]:
        for which, seconds in sums[kind].items():
            rest[which] = rest.get(which, 0.0) + seconds
    found = {kind: sums[kind] for kind in ordered[:MOST_KINDS]} | {OTHERS: rest, GAPS: gaps}
    return {kind: passes for kind, passes in found.items() if sum(passes.values()) > 0}


def in_order(point: Point) -> list[tuple[str, list[Stretch]]]:
    """The rows of a strip in the order of execution: passes, stages, blocks and layers, each only if it adds something.

    The name of a layer's stretch is its kind.
    """
    scale, start = _scale(point), 0.0
    lines, starts = [line for line in point.facts["layers"]["lines"] if line["share"] > 0], list[float]()
    for line in lines:
        starts.append(start)
        start += scale * (seconds_of(line) + gap_of(line))
    parts = [name_of(line).split(".") for line in lines]
    depth = _stage_depth(parts, [line["share"] for line in lines])
    levels = {"pass": [pass_of(line) for line in lines]}
    levels["stage"], levels["block"] = ([".".join(part[:end]) for part in parts] for end in (depth, depth + 1))
    rows: list[tuple[str, list[Stretch]]] = []
    for title, names in levels.items():
        is_below = depth > 1 if title == "stage" else bool(rows) and rows[-1][0] == "stage"
        row = _stretches(lines, names, starts, start, is_below=is_below)
        if len(row) > (len(rows[-1][1]) if rows else 1):
            rows.append((title, row))
    layers = [part for line, at in zip(lines, starts, strict=True) for part in _parts(line, at, scale)]
    return [*rows, ("layer", layers)]


def _stage_depth(parts: Sequence[Sequence[str]], shares: Sequence[float]) -> int:
    """The first level of the paths with several parts of which none is nearly all of the call."""
    for depth in range(1, _MOST_DEPTH):
        sums: dict[tuple[str, ...], float] = {}
        for part, share in zip(parts, shares, strict=True):
            place = tuple(part[:depth])
            sums[place] = sums.get(place, 0.0) + share
        if len(sums) >= _LEAST_STAGES and max(sums.values()) < _NEARLY_ALL * sum(sums.values()):
            return depth
    return 1


def _parts(line: Mapping[str, Any], start: float, scale: float) -> list[Stretch]:
    """The gap before a layer, if there is one, and the layer."""
    gap, kind, which = scale * gap_of(line), one_line(line["kind"]), pass_of(line)
    before = [Stretch(name=GAPS, label=GAPS, which=which, start=start, seconds=gap)] if gap > 0 else []
    place = {"start": start + gap, "seconds": scale * seconds_of(line)}
    return [*before, Stretch(name=kind, label=kind, which=which, path=one_line(name_of(line)), **place)]


def _stretches(
    lines: Sequence[Mapping[str, Any]], names: Sequence[str], starts: Sequence[float], end: float, *, is_below: bool
) -> list[Stretch]:
    row: list[Stretch] = []
    firsts = [
        index
        for index in range(len(lines))
        if not index or (names[index], pass_of(lines[index])) != (names[index - 1], pass_of(lines[index - 1]))
    ]
    for index, following in zip(firsts, [*firsts[1:], None], strict=True):
        until = end if following is None else starts[following]
        name, which = one_line(names[index]), pass_of(lines[index])
        label = name.rpartition(".")[2] if is_below else name
        row.append(Stretch(name=name, label=label, which=which, start=starts[index], seconds=until - starts[index]))
    return row


def _scale(point: Point) -> float:
    whole = sum(seconds_of(line) + gap_of(line) for line in point.facts["layers"]["lines"])
    return call_seconds(point) / whole if whole else 1.0


def _identity(line: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All that identical layers have in common; None where shapes are unknown."""
    if not line["inputs"] or not line["key"]:
        return None
    shapes = msgspec.json.encode([line["inputs"], line["outputs"], line["convolution"]])
    pattern = NUMBER.sub("0", name_of(line))
    return pattern, line["kind"], pass_of(line), shapes, tuple(sorted(line["kernels"]))


def name_of_all(names: Sequence[str]) -> str:
    """One name for several that differ in numbers, with those as ranges: `layer3.1-5.conv2`."""
    columns = list(zip(*(map(int, NUMBER.findall(name)) for name in names), strict=True))
    texts = iter([_ranges(column) for column in columns])
    return NUMBER.sub(lambda _: next(texts), names[0])


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in words, successive ones as a range: `0,2-4`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
