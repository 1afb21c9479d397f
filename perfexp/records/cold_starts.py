"""Cold starts: time from process start to first prediction.

A run with `cold_start` measures them in fresh processes, as points with phase `ttfp` and one series
for each part (`ttfp/imports`, …). Reports and the data sheet show them by size and batch size.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from perfexp.records.point_times import series_of
from perfexp.records.record import Key, Point, Record, Status
from perfexp.statistics import estimators
from perfexp.statistics.moderated import geometric_mean

#: Series in a cold start that is not part of the first prediction, for comparison.
AFTERWARDS = "ttfp/second_call"


@dataclass(frozen=True, kw_only=True)
class FirstPrediction:
    """Cold start: time to first prediction in fresh processes.

    Attributes:
        parts: median seconds of each part over the processes: `process` (its start), `imports`,
            `context`, `data`, `weights`, `inputs`, `first_call`, and `second_call` after it.
        totals: each process's wall time from its start to its first prediction, in seconds. Time
            waiting for the device is left out.
    """

    key: Key
    parts: dict[str, float]
    totals: tuple[float, ...]

    @property
    def total(self) -> estimators.Interval:
        """Return the mean total in seconds, with an interval if there are several processes."""
        return geometric_mean(self.totals)

    @property
    def processes(self) -> int:
        """Return the number of processes."""
        return len(self.totals)


def first_predictions(record: Record) -> list[FirstPrediction]:
    """Return a record's cold starts, one per size and batch size; empty if none succeeded.

    `Analysis.cold_starts` keeps the result.
    """
    groups: dict[tuple[tuple[int, int], int], list[Point]] = {}
    for point in record.points:
        if point.key.phase == "ttfp" and point.status is Status.OK:
            groups.setdefault((point.key.input_size, point.key.batch_size), []).append(point)
    predictions = []
    for points in groups.values():
        parts: dict[str, float] = {}
        for series in points[0].series:
            samples = list[float]()
            for point in points:
                samples += series_of(point, series.name).samples
            parts[series.name.removeprefix("ttfp/")] = statistics.median(samples)
        totals = []
        for point in points:
            seconds = (series.samples[0] for series in point.series if series.name != AFTERWARDS)
            totals.append(sum(seconds))
        predictions.append(FirstPrediction(key=points[0].key, parts=parts, totals=tuple(totals)))
    return predictions
