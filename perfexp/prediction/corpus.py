"""Measured curves from records, used to predict points and to calibrate other predictions.

Predictions never enter a corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from perfexp.plan.sparse import (
    LEAST_MEASURED,
    MOST_MEASURED,
    Pair,
    curve_of,
    out_of_memory,
)
from perfexp.plan.sweep import spread
from perfexp.prediction.identity import identity
from perfexp.records import priors
from perfexp.records.folders import below
from perfexp.records.point_times import interval_of
from perfexp.records.quantities import ENERGY, PEAK_MEMORY
from perfexp.records.record import Record, Status
from perfexp.records.rows import Row
from perfexp.records.subject import Subject, subject
from perfexp.records.summary import rows
from perfexp.statistics import selection
from perfexp.statistics.conformal import Calibration, calibrate
from perfexp.statistics.estimators import Interval, Samples
from perfexp.statistics.gaussian_process import Curve
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.prior import Prior

#: Curve quantities with their units.
QUANTITIES = {"time": "seconds", "energy": "joules", "memory": "bytes"}
#: Software and device facts that change times, most important first.
_CONDITIONS = ("cudnn", "cuda", "driver", "power_limit_watts", "clocks_locked")
#: Limit on the curves that calibrate a curve; the newest are used.
MOST_CURVES = 30
#: Limit on the times that an energy curve borrows.
_MOST_BORROWED = 24
#: Folder levels to search for sibling runs: runs, and runs in sweeps.
_SIBLING_LEVELS = 2


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """Device that a record was measured on.

    Attributes:
        kind: device kind, for example `cuda`, `cpu` or `fake`; empty if unknown.
        product: name of a single device.
        ranks: number of processes that measured together, each with its own device.
        nodes: number of hosts that these processes ran on.
    """

    kind: str
    product: str
    ranks: int
    nodes: int

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> MeasuredDevice:
        """Return the device in a record's environment."""
        device, ranks = environment.get("device"), environment.get("ranks")
        facts = device if isinstance(device, Mapping) else {}
        of_ranks = ranks if isinstance(ranks, Mapping) else {}
        return cls(
            kind=str(facts.get("kind") or ""),
            product=str(facts.get("name") or ""),
            ranks=_length(of_ranks.get("devices")),
            nodes=_length(of_ranks.get("hosts")),
        )


@dataclass(frozen=True, kw_only=True)
class MeasuredCurve:
    """One quantity in one phase of a record, over its input sizes and batch sizes.

    Attributes:
        folder: record folder; of a joined curve, that of its newest record.
        about: model, algorithm, precision, execution and device.
        identity: hash of the settings that determine the values (see `identity.identity`).
        device: device that the record was measured on.
        phase: phase of the calls.
        quantity: one of QUANTITIES.
        kind: name of the time, or of the metric.
        values: measured values with 95 % intervals for this run, by input size and batch size.
        stated: times with the record's 95 % intervals, which hold for other runs; otherwise empty.
        out_of_memory: input sizes and batch sizes in this phase that ran out of memory.
        conditions: versions and limits that change times.
        ended: end of the record, ISO 8601.
        times: time curve of the same phase, which an energy curve with fewer points borrows from.
        folders: record folder of each value of a joined curve; empty for a single record.
    """

    folder: Path
    about: Subject
    identity: str
    device: MeasuredDevice
    phase: str
    quantity: str
    kind: str
    values: dict[Pair, Interval]
    out_of_memory: frozenset[Pair]
    conditions: Mapping[str, str]
    ended: str
    times: MeasuredCurve | None = None
    stated: Mapping[Pair, Interval] = field(default_factory=dict)
    folders: Mapping[Pair, Path] = field(default_factory=dict)

    @property
    def borrows(self) -> bool:
        """Return whether predictions use the time curve, too."""
        few = len(self.values) < selection.INITIAL
        return few and self.times is not None and len(self.times.values) > len(self.values)

    @property
    def least_points(self) -> int:
        """Return the fewest points that the curve is predicted from."""
        return LEAST_MEASURED - self.borrows

    @property
    def name(self) -> str:
        """Return model, algorithm, phase, precision and quantity in words."""
        about = self.about
        return " · ".join(
            (about.model, about.algorithm, self.phase, about.precision, self.quantity)
        )

    def curve(self) -> Curve:
        """Return the curve for the Gaussian process, over its own range.

        If it has more points than a prediction takes, evenly spread points are chosen.
        """
        reference = selection.coordinates(list(self.values))
        curve = _curve_over(reference, self.values, MOST_MEASURED)
        if self.times is None or not self.borrows:
            return curve
        return replace(curve, related=_curve_over(reference, self.times.values, _MOST_BORROWED))


def _curve_over(reference: Samples, values: Mapping[Pair, Interval], most: int) -> Curve:
    """Return up to `most` values as a curve with coordinates as shares of the reference's range."""
    pairs = spread(values, most)
    x = selection.scaled(selection.coordinates(pairs), reference)
    return curve_of(x, np.ptp(reference, axis=0), list(map(values.__getitem__, pairs)))


def _length(values: Any) -> int:
    """Return the length of a list in a record's environment; 1 for anything else."""
    return len(values) or 1 if isinstance(values, list) else 1


def find_curves(folders: Iterable[Path]) -> list[MeasuredCurve]:
    """Read the curves from all records in and below folders, newest first.

    Unreadable records are skipped. `perfexp predict` searches its `--corpus` with it.
    """
    files: list[Path] = []
    for folder in folders:
        if folder.is_dir():
            files += below(folder, "record.json", refused=_skip)
    return _curves_of(files)


def sibling_curves(folder: Path) -> list[MeasuredCurve]:
    """Read the curves from other runs next to a run, including runs in sweeps.

    They calibrate the predictions of a sparse sweep.
    """
    files = below(folder.parent, "record.json", refused=_skip, deepest=_SIBLING_LEVELS)
    return _curves_of(file for file in files if file.parent.resolve() != folder.resolve())


def _skip(_error: OSError) -> None:
    """Ignore a folder that cannot be read."""


def _curves_of(files: Iterable[Path]) -> list[MeasuredCurve]:
    """Return the curves in record files, newest first; files that cannot be read are skipped.

    Among copies of a record, the first counts.
    """
    curves_by_uid: dict[str, list[MeasuredCurve]] = {}
    for file in files:
        # other people's records are data: any node may have any type
        with suppress(Exception):
            uid, curves_in_file = _curves_in(file, file.stat().st_mtime_ns)
            curves_by_uid.setdefault(uid, curves_in_file)
    curves = chain.from_iterable(curves_by_uid.values())
    return _joined(sorted(curves, key=lambda curve: curve.ended, reverse=True))


@lru_cache(maxsize=256)  # each run of a sweep reads the runs before it
def _curves_in(file: Path, _modified_ns: int) -> tuple[str, list[MeasuredCurve]]:
    """Return a record's identifier and its curves."""
    record = Record.load(file)
    return record.uid, _of_phases(record, file.parent)


def _joined(curves: Sequence[MeasuredCurve]) -> list[MeasuredCurve]:
    """Join short curves with the same settings, for example the runs in a sweep.

    Each of them has too few points for a prediction. The newest value of a point counts. Joined
    curves come after complete curves, which have more points.
    """
    groups: dict[Any, list[MeasuredCurve]] = {}
    complete, joined = [], []
    for curve in curves:
        if len(curve.values) >= LEAST_MEASURED:
            complete.append(curve)
            continue
        conditions = tuple(curve.conditions.items())
        settings = curve.identity, curve.device, curve.phase, curve.quantity, conditions
        groups.setdefault(settings, []).append(curve)
    for parts in groups.values():
        newest = next((part for part in parts if part.values), None)
        if newest is None:
            continue
        values, sources = dict[Pair, Interval](), dict[Pair, Path]()
        stated = dict[Pair, Interval]()
        too_large = frozenset[Pair]()
        for part in reversed(parts):
            too_large |= part.out_of_memory
            if part.kind == newest.kind:
                values |= part.values
                stated |= part.stated
                sources |= dict.fromkeys(part.values, part.folder)
        too_large -= values.keys()
        joined.append(
            replace(newest, values=values, stated=stated, folders=sources, out_of_memory=too_large)
        )
    return [*complete, *joined]


def of_record(record: Record, folder: Path) -> list[MeasuredCurve]:
    """Return a record's measured curves: times, energies and memory peaks for each phase.

    Predictions of a sparse sweep, and notes on stairs, are made from them.
    """
    return [curve for curve in _of_phases(record, folder) if curve.values]


def _of_phases(record: Record, folder: Path) -> list[MeasuredCurve]:
    """Return a record's curves; a phase that only ran out of memory has curves without values."""
    about = subject(record.plan, record.environment)
    table = [row for row in rows(record) if row.status is Status.OK and row.time]
    curves = []
    for phase in dict.fromkeys(point.key.phase for point in record.points if point.key.is_timed):
        of_phase = [row for row in table if row.key.phase == phase]
        too_large = out_of_memory(point for point in record.points if point.key.phase == phase)
        of_processes = priors.of_record(record).get(priors.class_of("energy", None))
        values_by_quantity = {
            "time": _times(of_phase),
            "energy": _metrics(of_phase, ENERGY, of_processes),
        }
        values_by_quantity["memory"] = _metrics(of_phase, PEAK_MEMORY)
        times = None
        for quantity, (kind, values) in values_by_quantity.items():
            if values or too_large:
                curve = MeasuredCurve(
                    folder=folder,
                    about=about,
                    identity=identity(record.plan, phase),
                    device=MeasuredDevice.of(record.environment),
                    phase=phase,
                    quantity=quantity,
                    kind=kind,
                    values=values,
                    out_of_memory=too_large,
                    conditions=conditions_of(record.environment),
                    ended=record.ended,
                    times=times if quantity == "energy" else None,
                    stated=_stated(of_phase, kind) if quantity == "time" else {},
                )
                curves.append(curve)
                times = times or curve
    return curves


def _times(table: Sequence[Row]) -> tuple[str, dict[Pair, Interval]]:
    """Return the first kind of time that all rows have, with its medians in seconds by point.

    The kind is empty if the rows have none in common.
    """
    for kind in table[0].times if table else ():
        if all(kind in row.times for row in table):
            medians = {}
            for row in table:
                median = row.own_interval(kind)
                if median and median.value > 0:
                    medians[row.key.input_size, row.key.batch_size] = median
            return kind, medians
    return "", {}


def _stated(table: Sequence[Row], kind: str) -> dict[Pair, Interval]:
    """Return a time's mean over processes by point, with the interval that the record shows."""
    return {
        (row.key.input_size, row.key.batch_size): row.figures[kind].interval
        for row in table
        if kind in row.figures
    }


def _metrics(
    table: Sequence[Row], name: str, prior: Prior | None = None
) -> tuple[str, dict[Pair, Interval]]:
    """Return a metric's name, and its values with intervals by point.

    Args:
        table: rows of one phase.
        name: metric, for example the energy in joules.
        prior: variance between processes, by which an interval is widened; None to leave it.
    """
    intervals = {}
    for row in table:
        interval = interval_of(row.metric(name))
        if interval and interval.value > 0:
            if prior:
                interval = Repeats.of([interval], prior).interval
            intervals[row.key.input_size, row.key.batch_size] = interval
    return name, intervals


def conditions_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions and limits in a record's environment that change times.

    A prediction warns if they differ from this machine's.
    """
    device = environment.get("device")
    facts = {**(device if isinstance(device, Mapping) else {}), "torch": _torch(environment)}
    conditions = {}
    for name in (*_CONDITIONS, "torch"):
        if facts.get(name) is not None:
            conditions[name] = str(facts[name])
    return conditions


def _torch(environment: Mapping[str, Any]) -> object:
    """Return torch's version in a record's environment; None if unknown."""
    packages = environment.get("packages")
    return packages.get("torch") if isinstance(packages, Mapping) else None


class Corpus:
    """Curves from other runs, newest first, and the calibrations based on them.

    A calibration scales the intervals of the Gaussian process by its errors on other curves.
    """

    def __init__(self, curves: Sequence[MeasuredCurve]) -> None:
        self.curves = curves
        self._calibrations: dict[tuple[str | None, ...], Calibration] = {}

    def calibration(self, curve: MeasuredCurve) -> Calibration:
        """Return a curve's calibration by curves for other models or algorithms on its device.

        Curves with the same `place_of` share it.
        """
        curve_place = place_of(curve)
        if curve_place not in self._calibrations:
            others = [other.curve() for other in self.curves if calibrates(other, curve)]
            self._calibrations[curve_place] = calibrate(others[:MOST_CURVES])
        return self._calibrations[curve_place]


def place_of(curve: MeasuredCurve) -> tuple[str | None, ...]:
    """Return quantity, kind, device, model and algorithm of a curve.

    Curves that agree in all of them share a calibration.
    """
    return curve.quantity, curve.kind, curve.about.device, curve.about.model, curve.about.algorithm


def calibrates(other: MeasuredCurve, curve: MeasuredCurve) -> bool:
    """Return whether `other` may calibrate `curve`.

    It must be long enough and have the same quantity and device, but another model or algorithm.
    Curves for the same work would make the calibration too good.
    """
    curve_place, others = place_of(curve), place_of(other)
    return (
        curve_place[:3] == others[:3]
        and curve_place[3:] != others[3:]
        and len(other.values) >= LEAST_MEASURED
    )


def digest(curves: Iterable[MeasuredCurve]) -> str:
    """Return the SHA-256 of the curves' values, in any order; it is stored with predictions.

    `predictions` calls it.
    """
    parts = []
    for curve in curves:
        for pair, value in curve.values.items():
            parts.append(f"{curve.name} {curve.about.device} {pair} {value.value!r}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()
