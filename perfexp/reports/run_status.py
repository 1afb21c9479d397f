"""Standing: how far runs have come, from the results that they left and the points that their plans expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from perfexp import stopping, sweep
from perfexp.errors import UserError
from perfexp.host import untrusted
from perfexp.plan import estimate
from perfexp.profilers import Settings, is_profile
from perfexp.records import units
from perfexp.records.record import Key, Status, is_layers, layers_key
from perfexp.summaries.grid import Column, Grid
from perfexp.summaries.subject import Subject, one_line, subject

#: The sweeps whose points can be counted; what else a plan may name is code, and a plan that is read is data.
_COUNTED: dict[str, Callable[..., sweep.Sweep]] = {
    "perfexp.sweep.Point": sweep.Point,
    "perfexp.sweep.Sizes": sweep.Sizes,
    "perfexp.sweep.BatchSizes": sweep.BatchSizes,
}
#: Likewise the stopping rules.
_RULES: dict[str, Callable[..., stopping.StoppingRule]] = {
    "perfexp.stopping.Precision": stopping.Precision,
    "perfexp.stopping.Fixed": stopping.Fixed,
}
_FIRST = "ttfp"
#: Whose profiles can be counted, likewise; the last one only marks a call.
_MARKS = "perfexp.profilers.nvtx.Nvtx"
_PROFILERS = ("perfexp.profilers.nsys.Nsys", "perfexp.profilers.ncu.Ncu", "perfexp.profilers.kineto.Torch", _MARKS)


class Result(msgspec.Struct, kw_only=True):
    """What counts of a line of points.jsonl; the samples, which are most of it, are passed over.

    Attributes:
        key: which point.
        status: how it ended.
        wall_seconds: how long measuring it took.
    """

    key: Key
    status: Status
    wall_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, whatever has become of it.

    Attributes:
        folder: where it lies.
        about: what it measures.
        gpu: what its device is called in the configuration.
        expected: all its points, those of the first prediction too; None where that can't be known.
        results: what there is of them.
        running: whether a process is measuring it.
        plan: as plain data.
        refusal: why it was refused before it measured anything; None where it was not.
    """

    folder: Path
    about: Subject
    gpu: str
    expected: frozenset[Key] | None
    results: Mapping[Key, Result]
    running: bool
    plan: Mapping[str, Any] = field(default_factory=dict)
    refusal: str | None = None


@dataclass(kw_only=True)
class Tally:
    """The points of some runs, counted.

    Attributes:
        expected: how many points are timed; None where that is not known of all runs.
        statuses: how many of them have ended how.
        first: how many first predictions have ended how.
        missing: how many timed points have no result.
        first_missing: how many first predictions have none.
        layers: how many points' layers have ended how.
        layers_missing: how many have none.
        profiles: how many profiles have ended how.
        profiles_missing: how many have none.
        running: how many of the runs are being measured.
        refused: how many runs were refused; their points are not among the others.
        left_seconds: about how long what is missing takes, or None where it is unknown.
    """

    expected: int | None = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    first: Counter[Status] = field(default_factory=Counter)
    missing: int = 0
    first_missing: int = 0
    layers: Counter[Status] = field(default_factory=Counter)
    layers_missing: int = 0
    profiles: Counter[Status] = field(default_factory=Counter)
    profiles_missing: int = 0
    running: int = 0
    refused: int = 0
    left_seconds: float | None = 0.0

    @property
    def complete(self) -> bool:
        """Whether every point is known to have been measured well, and every profile made that was asked for."""
        ended = set().union(self.statuses, self.first, self.layers, self.profiles)
        return ended <= {Status.OK} and self.expected is not None and not (self._left or self.running or self.refused)

    @property
    def _left(self) -> int:
        """How much of anything has no result."""
        return self.missing + self.first_missing + self.layers_missing + self.profiles_missing

    def __str__(self) -> str:
        """`97/100 done, 2 oom, 1 missing, ~3 min 20 s left`."""
        done = self.statuses[Status.OK], "?" if self.expected is None else self.expected
        if self.expected == 0 and (marked := self.profiles.total() + self.profiles_missing):  # nothing was to be timed
            done = self.profiles[Status.OK], marked
        parts = [f"{done[0]}/{done[1]} done"] if done != (0, 0) or not self.refused else []
        parts += [f"{count} {status.value}" for status, count in _bad(self.statuses)]
        parts += [f"{self.missing} missing"] if self.missing else []
        for name, statuses, missing in (
            ("first prediction", self.first, self.first_missing),
            ("layers", self.layers, self.layers_missing),
            ("profile", self.profiles, self.profiles_missing),
        ):
            found = [(status.value, count) for status, count in _bad(statuses)]
            found += [("missing", missing)] if missing and not self.missing else []  # otherwise it goes without saying
            parts += [f"{name} {what}" + (f" ({count})" if count > 1 else "") for what, count in found]
        parts += [f"{units.counted(self.refused, 'run')} refused"] if self.refused else []
        parts += ["running"] if self.running else []
        if self._left and self.left_seconds is not None:
            parts.append(f"~{units.format_seconds(self.left_seconds, 2)} left")
        return ", ".join(parts)


def results(text: bytes) -> dict[Key, Result]:
    """The results in a points.jsonl; a last line that is being written, or was cut off by a crash, is left out.

    Args:
        text: of the file.

    Raises:
        UserError: a line before the last one can't be read.
    """
    decoder, lines = msgspec.json.Decoder(Result), text.split(b"\n")
    try:
        found = [decoder.decode(line) for line in lines[:-1] if line.strip()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"points.jsonl holds a line that is no point: {error}.") from error
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found.append(decoder.decode(lines[-1]))
    return {result.key: result for result in found}


def refusal(path: Path) -> str | None:
    """Why the last worker of a run refused to begin, or to go on; None where it did not.

    Args:
        path: `refused.txt` of the run, which only such a run has.
    """
    try:
        return one_line(untrusted.read_bytes(path).decode(errors="replace").strip()) or None
    except OSError:
        return None


def expected(plan: Mapping[str, Any]) -> frozenset[Key] | None:
    """The points of a plan that is read back; nothing that it names is run.

    Args:
        plan: as plain data.

    Returns:
        All points, first predictions and profiles too, but for those of a profiler that is not one of perfexp's own;
        None where its sweep is not.

    Raises:
        UserError: it is a plan that perfexp refuses to measure.
    """
    try:
        if any(not 0 < percentile < 100 for percentile in plan.get("percentiles") or ()):
            raise UserError(f"percentiles={one_line(str(plan['percentiles']))}: each lies between 0 and 100.")
        settings = dict(plan["sweep"])
        timed = sweep.timed_keys(
            _COUNTED[settings.pop("_target_")](**settings),
            plan["input_size"],
            plan["batch_size"],
            phases=[phase for phase in ("train", "inference") if plan["mode"][phase] is not None],
            precision=plan["precision"]["name"],
            replicate=plan["replicate"],
        )
    except (KeyError, TypeError, ValueError):
        return None
    first: dict[int, Key] = {}
    for key in timed:
        if key.phase == "inference" and plan.get("ttfp"):
            first.setdefault(key.replicate, msgspec.structs.replace(key, phase=_FIRST))
    looked_into = (plan.get("probes") or {}).get("layers")
    layers = [layers_key(key) for key in timed if looked_into and key.replicate == 0]
    profiler = _profiler(plan)
    counted = profiler.get("_target_") in _PROFILERS
    profiles = Settings.chosen_of(timed, all_points=bool(profiler.get("all_points"))) if counted else []
    if profiler.get("_target_") == _MARKS:  # nothing is timed
        return frozenset(profiles)
    return frozenset([*timed, *first.values(), *layers, *profiles])


def run(
    folder: Path,
    plan: Mapping[str, Any],
    *,
    keys: frozenset[Key] | None,
    known: Mapping[Key, Result],
    running: bool,
    refusal: str | None = None,
) -> Run:
    """One run from what is in its folder.

    Args:
        folder: where it lies.
        plan: as plain data.
        keys: all its points, from `expected` or from its record.
        known: from `results`.
        running: whether a process is measuring it.
        refusal: why it was refused before it measured anything; None where it was not.
    """
    profiler, gpu = _profiler(plan), plan.get("gpu")
    if keys is not None:  # what only other commands asked for is no part of this run
        keys = frozenset(key for key in keys if profiler or not is_profile(key))
        keys |= {key for key in known if (is_profile(key) and profiler) or profiler.get("_target_") == _MARKS}
    name = one_line(str((gpu.get("name") if isinstance(gpu, Mapping) else gpu) or "unknown"))
    return Run(
        folder=folder,
        about=subject(plan),
        gpu=name,
        expected=keys,
        results=known,
        running=running,
        plan=plan,
        refusal=refusal,
    )


class Pace:
    """How long a run goes on: as its header says, by its own points or its settings.

    Where neither tells, timed points take as long as those of all runs that measure the same, else of all.

    Args:
        runs: all that there are.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self._seconds: dict[tuple[Subject, str] | None, list[float]] = {}
        for run in runs:
            for kind in (None, (run.about, run.gpu)):
                self._seconds.setdefault(kind, []).extend(estimate.measured_seconds(run.results.values()))

    def seconds_left(self, run: Run, left: Collection[Key]) -> float | None:
        """Seconds until everything is measured; None where it is unknown.

        Args:
            run: one of them.
            left: what has no result yet.
        """
        own = estimate.pace(estimate.measured_seconds(run.results.values()))
        others = (estimate.pace(self._seconds[kind]) for kind in ((run.about, run.gpu), None))
        series = _series_seconds(run.plan.get("stopping"))
        with suppress(TypeError, ValueError):  # a plan of a stranger's
            found = (
                estimate.seconds_left(run.plan, left, series_seconds=series, point_seconds=seconds)
                for seconds in (own, *others)
            )
            return next((seconds for seconds in found if seconds is not None), None)
        return None


def tally(runs: Sequence[Run], pace: Pace) -> Tally:
    """Count the points of some runs.

    Args:
        runs: any of those that the pace knows.
        pace: what tells how long those take that are missing.
    """
    total = Tally()
    for run in runs:
        if run.refusal is not None:
            total.refused += 1
            continue
        keys = run.results.keys() if run.expected is None else run.expected
        for key in keys:
            _count(total, key, run.results.get(key))
        total.running += run.running
        if run.expected is None:
            total.expected = None
        elif total.expected is not None:
            total.expected += len(_timed(run.expected))
        if left := keys - run.results.keys():
            seconds = pace.seconds_left(run, left)
            known = total.left_seconds is not None and seconds is not None
            total.left_seconds = (total.left_seconds or 0.0) + (seconds or 0.0) if known else None
    return total


def matrix(runs: Sequence[Run], pace: Pace) -> Grid:
    """Models down, algorithms across; precision, mode and device where they vary.

    Args:
        runs: those of one folder; at least one.
        pace: see `tally`.
    """
    rows: dict[tuple[str, ...], dict[str, list[Run]]] = {}
    fields = [name for name in ("precision", "mode") if len({getattr(run.about, name) for run in runs}) > 1]
    devices = len({run.gpu for run in runs}) > 1
    for run in runs:
        row = (run.about.model, *(getattr(run.about, name) for name in fields))
        column = f"{run.about.algorithm} · {run.gpu}" if devices else run.about.algorithm
        rows.setdefault(row, {}).setdefault(column, []).append(run)
    titles = sorted({column for row in rows.values() for column in row})
    order = sorted(rows)
    return Grid(
        columns=(
            *(
                Column(title=title, cells=tuple(row[index] for row in order), prose=True)
                for index, title in enumerate(("model", *fields))
            ),
            *(
                Column(title=title, cells=tuple(_cell(rows[row].get(title), pace) for row in order), prose=True)
                for title in titles
            ),
        )
    )


def _profiler(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """What looks on afterwards; nothing where nobody does."""
    node = plan.get("profiler")
    return node if isinstance(node, Mapping) and node.get("name", "none") != "none" else {}


def _bad(statuses: Counter[Status]) -> list[tuple[Status, int]]:
    """How often each status occurs that is not good, in the order of `Status`."""
    return [(status, statuses[status]) for status in Status if status is not Status.OK and statuses[status]]


def _count(total: Tally, key: Key, result: Result | None) -> None:
    if is_profile(key):
        statuses = total.profiles
        total.profiles_missing += result is None
    elif is_layers(key):
        statuses = total.layers
        total.layers_missing += result is None
    elif key.is_timed:
        statuses = total.statuses
        total.missing += result is None
    else:
        statuses = total.first
        total.first_missing += result is None
    if result is not None:
        statuses[result.status] += 1


def _timed(keys: Collection[Key]) -> list[Key]:
    return [key for key in keys if key.is_timed]


def _series_seconds(node: Any) -> float | None:
    """About how long one of perfexp's own stopping rules lets a series take; None of others, which are code."""
    if not isinstance(node, Mapping) or node.get("_target_") not in _RULES:
        return None
    settings = {name: value for name, value in node.items() if name != "_target_"}
    with suppress(UserError, TypeError):
        return _RULES[node["_target_"]](**settings).longest_seconds()
    return None


def _cell(runs: Sequence[Run] | None, pace: Pace) -> str:
    return str(tally(runs, pace)) if runs else ""
