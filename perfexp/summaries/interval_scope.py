"""Interval scope: whom the ± of a table holds for, this machine or one process, as notes below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from perfexp.records import units
from perfexp.records.summary import Row
from perfexp.statistics import variance
from perfexp.summaries.wording import ANOTHER_RUN, up_to

_TWO_PROCESSES = "two processes predict little of a third: the interval is ± 12.7 standard errors; of five it is ± 2.8"


def scope_notes(rows: Iterable[Row]) -> list[str]:
    """Return whom the ± of rows holds for: a line for each kind of row, which counts its rows if there are others."""
    kinds = _by_scope(rows)
    timed = [row for of_kind in kinds.values() for row in of_kind]
    return [
        text(timed if text is _of_points else of_kind, _where(of_kind, timed) if len(kinds) > 1 else "")
        for text, of_kind in kinds.items()
    ]


def _where(rows: Sequence[Row], all_rows: Sequence[Row]) -> str:
    return f" at {len(rows)} of {len(all_rows)} points"


def scope_text(rows: Iterable[Row]) -> str:
    """Return whom the intervals of a plot hold for: `one process`, `1 to 3 processes`, `this machine`; empty for none.

    Intervals that were widened by earlier runs, other points or a selfcheck are of this machine.
    """
    kinds = _by_scope(rows)
    counts = sorted(row.processes for kind, of_kind in kinds.items() if kind not in _WIDENED for row in of_kind)
    words = []
    if counts:
        least, most = counts[0], counts[-1]
        words.append("one process" if most == 1 else f"{f'{least} to ' if least < most else ''}{most} processes")
    if kinds.keys() & _WIDENED:
        words.append("this machine")
    return " or ".join(words)


def _by_scope(rows: Iterable[Row]) -> dict[Callable[[Sequence[Row], str], str], list[Row]]:
    """The rows with intervals by the words for whom these hold, the least scope first."""
    kinds: dict[Callable[[Sequence[Row], str], str], list[Row]] = {kind: [] for kind in _SCOPES}
    for row in rows:
        if row.time and (row.time.median.low is not None or _has_rate_interval(row)):
            kinds[_scope_of(row)].append(row)
    if kinds[_of_points]:  # the points of several processes by which the others were widened
        kinds[_of_points] += kinds.pop(_of_processes)
    return {kind: of_kind for kind, of_kind in kinds.items() if of_kind}


def _has_rate_interval(row: Row) -> bool:
    rate = row.samples_per_second
    return rate is not None and rate.low is not None


def _scope_of(row: Row) -> Callable[[Sequence[Row], str], str]:
    """The words for whom the ± of a row holds for."""
    if row.unfinished:
        return _of_unfinished
    if row.runs + 1 >= variance.LEAST_RUNS or (row.runs and row.processes == 1):
        return _of_runs
    if row.processes > 1:
        return _of_processes
    if not row.is_pooled:
        return _of_one_process
    return _of_selfcheck if row.selfcheck else _of_points


def _of_unfinished(rows: Sequence[Row], where: str) -> str:
    fewest = min(rows, key=lambda row: row.processes)
    few = f"; {_TWO_PROCESSES}" if fewest.processes == 2 else ""
    planned = fewest.processes + fewest.unfinished
    again = "repeat perfexp ab with output_dir=DIR to continue" if fewest.in_turn else "continue with resume=DIR"
    return f"± {fewest.processes} of {planned} processes{where}: {again}{few}"


def _of_one_process(rows: Sequence[Row], where: str) -> str:
    host = ", above all in latency and samples/s" if any("device" in row.times for row in rows) else ""
    return f"± one process{where}: {ANOTHER_RUN}{host} (replicate=3)"


def _of_runs(rows: Sequence[Row], where: str) -> str:
    earlier, spread = units.counted(min(row.runs for row in rows), "earlier run"), _spread_text(rows)
    processes = f" and its processes{spread}" if spread else " and its one process"
    if min(row.runs for row in rows) + 1 < variance.LEAST_RUNS:  # variance between runs enters from the third on
        return f"{_at_present(where)}, by {earlier} of its plan{processes}"
    return f"± this machine{where}: mean over runs of this command, by {earlier} of its plan{processes}"


def _of_selfcheck(rows: Sequence[Row], where: str) -> str:
    dates = " and ".join(dict.fromkeys(row.selfcheck for row in rows if row.selfcheck))
    return f"{_at_present(where)}, which differ as in its selfcheck of {dates}"


def _of_points(rows: Sequence[Row], where: str) -> str:
    """The words for points of one process; `rows` are all, of which those of several processes widened them."""
    anchors = [row for row in rows if row.processes > 1]
    points = f"{units.counted(len(anchors), 'point')} with several{_spread_text(anchors)}"
    return f"{_at_present(where)}, which differ as at {points}"


def _of_processes(rows: Sequence[Row], where: str) -> str:
    counts = " or ".join(map(str, sorted({row.processes for row in rows})))
    runs = min(row.runs for row in rows)
    few = f"; {_TWO_PROCESSES}" if counts == "2" and not runs else ""
    more = f", and {units.counted(runs, 'earlier run')}" if runs else ""
    of_run = f"{counts} processes{_spread_text(rows)}{more}"
    return f"{_at_present(where)} ({of_run}){few}"


def _at_present(where: str) -> str:
    """The words for intervals that include how processes differ, but not how runs of other times do."""
    return f"± this machine{where}, at present: mean over processes"


#: Whom intervals hold for, the least first.
_SCOPES = (_of_unfinished, _of_one_process, _of_runs, _of_selfcheck, _of_points, _of_processes)
#: Those of intervals that were widened.
_WIDENED = {_of_runs, _of_selfcheck, _of_points}


def _spread_text(rows: Sequence[Row]) -> str:
    """Return the standard deviation of the processes of the rows, at most over several; empty if unknown."""
    spreads = [row.spread for row in rows if row.spread is not None]
    if not spreads:
        return ""
    kinds = " or ".join(dict.fromkeys(row.time_kind for row in rows if row.spread is not None and row.time_kind))
    if max(spreads) > 1:
        return f", which differ by a factor of {1 + max(spreads):.2g} in {kinds}"
    return f", standard deviation {up_to(spreads)} in {kinds}"
