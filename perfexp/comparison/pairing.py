"""Pairing: each side's runs, and the points of two sides that belong together.

A measurement is a timed point of one run, with its features: what the run was about, such as model
and device. Points are matched by phase, input size and batch size, and by the features that both
sides share. A feature in which the sides differ is the subject of the comparison. For sweeps,
`groups` splits the runs into sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.comparison.document import Alone, SideFacts
from perfexp.comparison.measures import repeats
from perfexp.errors import UserError
from perfexp.records.analysis import Analysis
from perfexp.records.fact_lookup import fact_at
from perfexp.records.record import Key, Point, Record, Status, layers_key, without_replicate
from perfexp.records.subject import field_text
from perfexp.records.sweep_record import SweepChild
from perfexp.statistics.moderated import Repeats

#: Key fields that always have to agree, and features that also identify a measurement.
KEY_FIELDS = ("phase", "input_size", "batch_size")
FEATURES = ("model", "algorithm", "precision", "execution", "device")
#: Sweep axes that key fields already cover.
POINT_AXES = (
    "mode",
    "mode.inference.batch_size",
    "mode.train.batch_size",
    "input_size",
    "batch_size",
)
#: Axes that features already cover; any other axis also identifies a measurement.
_COVERED = ("model", "algorithm", "precision", "execution", "gpu")
#: Device and node counts in a plan; only counts above 1 are named.
_COUNTS = {"gpus": "gpu.count", "nodes": "gpu.nodes"}
#: Run of a sweep with its analysis; None if the run left no record.
Run = tuple[SweepChild, Analysis | None]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Timed point on either side.

    Attributes:
        record: record of the run that measured it.
        key: phase, input size, batch size and precision.
        status: status in the first process.
        points: the point in each process that measured it.
        profiled: the point with layers, from the first process; None without layers.
        figures: figures from its processes, by measure.
        features: run properties by name: model, algorithm, …, and the sweep's other axes.
    """

    record: Record
    key: Key
    status: Status
    features: dict[str, str]
    points: Sequence[Point]
    profiled: Point | None
    figures: dict[str, Repeats]

    def place(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Return its identity in a matching: the fields that must agree, plus named features."""
        return (*_fields(self.key), *(self.features.get(name, "") for name in names))


@dataclass(frozen=True, kw_only=True)
class Side:
    """One argument of a comparison: the runs in a folder.

    Attributes:
        facts: name (`A` for the baseline, then `B`, …), the user's argument, and facts that qualify
            the figures.
        measurements: all timed points in the runs, failed points included.
    """

    facts: SideFacts
    measurements: tuple[Measurement, ...]

    @property
    def name(self) -> str:
        """Return the side's name."""
        return self.facts.name

    @property
    def source(self) -> str:
        """Return the user's argument."""
        return self.facts.source

    @classmethod
    def of(
        cls, name: str, source: str, runs: Iterable[Analysis], missing: Iterable[str] = ()
    ) -> Side:
        """Build a side from runs.

        Args:
            name: `A`, `B`, …
            source: the user's argument.
            runs: analyses of the runs' records.
            missing: runs without a record.

        Raises:
            UserError: the runs have no timed point.
        """
        measurements = tuple(item for analysis in runs for item in measured(analysis))
        if not measurements:
            raise UserError(f"{source} has no timed point to compare: none of its runs was timed.")
        names = dict.fromkeys(item.record.name for item in measurements)
        facts = SideFacts(name=name, source=source, runs=tuple(names), missing=tuple(missing))
        return cls(facts=facts, measurements=measurements)

    def features(self, name: str) -> set[str]:
        """Return all values of a feature on this side; "" for measurements without it."""
        return {measurement.features.get(name, "") for measurement in self.measurements}


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Matched points of a baseline and another side.

    Attributes:
        pairs: baseline point and other point of each pair.
        alone: points that only one side measured, with the other side's status if it tried.
    """

    pairs: tuple[tuple[Measurement, Measurement], ...]
    alone: tuple[Alone, ...]

    @property
    def level(self) -> float | None:
        """Return the error probability of the intervals if `perfexp ab` made all runs of the pairs.

        `perfexp ab` tests for a verdict repeatedly while it measures (`statistics.sequential`), and
        stores the level of its last test in each record. The strictest level applies. None for
        other runs, whose level is `ALPHA`. There is at least one pair.
        """
        levels = []
        for before, after in self.pairs:
            sweep, other_sweep = before.record.sweep, after.record.sweep
            if sweep is None or other_sweep is None or sweep.uid != other_sweep.uid:
                return None
            if sweep.level is None or other_sweep.level is None:
                return None
            levels += [sweep.level, other_sweep.level]
        return min(levels)


def match(baseline: Side, other: Side) -> Matching:
    """Match the points of two sides.

    A feature identifies points if the two sides have a common value. Otherwise it is the subject of
    the comparison: points that differ in it still belong together. For example, runs on two GPUs
    are matched by model and batch size.

    Raises:
        UserError: a side has several points with the same identity.
    """
    all_features: dict[str, str] = {}
    for measurement in (*baseline.measurements, *other.measurements):
        all_features |= measurement.features
    identity = [name for name in all_features if baseline.features(name) & other.features(name)]
    before, after = _by_place(baseline, identity), _by_place(other, identity)
    pairs, alone = [], []
    for point_key in dict.fromkeys((*before, *after)):
        baseline_point, other_point = before.get(point_key), after.get(point_key)
        is_measured = baseline_point is not None and baseline_point.status is Status.OK
        if baseline_point and other_point and is_measured and other_point.status is Status.OK:
            pairs.append((baseline_point, other_point))
            continue
        side, against, point, lacking = baseline, other, baseline_point, other_point
        if not is_measured:
            side, against, point, lacking = other, baseline, other_point, baseline_point
        if point and point.status is Status.OK:
            shown = [*filter(identity.__contains__, point.features), *KEY_FIELDS]
            alone.append(
                Alone(
                    side=side.name,
                    point=label(point, shown),
                    against=against.name,
                    status=lacking.status if lacking else None,
                )
            )
    return Matching(pairs=tuple(pairs), alone=tuple(alone))


def varying(measurements: Iterable[Measurement]) -> list[str]:
    """Return the names of key fields and features that differ between measurements."""
    every, features = list(measurements), dict[str, str]()
    for measurement in every:
        features |= measurement.features
    differing = []
    for name in (*features, *KEY_FIELDS):
        if len({_value(measurement, name) for measurement in every}) > 1:
            differing.append(name)
    return differing


def word(measurement: Measurement, name: str, others: Sequence[Measurement] = ()) -> str:
    """Return a key field or feature as a word, for example `batch 4`; empty if it has no such one.

    Args:
        others: measurements that share the field; their devices can change its name.
    """
    if name in KEY_FIELDS or name == "precision":
        environments = [item.record.environment for item in (measurement, *others)]
        return field_text(measurement.key, name, environments, named=True)
    return measurement.features.get(name, "")


def _value(measurement: Measurement, name: str) -> object:
    """Return the value of a key field or feature."""
    if name in KEY_FIELDS:
        return getattr(measurement.key, name)
    return measurement.features.get(name, "")


def label(
    measurement: Measurement, names: Sequence[str], others: Sequence[Measurement] = ()
) -> str:
    """Return fields and features in words, for example `resnet18 · 224 · batch 4`.

    Args:
        others: measurements that share these fields and features.
    """
    return " · ".join(filter(None, (word(measurement, name, others) for name in names)))


def _fields(key: Key) -> tuple[Any, ...]:
    """Return the key fields that always have to agree; precision is a feature."""
    return key.phase, key.input_size, key.batch_size


def measured(analysis: Analysis) -> Iterable[Measurement]:
    """Yield each timed point of a run once, with all processes' points and figures."""
    record, described = analysis.record, analysis.about
    further_features = {}
    if record.sweep:
        for name, value in record.sweep.axes.items():
            if name not in POINT_AXES and name.split(".")[0] not in _COVERED:
                further_features[name] = value
    for name, fact_path in _COUNTS.items():
        count = fact_at(record.plan, fact_path)
        if count not in (None, 1):
            further_features[name] = str(count)
    figures = repeats(analysis)
    # by key, since searching for each point would take quadratic time
    points: dict[Key, list[Point]] = {}
    firsts: dict[Key, Point] = {}
    for point in record.points:
        points.setdefault(without_replicate(point.key), []).append(point)
        firsts.setdefault(point.key, point)
    for point in record.points:
        if point.key.is_timed and not point.key.replicate:
            texts = (described.model, described.algorithm, point.key.precision, described.execution)
            features = dict(zip(FEATURES, (*texts, described.device or ""), strict=True))
            yield Measurement(
                record=record,
                key=point.key,
                status=point.status,
                features=features | further_features,
                points=points[point.key],
                profiled=firsts.get(layers_key(point.key)),
                figures=figures.get(point.key, {}),
            )


def _by_place(side: Side, names: Sequence[str]) -> dict[tuple[Any, ...], Measurement]:
    """Return a side's measurements by identity.

    Args:
        names: features that belong to the identity.

    Raises:
        UserError: two measurements have the same identity.
    """
    places: dict[tuple[Any, ...], Measurement] = {}
    for item in side.measurements:
        same = places.setdefault(item.place(names), item)
        if same is not item:
            how = "runs of the same plan"
            if differing := varying([same, item]):
                how = f"{label(same, differing)} and {label(item, differing)}"
            raise UserError(
                f"{side.source} has several results for {item.key} ({how}); name one run's folder."
            )
    return places


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of a sweep that form one side.

    They differ only in point axes (phase, input size, batch size), or there is only a single run.

    Attributes:
        runs: runs by number, each with its analysis.
    """

    runs: tuple[Run, ...]

    @property
    def recorded(self) -> list[Analysis]:
        """Return the runs that left a record."""
        return [analysis for _, analysis in self.runs if analysis]

    @property
    def timed(self) -> list[Analysis]:
        """Return the runs with a timed point."""
        timed = []
        for analysis in self.recorded:
            if any(row.status is Status.OK for row in analysis.rows):
                timed.append(analysis)
        return timed

    @property
    def number(self) -> int:
        """Return the first run's number."""
        return self.runs[0][0].job

    @property
    def axes(self) -> dict[str, str]:
        """Return the axes with their values, without point axes if there are several runs."""
        axes = self.runs[0][0].axes
        if len(self.runs) > 1:
            return _without_points(axes)
        return axes

    @property
    def name(self) -> str:
        """Return `run 3` for a single run, otherwise the axes, for example `model=resnet50`."""
        if len(self.runs) == 1:
            return f"run {self.number}"
        return ", ".join(map("=".join, self.axes.items()))


def groups(runs: Iterable[Run]) -> list[Group]:
    """Divide a sweep's runs into groups, the sides of its comparison, ordered by first run.

    Runs that measured the same point form separate groups, for example two modes that share a
    phase.
    """
    by_axes: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run[0].job):
        by_axes.setdefault(frozenset(_without_points(run[0].axes).items()), []).append(run)
    divided = []
    for members in by_axes.values():
        if _differ(members):
            divided.append(Group(runs=tuple(members)))
        else:
            for run in members:
                divided.append(Group(runs=(run,)))
    return sorted(divided, key=lambda group: group.number)


def _without_points(axes: dict[str, str]) -> dict[str, str]:
    """Return a run's axes with their values, without point axes."""
    return {axis: value for axis, value in axes.items() if axis not in POINT_AXES}


def _differ(runs: Sequence[Run]) -> bool:
    """Return whether no two runs have the same axes or a point in common: they can form a group."""
    axes, places = list[object](), list[tuple[Any, ...]]()
    for child, analysis in runs:
        axes.append(frozenset(child.axes.items()))
        if analysis:
            places += {_fields(row.key) for row in analysis.rows}
    return len(set(axes)) == len(axes) and len(set(places)) == len(places)
