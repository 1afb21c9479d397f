"""Analysis: a record's rows and statistics, computed once for all reports and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from perfexp.records import cold_starts, diagnostics, growth, summary
from perfexp.records.cold_starts import FirstPrediction
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.growth import Scaling, is_clearly_below
from perfexp.records.record import Record
from perfexp.records.summary import Row
from perfexp.records.sweep_record import GPU_COUNT, Sweep, SweepChild
from perfexp.statistics.estimators import Interval
from perfexp.summaries.subject import Subject, headline, subject


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Record with its figures; later changes to the record are not included.

    Attributes:
        about: names of model, algorithm, mode and precision, and the device.
        rows: figures of each timed point, in record order.
        percentiles: percentiles that the plan requests.
    """

    record: Record
    about: Subject
    rows: tuple[Row, ...]
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, record: Record) -> Self:
        """Analyze a record."""
        return cls(
            record=record,
            about=subject(record.plan, record.environment),
            rows=tuple(summary.rows(record)),
            percentiles=summary.requested_percentiles(record),
        )

    @property
    def headline(self) -> str:
        """Return the subject with the points' common size and batch as a line."""
        return headline(self.about, [row.key for row in self.rows])

    @cached_property
    def scalings(self) -> Sequence[Scaling]:
        """Return models for how its times grow with size."""
        return growth.scalings(self.rows)

    @cached_property
    def cold_starts(self) -> Sequence[FirstPrediction]:
        """Return its cold starts, one per size and batch size."""
        return cold_starts.first_predictions(self.record)


@dataclass(frozen=True, kw_only=True)
class SweepAnalysis:
    """Sweep with the analyses of the runs that left a record."""

    sweep: Sweep
    analyses: tuple[Analysis, ...]

    @classmethod
    def of(cls, sweep: Sweep, records: Iterable[Record]) -> Self:
        """Analyze a sweep's records."""
        return cls(sweep=sweep, analyses=tuple(map(Analysis.of, records)))

    @cached_property
    def runs(self) -> list[tuple[SweepChild, Analysis | None]]:
        """Return each run with its analysis, by number; None if it left no record."""
        by_job = {}
        for one in self.analyses:
            member = one.record.sweep
            if member and member.uid == self.sweep.uid:
                by_job[member.job] = one
        children = sorted(self.sweep.children, key=lambda child: child.job)
        return [(child, by_job.get(child.job)) for child in children]

    @cached_property
    def slower(self) -> dict[int, Diagnostic]:
        """Return a diagnostic for each run with GPUs slower than fewer GPUs in another run.

        Keys are run numbers.
        """
        groups: dict[tuple[object, ...], list[_Rated]] = {}
        for child, one in self.runs:
            if one is None or child.devices is None:
                continue
            rest = {name: value for name, value in child.axes.items() if name != GPU_COUNT}
            for row in one.rows:
                if rate := row.samples_per_second:
                    group = groups.setdefault((frozenset(rest.items()), row.key), [])
                    group.append((child.devices, child.job, rate))
        worst: dict[int, tuple[float, Diagnostic]] = {}
        for group in groups.values():
            for count, job, rate in group:
                fewer = []
                for other in group:
                    if other[0] < count and is_clearly_below(rate, other[2]):
                        fewer.append(other)
                if not fewer:
                    continue
                best, _, most = max(fewer, key=lambda other: other[2].value)
                ratio = rate.value / most.value
                scope = ""
                # an undecided ratio only holds for these runs, not for others on this machine
                if rate.low is None or most.low is None:
                    scope = " in these runs (undecided)"
                diagnostic = diagnostics.make(
                    "multi_gpu_slower", ratio=ratio, count=count, fewer=best, scope=scope
                )
                if job not in worst or ratio < worst[job][0]:
                    worst[job] = ratio, diagnostic
        return {job: diagnostic for job, (_, diagnostic) in worst.items()}


#: Device count, run number, and the run's rate.
_Rated = tuple[int, int, Interval]
