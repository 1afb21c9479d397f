"""list runs: the runs and sweeps below a folder, read from their records; the last of them is what `show` shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import msgspec

from perfexp.commands.app import PLAN, RECORD, SWEEP, echo, emit
from perfexp.diagnosis.environment import fact_at
from perfexp.errors import UserError, did_you_mean
from perfexp.host import untrusted
from perfexp.plan import plan_file
from perfexp.records import folders, old_names, units
from perfexp.records.paths import RunPaths
from perfexp.records.record import Count, Key, Seconds, Status, without_replicate
from perfexp.records.summary import TIME_KINDS
from perfexp.records.sweep_record import Sweep
from perfexp.reports.overview import CAPTIONS
from perfexp.summaries.grid import Column, Grid, Section
from perfexp.summaries.subject import headline, one_line, subject

OUTPUTS = Path("outputs")
_AGE = re.compile(r"(\d+)([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class _Series(msgspec.Struct):
    name: str
    samples: list[Seconds]
    warmup: Count = 0


class _Point(msgspec.Struct):
    key: Key
    series: list[_Series] = []


class _Membership(msgspec.Struct):
    uid: str | None = None


class _Run(msgspec.Struct):
    """The parts of a record.json that are listed; its points are decoded when their figures are needed."""

    ended: Annotated[datetime, msgspec.Meta(tz=True)]
    status: Status
    plan: dict[str, Any]
    points: msgspec.Raw = msgspec.Raw(b"[]")
    sweep: _Membership | None = None

    def times(self) -> tuple[list[Key], str, list[float]]:
        """Return the timed points, the name of the time that represents them, and its medians in seconds.

        The median of several processes is the geometric mean of their medians.
        """
        try:
            points = [point for point in msgspec.json.decode(self.points, type=list[_Point]) if point.key.is_timed]
        except untrusted.DECODING_ERRORS as error:
            _report(error)
            points = []
        measured = {series.name for point in points for series in point.series}
        kind = next((name for name in TIME_KINDS if name in measured), "")
        medians: dict[Key, list[float]] = {}
        for point in points:
            for series in point.series:
                samples = series.samples[series.warmup :]
                if series.name == kind and samples and median(samples):
                    medians.setdefault(without_replicate(point.key), []).append(median(samples))
        return [point.key for point in points], kind, [geometric_mean(own) for own in medians.values()]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A run, or a sweep (`name`) with its runs; `ended` is when its last measurement ended."""

    folder: Path
    runs: tuple[_Run, ...]
    name: str = ""
    jobs: int | None = None

    @property
    def ended(self) -> datetime:
        """When the last run ended."""
        return max(run.ended for run in self.runs)

    @property
    def status(self) -> str:
        """How it ended: `ok`, `running`, `2 of 4 ok, 1 oom`."""
        counts = Counter(run.status.value for run in self.runs)
        if any(run.status is Status.INTERRUPTED for run in self.runs) and RunPaths(self.folder).in_use():
            return "running"
        if len(counts) == 1 and (not self.name or len(self.runs) == self.jobs):
            return next(iter(counts))
        others = [f"{number} {status}" for status, number in counts.items() if status != Status.OK.value]
        return ", ".join([f"{counts[Status.OK.value]} of {self.jobs or len(self.runs)} ok", *others])

    def facts(self) -> dict[str, Any]:
        """What is listed: folder, end, what was measured, the median time or the range of several, and the status."""
        times = [run.times() for run in self.runs]
        medians = sorted(value for _, _, values in times for value in values)
        kinds = dict.fromkeys(CAPTIONS[kind] for _, kind, values in times if values)
        return {
            "ended": self.ended.isoformat(timespec="seconds"),
            "folder": str(self.folder),
            "measured": self.name or headline(subject(self.runs[0].plan), times[0][0]),
            "time_kind": " or ".join(kinds),
            "least_seconds": medians[0] if medians else None,
            "most_seconds": medians[-1] if medians else None,
            "status": self.status,
        }


def show(words: Sequence[str], since: str | None, *, as_json: bool) -> None:
    """Print the runs and sweeps below a folder, the last one at the end.

    Args:
        words: the folder, if it is not `outputs`, and KEY=VALUE that the plans of the runs have.
        since: age of the oldest run, such as `7d`.
    """
    places = [Path(word) for word in words if "=" not in word]
    if len(places) > 1:
        raise UserError(f"list runs reads one folder: leave out {places[1]}.")
    folder = places[0] if places else OUTPUTS
    earliest = datetime.now(UTC) - _age(since) if since else datetime.min.replace(tzinfo=UTC)
    wanted = dict(word.split("=", 1) for word in words if "=" in word)
    lines = [one.facts() for one in find(folder, wanted) if one.ended >= earliest]
    emit({"runs": lines}, [Section("", _table(lines))] if lines else [f"no runs in {folder}"], as_json=as_json)


def last() -> Path:
    """Return the folder of the run or sweep in `outputs` that ended last; raises UserError without any record."""
    finished = [one for one in find(OUTPUTS) if any(bytes(run.points) != b"[]" for run in one.runs)]
    if not finished:
        raise UserError(f"There is no record in {OUTPUTS}: measure something, or name a folder.")
    return finished[-1].folder


def find(folder: Path, wanted: Mapping[str, str] = {}) -> list[Found]:
    """Return the runs and sweeps below a folder by their end; those without any of the `wanted` values are left out."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Name one that perfexp wrote to.")
    files = list(folders.below(folder, RECORD, PLAN, SWEEP, refused=_report))
    runs, sweeps = dict[Path, _Run](), dict[str | None, tuple[Sweep, Path]]()
    for file in files:
        place = file.parent
        try:
            if file.name == SWEEP:
                sweep = Sweep.load(place)
                sweeps[sweep.uid] = sweep, place
            elif place not in runs:  # a record comes before the plan beside it
                runs[place] = _recorded(file) if file.name == RECORD else _begun(file)
        except (UserError, OSError, *untrusted.DECODING_ERRORS) as error:
            _report(error, file)
    _refuse_unknown(wanted, list(runs.values()))
    found, members = list[Found](), dict[str | None, list[_Run]]()
    for place, run in runs.items():
        if all(_has(run.plan, key, values) for key, values in wanted.items()):
            if run.sweep is not None and run.sweep.uid in sweeps:
                members.setdefault(run.sweep.uid, []).append(run)
            else:
                found.append(Found(folder=place, runs=(run,)))
    for uid, own in members.items():
        sweep, place = sweeps[uid]
        found.append(Found(folder=place, runs=tuple(own), name=f"sweep over {one_line(sweep.name)}", jobs=sweep.jobs))
    return sorted(found, key=lambda one: one.ended)


def _recorded(file: Path) -> _Run:
    run = untrusted.from_json(untrusted.read_bytes(file), _Run)
    run.plan = old_names.plan_of_today(run.plan)
    return run


def _begun(file: Path) -> _Run:
    """A run without a record: it is being measured, or was interrupted."""
    changed = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    membership = _Membership(RunPaths(file.parent).sweep)
    return _Run(ended=changed, status=Status.INTERRUPTED, plan=plan_file.read(file), sweep=membership)


def _has(plan: dict[str, Any], key: str, values: str) -> bool:
    """Whether a plan has one of some values with commas, which may be patterns: `resnet*,vgg16`."""
    node = fact_at(plan, key)
    value = node.get("name") if isinstance(node, Mapping) else node
    texts = map(str, value if isinstance(value, list) else [value])
    return any(fnmatchcase(text.lower(), one.lower()) for text in texts for one in values.split(","))


def _refuse_unknown(wanted: Mapping[str, str], runs: Sequence[_Run]) -> None:
    keys = {key for run in runs for key in run.plan}
    for key in wanted:
        if keys and key.partition(".")[0] not in keys:
            raise UserError(f"No plan has the key '{key}'. {did_you_mean(key, keys)}".rstrip())


def _table(lines: Sequence[Mapping[str, Any]]) -> Grid:
    ended = [datetime.fromisoformat(line["ended"]).astimezone().strftime("%Y-%m-%d %H:%M") for line in lines]
    titles = ("folder", "measured")
    return Grid(
        [
            Column("ended", ended),
            *(Column(title, [one_line(line[title]) for line in lines], prose=True) for title in titles),
            Column("median time", map(_figure, lines), prose=True),
            Column("status", [line["status"] for line in lines], prose=True),
        ]
    )


def _figure(line: Mapping[str, Any]) -> str:
    if line["least_seconds"] is None:
        return ""
    ends = [units.format_seconds(seconds, 3) for seconds in (line["least_seconds"], line["most_seconds"])]
    return f"{line['time_kind']} {' … '.join(dict.fromkeys(ends))}"


def _age(text: str) -> timedelta:
    match = _AGE.fullmatch(text)
    if not match:
        raise UserError(f"--since {text!r} is not an age; give for example 12h, 7d or 2w.")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _report(error: Exception, file: Path | None = None) -> None:
    echo(f"unreadable  {file or ''} {error}", err=True)
