"""Cold starts: the time from the start of a process to its first prediction."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from perfexp.records.point_times import series_of
from perfexp.records.record import Key, Point, Record, Status
from perfexp.statistics import estimators
from perfexp.statistics.moderated import geometric_mean

#: Series of a cold start that is not part of the first prediction.
AFTERWARDS = "ttfp/second_call"


@dataclass(frozen=True, kw_only=True)
class FirstPrediction:
    """Cold start: time to first prediction of fresh processes.

    Attributes:
        parts: median seconds of the parts over the processes: `process` (its start), `imports`, `context`, `data`,
            `weights`, `inputs`, `first_call`, and `second_call` after it.
        totals: wall time from the start of each process to its first prediction, waits for the device left out, in
            seconds.
    """

    key: Key
    parts: dict[str, float]
    totals: tuple[float, ...]

    @property
    def total(self) -> estimators.Interval:
        """Their mean, with an interval for several processes."""
        return geometric_mean(self.totals)

    @property
    def processes(self) -> int:
        """Number of processes."""
        return len(self.totals)


def first_predictions(record: Record) -> list[FirstPrediction]:
    """The cold starts of a record, one per size and batch size."""
    groups: dict[tuple[tuple[int, int], int], list[Point]] = {}
    for point in record.points:
        if point.key.phase == "ttfp" and point.status is Status.OK:
            groups.setdefault((point.key.input_size, point.key.batch_size), []).append(point)
    found = []
    for points in groups.values():
        names = [series.name for series in points[0].series]
        parts = {
            name.removeprefix("ttfp/"): statistics.median(
                sample for point in points for sample in series_of(point, name).samples
            )
            for name in names
        }
        totals = (
            sum(series.samples[0] for series in point.series if series.name != AFTERWARDS)
            for point in points
        )
        found.append(FirstPrediction(key=points[0].key, parts=parts, totals=tuple(totals)))
    return found
