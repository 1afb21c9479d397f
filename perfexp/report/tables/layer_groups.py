"""Layer groups: a call's layers by kind, by identity, and by place in the model.

The layer table and the layer plot show them. Times are in seconds per call, scaled so that all
layers and gaps add up to the call without profiling. A gap is idle device time before a layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from perfexp.records.layer_lines import gap_of, name_of, pass_of, seconds_of
from perfexp.records.quantities import CLOSURE
from perfexp.records.record import Point
from perfexp.records.subject import one_line

#: Kinds of parts that are not layers.
GAPS, OTHERS = "gaps", "other kinds"
#: Limit on kinds with their own name and color.
MOST_KINDS = 5
#: A stage is a part of the model at a path level, such as `layer3`. The level needs this many
#: parts, none with more than this share of the call, and has this maximum depth.
_LEAST_STAGES, _NEARLY_ALL, _MOST_DEPTH = 3, 0.8, 5
#: Number in a path; longer numbers are parts of names.
NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Identical layers in one pass, with the same kind, shapes and kernels.

    Attributes:
        name: path with ranges for differing numbers, for example `layer3.1-5.conv2`.
        kind: operation, for example `Conv2d`.
        which: pass, for example `forward`.
        count: number of layers.
        kernels: names of their kernels.
        seconds: total time, without gaps before the layers.
        share: total share of the call, including gaps before the layers.
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
        """Return the name, with the number of layers if several: `layer3.1-5.conv2 ×5`."""
        name = one_line(self.name)
        return f"{name} ×{self.count}" if self.count > 1 else name


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Adjacent layers in execution order with a common path prefix.

    Attributes:
        label: name without the part that the row above shows.
        start: seconds from the start of the call.
        seconds: duration, including gaps before the layers.
        path: layer path, if `name` is a layer's kind; otherwise empty.
    """

    name: str
    label: str
    which: str
    start: float
    seconds: float
    path: str = ""


class _Part(NamedTuple):
    """Layer line with times scaled to the call without profiling; `start` is before its gap."""

    line: Mapping[str, Any]
    name: str
    kind: str
    which: str
    start: float
    gap: float
    seconds: float


def call_seconds(point: Point) -> float:
    """Return the call time without profiling that shares refer to.

    Thus share × call time is the layer time. If the queue was not pre-filled, gaps belong to the
    host. The sum of medians is used then.
    """
    closure, layers = point.metric(CLOSURE), point.facts["layers"]
    if closure is None or closure.value is None or layers["method"] == "unheld":
        return _sum_of_lines(point)
    return float(np.median(layers["call_seconds"])) / (1 + closure.value)


def _sum_of_lines(point: Point) -> float:
    """Return the median seconds of all layers and gaps, as profiled."""
    return sum(seconds_of(line) + gap_of(line) for line in point.facts["layers"]["lines"])


def _parts(point: Point) -> list[_Part]:
    """Return a point's layer lines in execution order, scaled to the call without profiling.

    All groupings in this module start from them.
    """
    sum_of_lines, start = _sum_of_lines(point), 0.0
    scale = call_seconds(point) / sum_of_lines if sum_of_lines else 1.0
    parts: list[_Part] = []
    for line in point.facts["layers"]["lines"]:
        gap, seconds = scale * gap_of(line), scale * seconds_of(line)
        parts.append(
            _Part(line, name_of(line), one_line(line["kind"]), pass_of(line), start, gap, seconds)
        )
        # lines without a share ran beside others, so they take no time of the call
        start += (gap + seconds) * (line["share"] > 0)
    return parts


def merged(point: Point) -> list[LayerGroup]:
    """Return a call's layers with identical layers combined, longest first.

    The layer table and the bars of the layer plot show them.
    """
    groups: dict[object, list[_Part]] = {}
    for number, part in enumerate(_parts(point)):
        if part.line["share"] > 0:
            groups.setdefault(_identity(part) or number, []).append(part)
    layers = []
    for group in groups.values():
        kernels: dict[str, None] = {}
        for part in group:
            kernels |= dict.fromkeys(part.line["kernels"])
        seconds = sum(part.seconds for part in group)
        share = sum(part.line["share"] for part in group)
        layer = LayerGroup(
            name=name_of_all([part.name for part in group]),
            kind=group[0].kind,
            which=group[0].which,
            count=len(group),
            seconds=seconds,
            share=share,
            kernels=tuple(kernels),
        )
        layers.append(layer)
    return sorted(layers, key=lambda layer: -layer.share)


def by_kind(point: Point) -> dict[str, dict[str, float]]:
    """Return seconds per call by kind and pass: the largest kinds, then other kinds and gaps.

    Kinds without time are left out. The layer plot shows them as its first bars.
    """
    parts, totals = _parts(point), defaultdict[str, float](float)
    for part in parts:
        totals[part.kind] += part.seconds
    largest = sorted(totals, key=lambda kind: -totals[kind])[:MOST_KINDS]
    sums: dict[str, dict[str, float]] = {
        kind: defaultdict(float) for kind in (*largest, OTHERS, GAPS)
    }
    for part in parts:
        kind = part.kind if part.kind in largest else OTHERS
        sums[kind][part.which] += part.seconds
        sums[GAPS][part.which] += part.gap
    return {kind: dict(passes) for kind, passes in sums.items() if sum(passes.values()) > 0}


def in_order(point: Point) -> list[tuple[str, list[Stretch]]]:
    """Return rows of stretches in execution order: passes, stages, blocks and layers.

    The layer plot draws a row with a title for each. A row is left out if it adds no detail. In the
    layer row, stretches are named after the layer's kind.
    """
    parts = [part for part in _parts(point) if part.line["share"] > 0]
    depth = _stage_depth(parts)
    rows: list[tuple[str, list[Stretch]]] = []
    for title, end in (("pass", 0), ("stage", depth), ("block", depth + 1)):
        is_below = bool(rows) and rows[-1][0] == "stage"
        if title == "stage":
            is_below = depth > 1
        row = _stretches(parts, end, is_below=is_below)
        if len(row) > (len(rows[-1][1]) if rows else 1):
            rows.append((title, row))
    layers: list[Stretch] = []
    for part in parts:
        stretch = Stretch(
            name=part.kind,
            label=part.kind,
            which=part.which,
            start=part.start + part.gap,
            seconds=part.seconds,
            path=one_line(part.name),
        )
        if part.gap > 0:
            gap = replace(
                stretch, name=GAPS, label=GAPS, start=part.start, seconds=part.gap, path=""
            )
            layers.append(gap)
        layers.append(stretch)
    return [*rows, ("layer", layers)]


def _beginning(part: _Part, depth: int) -> str:
    """Return the first `depth` names of a layer's path."""
    return ".".join(part.name.split(".")[:depth])


def _stage_depth(parts: Sequence[_Part]) -> int:
    """Return the first path level with several parts, none of which is nearly the whole call."""
    for depth in range(1, _MOST_DEPTH):
        sums = defaultdict[str, float](float)
        for part in parts:
            sums[_beginning(part, depth)] += part.line["share"]
        if len(sums) >= _LEAST_STAGES and max(sums.values()) < _NEARLY_ALL * sum(sums.values()):
            return depth
    return 1


def _stretches(parts: Sequence[_Part], depth: int, *, is_below: bool) -> list[Stretch]:
    """Return adjacent layers with the same path prefix; depth 0 means the same pass.

    Args:
        depth: number of names in the prefix.
        is_below: whether a row above shows the names before the last.
    """
    row = []
    for (pass_name, beginning), group in groupby(
        parts, key=lambda part: (part.which, _beginning(part, depth))
    ):
        members = list(group)
        name = label = one_line(beginning or pass_name)
        if is_below:
            label = name.rpartition(".")[2]
        seconds = sum(part.gap + part.seconds for part in members)
        row.append(
            Stretch(
                name=name, label=label, which=pass_name, start=members[0].start, seconds=seconds
            )
        )
    return row


def _identity(part: _Part) -> object:
    """Return a value that only identical layers share.

    None if the shapes are unknown or the line is outside of modules.
    """
    line = part.line
    if not line["inputs"] or not line["key"]:
        return None
    shapes = msgspec.json.encode([line["inputs"], line["outputs"], line["convolution"]])
    return (
        NUMBER.sub("0", part.name),  # `layer3.1` and `layer3.2` may match
        line["kind"],
        part.which,
        shapes,
        tuple(sorted(line["kernels"])),
    )


def name_of_all(names: Sequence[str]) -> str:
    """Return names that differ in numbers only as one name, for example `layer3.1-5.conv2`."""
    columns = zip(*map(NUMBER.findall, names), strict=True)
    texts = iter([_ranges(map(int, column)) for column in columns])
    return NUMBER.sub(lambda _: next(texts), names[0])


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, with successive numbers as a range, for example `0,2-4`."""
    texts: list[str] = []
    for _, group in groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0]):
        first, *rest = map(itemgetter(1), group)
        texts.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ",".join(texts)
