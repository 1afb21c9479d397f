"""Run status: progress from results and expected points. All remaining times come from here.

`perfexp status` shows a `Tally` of points over the runs of a folder. Headers, dry runs and progress
bars use the same estimates. Points are of four kinds: timed points, first predictions (cold
starts), layers and profiles.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from perfexp.host import foreign
from perfexp.records import units
from perfexp.records.grid import Column, Grid
from perfexp.records.profile_keys import is_profile
from perfexp.records.record import (
    Key,
    Point,
    Seconds,
    Status,
    is_layers,
    points_from_lines,
    without_replicate,
)
from perfexp.records.subject import Subject, one_line, subject
from perfexp.records.sweep_record import PlannedRun

#: Typical seconds for importing torch, from fork to first call, and for a cold start.
_IMPORT_SECONDS, _START_SECONDS, _COLD_START_SECONDS = 5.0, 1.5, 5.0
#: Typical seconds for timing a point's layers, and for a profile.
_LAYERS_SECONDS, _PROFILE_SECONDS = 4.0, 60.0


class Result(msgspec.Struct, kw_only=True):
    """A line from points.jsonl without its samples, which take up most of it.

    Attributes:
        wall_seconds: duration of the measurement; None in records of earlier versions.
    """

    key: Key
    status: Status
    wall_seconds: Seconds | None = None


def measured_seconds(results: Iterable[Result | Point]) -> list[float]:
    """Return the wall time of each timed point that succeeded.

    Remaining times are estimated from their median.
    """
    seconds = []
    for result in results:
        if result.key.is_timed and result.status is Status.OK and result.wall_seconds is not None:
            seconds.append(result.wall_seconds)
    return seconds


def median_seconds(seconds: Sequence[float]) -> float | None:
    """Return the median, or None for an empty sequence."""
    if seconds:
        return statistics.median(seconds)
    return None


def counted_points(*runs: Iterable[Key]) -> str:
    """Return the number of timed points across runs, and their processes, in words.

    For example `1 point in 3 processes` or `10 points, 3 of them in 3 processes`. Headers of runs
    and sweeps show it.
    """
    processes = list[int]()
    for keys in runs:
        points = Counter(without_replicate(key) for key in keys if key.is_timed)
        processes += points.values()
    text = units.counted(len(processes), "point")
    several = sum(number > 1 for number in processes)
    if not several:
        return text
    if several < len(processes):
        text += f", {several} of them"
    return f"{text} in {max(processes)} processes"


def seconds_left(left: Collection[Key], point_seconds: float | None) -> float | None:
    """Estimate the time to measure points, including loading and cold starts.

    Args:
        left: points without a result.
        point_seconds: time per timed point; None if unknown.

    Returns:
        Seconds; None if unknown.
    """
    timed = [key for key in left if key.is_timed]
    layers = list(filter(is_layers, left))
    num_profiles = sum(map(is_profile, left))
    if timed and point_seconds is None:
        return None
    workers = {key.replicate for key in (*timed, *layers)}
    seconds = len(timed) * (point_seconds or 0.0)
    if workers:
        seconds += _IMPORT_SECONDS + len(workers) * _START_SECONDS
    num_cold_starts = len(left) - len(timed) - len(layers) - num_profiles
    seconds += num_cold_starts * _COLD_START_SECONDS + len(layers) * _LAYERS_SECONDS
    return seconds + num_profiles * _PROFILE_SECONDS


_TIMED, _COLD_START, _LAYERS, _PROFILE = "timed", "first prediction", "layers", "profile"


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """The progress of one run.

    Attributes:
        results: points that have a result.
        expected: the run's points; None if unknown.
        point_seconds: time per timed point, as limited by the run's settings; None if unknown.
        running: whether a process is measuring the run.
        refusal: why the run was refused before any measurement; None if it was not.
        planned: entry in the run's sweep, if the run has not begun.
    """

    folder: Path
    plan: Mapping[str, Any]
    results: Mapping[Key, Result]
    expected: frozenset[Key] | None
    point_seconds: float | None = None
    running: bool = False
    refusal: str | None = None
    planned: PlannedRun | None = None

    @cached_property
    def about(self) -> Subject:
        """Return the names of model, algorithm, mode and precision."""
        return subject(self.plan)

    @property
    def gpu(self) -> str:
        """Return the configured device's name.

        Times are only transferred between runs on the same device.
        """
        node = self.plan.get("gpu")
        name = node.get("name") if isinstance(node, Mapping) else node
        return one_line(str(name or "unknown"))


@dataclass(kw_only=True)
class Tally:
    """Point counts across runs. Points in refused runs do not count.

    Attributes:
        points: counts by kind of point and status. Status None counts points without a result.
        is_known: whether all runs' expected points are known.
        running: number of runs that a process is measuring.
        refused: number of refused runs.
        left_seconds: estimated time for points without a result; None if unknown.
    """

    points: dict[str, Counter[Status | None]] = field(default_factory=lambda: defaultdict(Counter))
    is_known: bool = True
    running: int = 0
    refused: int = 0
    left_seconds: float | None = 0.0

    def add_seconds(self, seconds: float | None) -> None:
        """Add a run's estimated time. The sum becomes unknown as soon as a summand is."""
        if self.left_seconds is None or seconds is None:
            self.left_seconds = None
        else:
            self.left_seconds += seconds

    @property
    def complete(self) -> bool:
        """Return whether all expected points are known and have succeeded.

        `perfexp status` exits with 0 only then.
        """
        statuses = set().union(*self.points.values())
        return statuses <= {Status.OK} and self.is_known and not (self.running or self.refused)

    def by_status(self) -> dict[str, int]:
        """Return counts by status, for timed points, profiles and other points together."""
        total = sum(self.points.values(), Counter[Status | None]())
        return {status.value if status else "missing": count for status, count in total.items()}

    def __str__(self) -> str:
        """Return the tally in words, e.g. `97/100 done, 2 oom, 1 missing, ~3 min 20 s left`."""
        timed = self.points[_TIMED]
        main = timed
        if self.is_known and not timed:
            main = self.points[_PROFILE]
        parts = list[str]()
        if main or not self.refused:
            total = " done, total unknown"
            if self.is_known:
                total = f"/{main.total()} done"
            parts.append(f"{main[Status.OK]}{total}")
        parts += [f"{count} {name}" for name, count in _failures(timed)]
        for kind in (_COLD_START, _LAYERS, _PROFILE):
            for name, count in _failures(self.points[kind]):
                if name == "missing" and timed[None]:
                    continue  # implied by missing timed points
                parts.append(f"{kind} {name} ({count})" if count > 1 else f"{kind} {name}")
        if self.refused:
            parts.append(f"{units.counted(self.refused, 'run')} refused")
        if self.running:
            parts.append("running")
        if "missing" in self.by_status() and self.left_seconds is not None:
            parts.append(f"~{units.format_seconds(self.left_seconds, 2)} left")
        return ", ".join(parts)


def results(text: bytes) -> dict[Key, Result]:
    """Return the results in a points.jsonl, by point.

    Args:
        text: content of the file.

    Raises:
        UserError: a line before the last cannot be read.
    """
    return {result.key: result for result in points_from_lines(text, Result)}


def refusal(path: Path) -> str | None:
    """Read why a run's last worker refused to start or continue, from `refused.txt`.

    None if it did not refuse.
    """
    try:
        return one_line(foreign.read_bytes(path).decode(errors="replace").strip()) or None
    except OSError:
        return None


class Pace:
    """Time per timed point.

    It is measured in the same run, or limited by the run's settings, or measured in other runs.
    """

    def __init__(self, runs: Sequence[RunProgress]) -> None:
        seconds: dict[tuple[Subject, str] | None, list[float]] = {}
        for run in runs:
            for kind in (None, (run.about, run.gpu)):
                seconds.setdefault(kind, []).extend(measured_seconds(run.results.values()))
        self._medians = {kind: median_seconds(values) for kind, values in seconds.items()}

    def seconds_planned(self, run: RunProgress, planned: PlannedRun) -> float | None:
        """Return the estimated seconds for a run that has not begun; None if unknown.

        The sweep's own estimate comes first, otherwise the pace of other runs.
        """
        point_seconds = self._medians.get((run.about, run.gpu)) or self._medians.get(None)
        if planned.seconds is not None or point_seconds is None:
            return planned.seconds
        return _IMPORT_SECONDS + _START_SECONDS + planned.points.get(_TIMED, 0) * point_seconds

    def seconds_left(self, run: RunProgress, left: Collection[Key]) -> float | None:
        """Return the estimated seconds for a run's points without a result; None if unknown.

        Args:
            left: these points.
        """
        candidates = (
            median_seconds(measured_seconds(run.results.values())),
            run.point_seconds,
            self._medians.get((run.about, run.gpu)),
        )
        for seconds in candidates:
            if seconds is not None:
                return seconds_left(left, seconds)
        return seconds_left(left, self._medians.get(None))


def tally(runs: Sequence[RunProgress], pace: Pace) -> Tally:
    """Return the points of several runs, counted by kind and status, with the remaining time.

    Each cell of `perfexp status` is such a tally.
    """
    total = Tally()
    for run in runs:
        if run.refusal is not None:
            total.refused += 1
            continue
        if run.planned is not None:
            for kind, number in run.planned.points.items():
                total.points[kind][None] += number
            total.add_seconds(pace.seconds_planned(run, run.planned))
            continue
        keys = run.results.keys() if run.expected is None else run.expected
        for key in keys:
            result = run.results.get(key)
            total.points[_kind(key)][result.status if result else None] += 1
        total.running += run.running
        total.is_known &= run.expected is not None
        if left := keys - run.results.keys():
            total.add_seconds(pace.seconds_left(run, left))
    return total


def matrix(runs: Sequence[RunProgress], pace: Pace) -> Grid:
    """Return a table of tallies of a folder's runs: models down, algorithms across.

    Precision, mode and device appear only if they vary.
    """
    rows: dict[tuple[str, ...], dict[str, list[RunProgress]]] = {}
    fields = ["model"]
    for name in ("precision", "mode"):
        if len({getattr(run.about, name) for run in runs}) > 1:
            fields.append(name)
    has_devices = len({run.gpu for run in runs}) > 1
    for run in runs:
        row = tuple(getattr(run.about, name) for name in fields)
        column = f"{run.about.algorithm} · {run.gpu}" if has_devices else run.about.algorithm
        rows.setdefault(row, {}).setdefault(column, []).append(run)
    names, cells = zip(*sorted(rows.items()), strict=True)
    columns = []
    for title, words in zip(fields, zip(*names, strict=True), strict=True):
        columns.append(Column(title, words, prose=True))
    for title in sorted(set().union(*cells)):
        texts = [str(tally(row[title], pace)) if title in row else "" for row in cells]
        columns.append(Column(title, texts, prose=True))
    return Grid(columns)


def points_by_kind(keys: Iterable[Key]) -> Counter[str]:
    """Return the number of points of each kind: timed, first prediction, layers, profile.

    A sweep stores them for each planned run, so that its status is known before runs begin.
    """
    return Counter(map(_kind, keys))


def _failures(counter: Counter[Status | None]) -> list[tuple[str, int]]:
    """Return statuses other than ok with their counts; points without a result are `missing`."""
    failures = []
    for status in (*Status, None):
        if status is not Status.OK and counter[status]:
            failures.append((status.value if status else "missing", counter[status]))
    return failures


def _kind(key: Key) -> str:
    """Return the kind of a point for a tally."""
    if is_profile(key):
        return _PROFILE
    if is_layers(key):
        return _LAYERS
    if key.is_timed:
        return _TIMED
    return _COLD_START
