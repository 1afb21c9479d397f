"""Pairing: match the points of two sides by key and by the features of their runs that both sides share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.diagnosis.environment import fact_at
from perfexp.errors import UserError
from perfexp.records.record import Key, Point, Record, Status, layers_key, without_replicate
from perfexp.summaries.subject import field_text, subject

#: Fields of a key that always have to agree, and what else identifies a measurement.
KEY_FIELDS = ("phase", "input_size", "batch_size")
FEATURES = ("model", "algorithm", "precision", "execution", "device")
#: Axes of a sweep that fields of a key stand for.
POINT_AXES = ("mode", "mode.inference.batch_size", "mode.train.batch_size", "input_size", "batch_size")
#: Axes that features stand for; any further axis identifies a measurement, too.
_COVERED = ("model", "algorithm", "precision", "execution", "gpu")
#: Numbers of devices and nodes in a plan, which are named where there are several.
_COUNTS = {"gpus": "gpu.count", "nodes": "gpu.nodes"}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A timed point of one side.

    Attributes:
        points: the point in each process that measured it.
        profiled: the point with its layers, those of the first process.
        features: properties of its run by name: model, algorithm, …, and the other axes of its sweep.
    """

    record: Record
    key: Key
    status: Status
    features: dict[str, str]
    points: Sequence[Point]
    profiled: Point | None

    def place(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Its identity by the fields that have to agree and by some features."""
        fields = (getattr(self.key, field) for field in KEY_FIELDS)
        return (*fields, *(self.features.get(name, "") for name in names))


@dataclass(frozen=True, kw_only=True)
class Side:
    """One argument of a comparison: the runs of a folder.

    Attributes:
        name: `A` for the baseline, then `B`, ….
        source: argument of the user.
        missing: a line for each run of a sweep without a record.
        decided_by: measures by which `perfexp ab` decides, empty for the first time of each point; None if unknown.
        coverage: share of the convolutions' FLOPs that the algorithm computed, in words, unless all of it is proven.
        warnings: codes of the errors and warnings of its runs.
    """

    name: str
    source: str
    measurements: tuple[Measurement, ...]
    missing: tuple[str, ...] = ()
    decided_by: tuple[str, ...] | None = None
    coverage: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, source: str, records: Iterable[Record], missing: Iterable[str] = ()) -> Side:
        """The side of some runs; raises UserError without any timed point."""
        measurements = tuple(one for record in records for one in _measurements(record))
        if not measurements:
            raise UserError(f"{source} has no timed point to compare: none of its runs was timed.")
        return cls(name=name, source=source, measurements=measurements, missing=tuple(missing))

    def features(self, name: str) -> set[str]:
        """The values of a feature."""
        return {one.features.get(name, "") for one in self.measurements}


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Points of a baseline and another side that belong together.

    Attributes:
        subject: names of the features that no two points of both sides share.
        pairs: baseline and other side of each pair.
        alone: points that only one side measured: that side's name, the point, and the other side's status if it tried.
    """

    subject: tuple[str, ...]
    pairs: tuple[tuple[Measurement, Measurement], ...]
    alone: tuple[tuple[str, Measurement, Status | None], ...]

    @property
    def level(self) -> float | None:
        """Level of verdicts on runs whose processes took turns until a verdict was reached; None if any did not."""
        sweeps = [[one.record.sweep for one in pair] for pair in self.pairs]
        if not all(one and other and one.uid == other.uid for one, other in sweeps):
            return None
        levels = [sweep.level for pair in sweeps for sweep in pair if sweep]
        return None if None in levels else min(level for level in levels if level is not None)


def match(baseline: Side, other: Side) -> Matching:
    """Match the points of two sides.

    A feature identifies points if both sides have a value of it in common. Otherwise it is the subject, and points
    that differ in it belong together.

    Raises:
        UserError: a side has several points of one identity.
    """
    names = dict.fromkeys(name for side in (baseline, other) for one in side.measurements for name in one.features)
    subject_names = tuple(name for name in names if not baseline.features(name) & other.features(name))
    identity = [name for name in names if name not in subject_names]
    sides = [_by_place(side, identity) for side in (baseline, other)]
    pairs, alone = [], []
    for place in dict.fromkeys((*sides[0], *sides[1])):
        found = [side.get(place) for side in sides]
        measured = [one for one in found if one and one.status is Status.OK]
        if len(measured) == len(found):
            pairs.append((measured[0], measured[1]))
        else:
            missing = next((one.status for one in found if one and one not in measured), None)
            named = zip((baseline.name, other.name), found, strict=True)
            alone += [(name, one, missing) for name, one in named if one and one in measured]
    return Matching(subject=subject_names, pairs=tuple(pairs), alone=tuple(alone))


def varying(measurements: Iterable[Measurement]) -> list[str]:
    """The names of fields and features that differ between measurements."""
    every = list(measurements)
    names = dict.fromkeys(name for one in every for name in one.features)
    return [name for name in (*names, *KEY_FIELDS) if len({_value(one, name) for one in every}) > 1]


def word(one: Measurement, name: str, others: Sequence[Measurement] = ()) -> str:
    """A field or a feature, which a measurement shares with others, as a word."""
    if name in KEY_FIELDS or name == "precision":
        return field_text(one.key, name, [each.record.environment for each in (one, *others)], named=True)
    return one.features.get(name, "")


def _value(one: Measurement, name: str) -> object:
    return getattr(one.key, name) if name in KEY_FIELDS else one.features.get(name, "")


def label(one: Measurement, names: Sequence[str], others: Sequence[Measurement] = ()) -> str:
    """Some fields and features, which a measurement shares with others, in words: `resnet18 · 224 · batch 4`."""
    return " · ".join(text for name in names if (text := word(one, name, others)))


def _measurements(record: Record) -> Iterable[Measurement]:
    about = subject(record.plan, record.environment)
    axes = record.sweep.axes if record.sweep else {}
    others = {
        name: value for name, value in axes.items() if name not in POINT_AXES and name.split(".")[0] not in _COVERED
    }
    points: dict[Key, list[Point]] = {}  # a search for each point would take the square of their number
    for point in record.points:
        points.setdefault(without_replicate(point.key), []).append(point)
    for point in record.points:
        if point.key.is_timed and not point.key.replicate:
            texts = (about.model, about.algorithm, point.key.precision, about.execution, about.device or "")
            features = dict(zip(FEATURES, texts, strict=True)) | others
            counts = {name: fact_at(record.plan, place) for name, place in _COUNTS.items()}
            yield Measurement(
                record=record,
                key=point.key,
                status=point.status,
                features=features | {name: str(count) for name, count in counts.items() if count not in (None, 1)},
                points=points[point.key],
                profiled=next((one for one in points.get(layers_key(point.key), ()) if not one.key.replicate), None),
            )


def _by_place(side: Side, names: Sequence[str]) -> dict[tuple[Any, ...], Measurement]:
    places: dict[tuple[Any, ...], Measurement] = {}
    for one in side.measurements:
        same = places.setdefault(one.place(names), one)
        if same is not one:
            differing = varying([same, one])
            how = f"{label(same, differing)} and {label(one, differing)}" if differing else "runs of the same plan"
            raise UserError(f"{side.source} has several results for {one.key} ({how}); name one run's folder.")
    return places
