"""List finished runs and sweeps below a folder, read from their records.

`perfexp list runs` prints them, and `perfexp show` shows the last. Only the listed parts of a
record are parsed, since a folder may hold thousands.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any, NamedTuple

import msgspec

from perfexp.commands.app import PLAN, RECORD, SWEEP, echo, emit, oldest
from perfexp.errors import UserError, did_you_mean
from perfexp.host import foreign
from perfexp.plan import plan_file
from perfexp.records import folders, old_names, units
from perfexp.records.fact_lookup import fact_at
from perfexp.records.grid import Grid, Section
from perfexp.records.paths import RunPaths, home_of
from perfexp.records.record import Count, Key, Seconds, Status, without_replicate
from perfexp.records.subject import headline, one_line, subject
from perfexp.records.summary import TIME_KINDS
from perfexp.records.sweep_record import Sweep
from perfexp.records.wording import range_text
from perfexp.report.overview import CAPTIONS
from perfexp.statistics.estimators import Interval

OUTPUTS = Path("outputs")
#: Width of files and pipes.
_ENDLESS = 10_000


class _Series(msgspec.Struct):
    """Samples of one time, in seconds; the first `warmup` do not count."""

    name: str
    samples: list[Seconds]
    warmup: Count = 0


class _Point(msgspec.Struct):
    """The listed parts of a point."""

    key: Key
    series: list[_Series] = []


class _Membership(msgspec.Struct):
    """The identity of a run's sweep."""

    uid: str | None = None


class _RecordParts(msgspec.Struct):
    """The parts of a record.json that are listed."""

    ended: Annotated[datetime, msgspec.Meta(tz=True)]
    status: Status
    plan: dict[str, Any]
    points: list[_Point] = []
    sweep: _Membership | None = None

    @property
    def timed(self) -> list[_Point]:
        """Return the points with timed calls."""
        return [point for point in self.points if point.key.is_timed]

    def medians(self) -> tuple[str, list[float]]:
        """Return the time kind that represents the run, and its medians in seconds, one per point.

        Several processes give the geometric mean of the process medians.
        """
        measured: set[str] = set()
        medians: dict[tuple[str, Key], list[float]] = {}
        for point in self.timed:
            for series in point.series:
                measured.add(series.name)
                samples = series.samples[series.warmup :]
                if samples and (middle := median(samples)):
                    cell = series.name, without_replicate(point.key)
                    medians.setdefault(cell, []).append(middle)
        kind = next(filter(measured.__contains__, TIME_KINDS), "")
        return kind, [
            geometric_mean(processes) for (name, _), processes in medians.items() if name == kind
        ]


class ListEntry(NamedTuple):
    """A line of the list: a run, or a sweep with its listed runs.

    Attributes:
        ended: end of the last listed run.
        folder: folder of the run or sweep.
        runs: the run, or the sweep's runs.
        sweep: the sweep; None for a run alone.
    """

    ended: datetime
    folder: Path
    runs: list[_RecordParts]
    sweep: Sweep | None = None


def show(words: Sequence[str], since: str | None, *, as_json: bool) -> None:
    """Print the runs and sweeps below a folder, latest last.

    `perfexp list runs` calls it.

    Args:
        words: KEY=VALUE for the plans to list, and the folder unless it is `outputs`.
        since: age of the oldest run, such as `7d`.

    Raises:
        UserError: there are several folders, or a key or age is wrong.
    """
    places = []
    filters = {}
    for word in words:
        key, separator, value = word.partition("=")
        if separator:
            filters[key] = value
        else:
            places.append(Path(word))
    if len(places) > 1:
        raise UserError(f"list runs reads one folder: leave out {places[1]}.")
    folder = places[0] if places else OUTPUTS
    earliest = oldest("--since", since) if since is not None else 0.0
    lines = [
        _facts(entry) for entry in find(folder, filters) if entry.ended.timestamp() >= earliest
    ]
    part: Section | str = f"no runs in {folder}"
    if lines:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _ENDLESS
        part = Section("", content(list(map(_row, lines)), width))
    emit({"runs": lines}, [part], as_json=as_json)


def last() -> Path:
    """Return the folder of the run or sweep in `outputs` that ended last.

    `perfexp show` without a folder shows it.

    Raises:
        UserError: there is no record.
    """
    for entry in reversed(find(OUTPUTS)):
        if any(run.points for run in entry.runs):
            return entry.folder
    raise UserError(f"There is no record in {OUTPUTS}: measure something, or name a folder.")


def find(folder: Path, filters: Mapping[str, str] = {}) -> list[ListEntry]:
    """Return the runs and sweeps below a folder, sorted by their end.

    Unreadable files are reported and skipped. Runs of a sweep share the entry of their sweep.

    Args:
        filters: plan values by key; a run must match all of them.

    Raises:
        UserError: the folder does not exist, or no plan has such a key.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Name one that perfexp wrote to.")
    runs: dict[Path, _RecordParts] = {}
    sweeps: dict[str | None, tuple[Path, Sweep | None]] = {}
    for file in folders.below(folder, RECORD, PLAN, SWEEP, refused=_report):
        run_home = home_of(file)
        try:
            if file.name == SWEEP:
                sweep = Sweep.load(run_home)
                sweeps[sweep.uid] = run_home, sweep
            elif run_home not in runs:  # a record comes before the plan beside it
                runs[run_home] = _recorded(file) if file.name == RECORD else _begun(file)
        except (UserError, OSError, *foreign.DECODING_ERRORS) as error:
            _report(error, file)
    entries: dict[Path, ListEntry] = {}
    keys: set[str] = set()
    for run_home, run in runs.items():
        keys |= run.plan.keys()
        if all(_has(run.plan, key, values) for key, values in filters.items()):
            uid = run.sweep.uid if run.sweep else None
            home, of_sweep = sweeps.get(uid, (run_home, None))
            if of_sweep and filters:  # the number of matching runs is not planned
                of_sweep = msgspec.structs.replace(of_sweep, jobs=None)
            earlier = entries.get(home, ListEntry(run.ended, home, []))
            entries[home] = ListEntry(
                max(run.ended, earlier.ended), home, [*earlier.runs, run], of_sweep
            )
    for key in filters:
        if keys and key.partition(".")[0] not in keys:
            raise UserError(f"No plan has the key '{key}'. {did_you_mean(key, keys)}".rstrip())
    return sorted(entries.values(), key=lambda entry: entry.ended)


def _recorded(file: Path) -> _RecordParts:
    """Return the listed parts of a record.json, with today's key names in its plan."""
    run = foreign.from_json(foreign.read_bytes(file), _RecordParts)
    run.plan = old_names.plan_of_today(run.plan)
    return run


def _begun(file: Path) -> _RecordParts:
    """Return a run without a record, from its plan.yaml: it is in progress or was interrupted."""
    changed = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    membership = _Membership(RunPaths(home_of(file)).sweep)
    return _RecordParts(
        ended=changed, status=Status.INTERRUPTED, plan=plan_file.read(file), sweep=membership
    )


def _has(plan: dict[str, Any], key: str, values: str) -> bool:
    """Return whether a plan has a value that matches.

    Args:
        values: patterns, separated by commas: `resnet*,vgg16`.
    """
    node = fact_at(plan, key)
    value = node.get("name") if isinstance(node, Mapping) else node
    texts = value if isinstance(value, list) else [value]
    pairs = product(texts, values.lower().split(","))
    return any(fnmatchcase(str(text).lower(), pattern) for text, pattern in pairs)


def _facts(entry: ListEntry) -> dict[str, Any]:
    """Return the facts of an entry for JSON: end, folder, subject, times and status.

    The times are the shortest and the longest median, in seconds.
    """
    first = entry.runs[0]
    medians: list[float] = []
    kinds: dict[str, None] = {}
    for run in entry.runs:
        kind, values = run.medians()
        if values:
            kinds[CAPTIONS[kind]] = None
            medians += values
    measured = headline(subject(first.plan), [point.key for point in first.timed])
    return {
        "ended": entry.ended.isoformat(timespec="seconds"),
        "folder": str(entry.folder),
        "measured": f"sweep over {one_line(entry.sweep.name)}" if entry.sweep else measured,
        "time_kind": " or ".join(kinds),
        "least_seconds": min(medians, default=None),
        "most_seconds": max(medians, default=None),
        "status": _status(entry),
    }


def _status(entry: ListEntry) -> str:
    """Return how a run or a sweep ended: `ok`, `running`, `2 of 4 ok, 1 oom`."""
    counts = Counter(run.status.value for run in entry.runs)
    if counts[Status.INTERRUPTED] and RunPaths(entry.folder).in_use():
        return "running"
    if entry.sweep is None:
        return entry.runs[0].status.value
    others = [f"{number} {status}" for status, number in counts.items() if status != Status.OK]
    return ", ".join([f"{counts[Status.OK]} of {entry.sweep.jobs or len(entry.runs)} ok", *others])


def _row(line: Mapping[str, Any]) -> dict[str, str]:
    """Return an entry's facts as a row of the table."""
    ended = datetime.fromisoformat(line["ended"]).astimezone()
    return {
        "ended": f"{ended:%Y-%m-%d %H:%M}",
        "folder": one_line(line["folder"]),
        "measured": line["measured"],
        "median time": _figure(line),
        "status": line["status"],
    }


def content(rows: Sequence[Mapping[str, str]], width: int) -> Grid | list[str]:
    """Return a table of runs, or two lines per run if the table is wider than `width`.

    Files and pipes have no limit on the width.
    """
    grid = Grid.of_rows(rows)
    if grid.whole_width + 2 <= width:
        return grid
    lines = []
    for row in rows:
        others = dict(row)
        lines += [others.pop("folder"), f"  {'  '.join(filter(None, others.values()))}"]
    return lines


def _figure(line: Mapping[str, Any]) -> str:
    """Return an entry's median times as text; empty without times."""
    least, most = line["least_seconds"], line["most_seconds"]
    if least is None:
        return ""
    text = units.format_seconds(least, 3)
    if least != most:
        text = range_text(Interval(value=least, low=least, high=most))
    return f"{line['time_kind']} {text}"


def _report(error: Exception, file: Path | None = None) -> None:
    """Print why a file was skipped."""
    echo(f"unreadable  {file or ''} {error}", err=True)
