"""Analysis: a record's rows and statistics, computed once for all reports and comparisons.

Reports, tables, plots, MLflow and comparisons take an `Analysis` of a run, or a `SweepAnalysis` of
several runs, so that all show the same figures.
"""

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
from perfexp.records.rows import Row
from perfexp.records.subject import Subject, headline, subject
from perfexp.records.sweep_record import GPU_COUNT, Sweep, SweepChild
from perfexp.statistics.estimators import Interval


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
        """Return a record's analysis; this computes the statistics of all its points."""
        return cls(
            record=record,
            about=subject(record.plan, record.environment),
            rows=tuple(summary.rows(record)),
            percentiles=summary.requested_percentiles(record),
        )

    @property
    def headline(self) -> str:
        """Return the run's first line: its subject with the points' common size and batch."""
        return headline(self.about, [row.key for row in self.rows])

    @cached_property
    def scalings(self) -> Sequence[Scaling]:
        """Return models for how the record's times grow with input size.

        Reports show them as sentences, MLflow as figures.
        """
        return growth.scalings(self.rows)

    @cached_property
    def cold_starts(self) -> Sequence[FirstPrediction]:
        """Return the record's cold starts, one per size and batch size."""
        return cold_starts.first_predictions(self.record)


@dataclass(frozen=True, kw_only=True)
class SweepAnalysis:
    """Sweep with the analyses of the runs that left a record.

    Attributes:
        sweep: the sweep, which lists all its runs.
        analyses: analyses of records, in any order.
    """

    sweep: Sweep
    analyses: tuple[Analysis, ...]

    @classmethod
    def of(cls, sweep: Sweep, records: Iterable[Record]) -> Self:
        """Return the analysis of a sweep and its records."""
        return cls(sweep=sweep, analyses=tuple(map(Analysis.of, records)))

    @cached_property
    def runs(self) -> list[tuple[SweepChild, Analysis | None]]:
        """Return each run with its analysis, by number; None if it left no record.

        Tables and plots of the sweep start from this list.
        """
        by_job = {}
        for analysis in self.analyses:
            member = analysis.record.sweep
            if member and member.uid == self.sweep.uid:
                by_job[member.job] = analysis
        children = sorted(self.sweep.children, key=lambda child: child.job)
        return [(child, by_job.get(child.job)) for child in children]

    @cached_property
    def slower(self) -> dict[int, Diagnostic]:
        """Return `multi_gpu_slower` by run number, for runs slower than a run with fewer GPUs.

        Only runs that differ in nothing but the number of GPUs are compared, point by point, by
        samples per second. A run that is slower at several points gets the worst. Tables of the
        sweep show it with the run's own diagnostics.
        """
        worst: dict[int, tuple[float, Diagnostic]] = {}
        for group in self._by_device_count():
            for count, job, rate in group:
                faster = []
                for other in group:
                    if other[0] < count and is_clearly_below(rate, other[2]):
                        faster.append(other)
                if not faster:
                    continue
                fewer, _, most = max(faster, key=lambda other: other[2].value)
                ratio = rate.value / most.value
                scope = ""
                # an undecided ratio only holds for these runs, not for others on this machine
                if rate.low is None or most.low is None:
                    scope = " in these runs (undecided)"
                diagnostic = diagnostics.make(
                    "multi_gpu_slower", ratio=ratio, count=count, fewer=fewer, scope=scope
                )
                if job not in worst or ratio < worst[job][0]:
                    worst[job] = ratio, diagnostic
        return {job: diagnostic for job, (_, diagnostic) in worst.items()}

    def _by_device_count(self) -> Iterable[list[_Rated]]:
        """Return groups of runs that differ only in device count, with a point's rate in each.

        `slower` compares the runs in each group.
        """
        groups: dict[tuple[object, ...], list[_Rated]] = {}
        for child, analysis in self.runs:
            if analysis is None or child.devices is None:
                continue
            other_axes = {name: value for name, value in child.axes.items() if name != GPU_COUNT}
            for row in analysis.rows:
                if rate := row.samples_per_second:
                    group = groups.setdefault((frozenset(other_axes.items()), row.key), [])
                    group.append((child.devices, child.job, rate))
        return groups.values()


#: Device count, run number, and samples per second of a point in the run.
_Rated = tuple[int, int, Interval]
