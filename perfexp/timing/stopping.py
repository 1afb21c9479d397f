"""Stopping rules: when a series' warm-up ends and when the series has enough samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perfexp.errors import UserError
from perfexp.records.record import Stop
from perfexp.statistics import blockwise, estimators

#: Minimum block length between two checks, so that a check does not disturb the next block.
_MINIMUM_BLOCK_SECONDS = 0.005
#: Relative growth of the number of samples from check to check.
_GROWTH = 0.1
#: Blocks in a series that needs only the minimum samples and seconds, and the minimum number of
#: blocks.
_BLOCKS, _LEAST_BLOCKS = 8, 3
#: Minimum effective samples per process if there are several.
_FEWEST = 10.0
#: A series may end if its relative drift is below this.
_DRIFT_FLOOR = 0.0005
#: Minimum overtime for a series without an interval; otherwise the overtime equals the limit.
_OVERTIME_SECONDS = 2.0
#: Maximum calls in a fixed measurement: 800 MB of times.
_MOST_CALLS = 100_000_000
#: Maximum processes in a plan.
_MOST_PROCESSES = 1000
#: Samples per process for a percentile over all processes, relative to the process's share. The
#: reserve is needed because correlations are estimates.
_RESERVE = 1.25
#: Number of points that get a budget each, and the budget per point if there are many.
_FEW_POINTS, _SHARE = 8, 0.1
#: Maximum time for a series: 30 years.
_MOST_SECONDS = 1_000_000_000


def measurements(points: int) -> float:
    """Return a run's number of budgets for its number of points. Many points share a budget."""
    return max(min(points, _FEW_POINTS), points * _SHARE)


class Steady(StrEnum):
    """Device state that a warm-up waits for: call time, clock and temperature are constant."""

    thermal = "thermal"


class Monitor(Protocol):
    """Watches a series grow, block by block.

    Attributes:
        starts: index of the first sample in each block after the warm-up so far.
    """

    starts: list[int]

    def more(self, samples: NDArray[np.float64], elapsed_seconds: float = 0.0) -> int:
        """Return the size of the next block or warm-up part; 0 if there are enough samples.

        Args:
            samples: all samples so far, warm-up included, in seconds per call.
            elapsed_seconds: time spent on them, including untimed work such as filling a queue.
        """

    def warmup(self, samples: NDArray[np.float64]) -> int:
        """Return the number of leading samples that are warm-up."""

    def stop(self, samples: NDArray[np.float64]) -> Stop:
        """Return why the series ended; called once `more` has returned 0."""


class StoppingRule(Protocol):
    """Settings for a stopping rule; `begin` creates the monitor for a series.

    Attributes:
        settling_seconds: maximum time for calls before a point's series until the device is steady;
            0 for none.
        target: relative half-width to reach, within a process and for the mean over processes; None
            for none.
        processes: minimum number of measuring processes, unless the plan sets `processes`.
        most_processes: number of processes after which none is added to reach the target.
        budget_seconds: measurement time, process starts included, after which no process is added.
    """

    settling_seconds: float
    target: float | None
    processes: int
    most_processes: int
    budget_seconds: float

    def begin(
        self,
        *,
        calls_per_sample: int = 1,
        percentiles: Sequence[float] = (),
        busy_seconds: float = 0.0,
        takes_turns: bool = False,
        of_rate: bool = False,
    ) -> Monitor:
        """Return a monitor for a new series.

        Args:
            calls_per_sample: k, for counting calls and their time.
            percentiles: percentiles that need an interval before the precision counts as reached.
            busy_seconds: time just spent on the same calls, which counts as warm-up.
            takes_turns: whether other series run between this series' blocks.
            of_rate: whether a rate uses the series' mean, so that the mean must be precise too.
        """

    def shared_by(self, points: int) -> StoppingRule:
        """Return the rule for one of several points.

        Series are shorter if points share a budget.
        """

    def longest_seconds(self) -> float | None:
        """Return the approximate maximum series time, without overtime.

        None if only calls are limited.
        """


@dataclass(kw_only=True, eq=False)
class Precision:
    """Rule that stops at a narrow 95 % interval of the median, or when time or calls run out.

    The warm-up ends at the latest of `warmup_calls`, `warmup_seconds` and the transient that MSER-5
    detects in the whole series. The rule is met if two successive checks, after `min_seconds` and
    three blocks, show all of these:

    - The half-width is ≤ target · median. If a rate uses the mean, the mean's half-width must be as
      narrow.
    - n / τ ≥ `min_effective`, divided among the processes.
    - The samples do not drift.

    A series without an interval at `max_seconds` gets overtime until it has one: up to the same
    time again or 2 s, whichever is longer.
    """

    target: float = 0.01
    min_seconds: float = 0.0
    max_seconds: float = 5.0
    max_calls: int = 1_000_000
    min_calls: int = 5
    warmup_calls: int = 3
    warmup_seconds: float = 0.5
    min_effective: float = estimators.FEW
    tail_percentile: float = 50.0
    processes: int = 1
    most_processes: int | None = None
    budget_seconds: float = 0.0
    steady: Steady | None = None
    steady_seconds: float = 120.0

    def __post_init__(self) -> None:
        self.most_processes = self.most_processes or self.processes
        for name in ("target", "max_seconds"):
            if not 0 < (value := getattr(self, name)) <= _MOST_SECONDS:
                raise UserError(
                    f"stopping.{name}={value}: set a positive and finite number, "
                    f"at most {_MOST_SECONDS:,}."
                )
        for name, least, most in (
            ("max_calls", 1, _MOST_CALLS),
            ("min_calls", 1, _MOST_CALLS),
            ("warmup_calls", 0, _MOST_CALLS),
            ("warmup_seconds", 0, _MOST_SECONDS),
            ("min_seconds", 0, self.max_seconds),
            ("min_effective", 0, _MOST_CALLS),
            ("processes", 1, _MOST_PROCESSES),
            ("most_processes", self.processes, _MOST_PROCESSES),
            ("budget_seconds", 0, _MOST_SECONDS),
            ("steady_seconds", 0, _MOST_SECONDS),
        ):
            if not least <= (value := getattr(self, name)) <= most:
                raise UserError(
                    f"stopping.{name}={value}: a finite number, at least {least} and at most "
                    f"{most:,}."
                )
        if not 0 < self.tail_percentile < 100:
            raise UserError(
                f"stopping.tail_percentile={self.tail_percentile}: above 0 and below 100."
            )
        self.overtime_seconds = _OVERTIME_SECONDS
        self.settling_seconds = 0.0 if self.steady is None else self.steady_seconds

    def begin(
        self,
        *,
        calls_per_sample: int = 1,
        percentiles: Sequence[float] = (),
        busy_seconds: float = 0.0,
        takes_turns: bool = False,
        of_rate: bool = False,
    ) -> Monitor:
        return _PrecisionMonitor(self, calls_per_sample, percentiles, busy_seconds, of_rate=of_rate)

    def shared_by(self, points: int) -> Precision:
        shared = copy(self)
        if self.budget_seconds and points:
            share = measurements(points) / points
            shared.min_seconds, shared.max_seconds = (
                share * self.min_seconds,
                share * self.max_seconds,
            )
            shared.warmup_seconds, shared.overtime_seconds = (
                share * self.warmup_seconds,
                share * self.overtime_seconds,
            )
        return shared

    def longest_seconds(self) -> float | None:
        return self.max_seconds + self.warmup_seconds


class Fixed:
    """Rule with fixed numbers of warm-up calls and measured calls."""

    settling_seconds = 0.0
    target, budget_seconds = None, 0.0

    def __init__(self, *, warmup: int = 10, measure: int = 20, processes: int = 1) -> None:
        if warmup < 0 or measure < 1 or max(warmup, measure) > _MOST_CALLS:
            raise UserError(
                f"stopping.warmup={warmup} has to be at least 0, stopping.measure={measure} at "
                "least 1, and neither "
                f"more than {_MOST_CALLS:,}: every time is stored."
            )
        if not 1 <= processes <= _MOST_PROCESSES:
            raise UserError(
                f"stopping.processes={processes}: a number from 1 to {_MOST_PROCESSES}."
            )
        self.warmup_calls = warmup
        self.measure_calls = measure
        self.processes = self.most_processes = processes

    def begin(
        self,
        *,
        calls_per_sample: int = 1,
        percentiles: Sequence[float] = (),
        busy_seconds: float = 0.0,
        takes_turns: bool = False,
        of_rate: bool = False,
    ) -> Monitor:
        """See `StoppingRule`.

        Percentiles do not prolong the series; earlier work does not shorten it.
        """
        return _FixedMonitor(self, calls_per_sample, takes_turns)

    def shared_by(self, points: int) -> Fixed:
        return self

    def longest_seconds(self) -> float | None:
        return None


class _PrecisionMonitor:
    def __init__(
        self,
        rule: Precision,
        calls_per_sample: int,
        percentiles: Sequence[float],
        busy_seconds: float,
        *,
        of_rate: bool,
    ) -> None:
        self._rule, self._of_rate = rule, of_rate
        self._last_seconds = rule.max_seconds + max(rule.max_seconds, rule.overtime_seconds)
        self._warmup_seconds = max(rule.warmup_seconds - busy_seconds, 0.0)
        self._calls_per_sample = calls_per_sample
        needed = max((estimators.samples_needed(p) for p in percentiles), default=0)
        # percentiles pool the calls of all processes
        self._samples_needed = needed / rule.processes
        self._effective_needed = max(
            min(_FEWEST, rule.min_effective), rule.min_effective / rule.processes
        )
        self._tail = max((p for p in percentiles if 50 < p <= rule.tail_percentile), default=None)
        self._met_before = False
        self._stretch = 1.0
        self._reason = ""
        self.starts: list[int] = []

    def warmup(self, samples: NDArray[np.float64]) -> int:
        least = self._least_warmup(samples)
        return (
            max(least, estimators.transient_cut(samples)) if least < samples.size else samples.size
        )

    def more(self, samples: NDArray[np.float64], elapsed_seconds: float = 0.0) -> int:
        rule, k = self._rule, self._calls_per_sample
        if samples.size == 0:
            return max(1, math.ceil(rule.warmup_calls / k))
        call_seconds = max(float(np.median(samples)), 1e-9)
        # elapsed time per measured time
        self._stretch = max(1.0, elapsed_seconds / max(float(samples.sum()) * k, 1e-9))
        least = self._least_warmup(samples)
        if least >= samples.size:
            sample_seconds = call_seconds * k * self._stretch
            missing = (
                self._warmup_seconds - float(samples.sum()) * k * self._stretch
            ) / sample_seconds
            return self._within_limits(
                math.ceil(missing) if missing > 0 else 1, sample_seconds, 0, 0.0
            )
        measured = samples[least:]
        spent, calls = float(measured.sum()) * k * self._stretch, measured.size * k
        if calls >= rule.max_calls:
            return self._end("max_calls")
        used = samples[self.warmup(samples) :]
        if (
            spent >= rule.max_seconds
            and calls >= rule.min_calls
            and (
                spent >= self._last_seconds
                or not self._worth_overtime(used, self._last_seconds / spent)
            )
        ):
            return self._end("max_seconds")
        met = spent >= rule.min_seconds and self._met(samples)
        if met and self._met_before:
            return self._end("precision")
        self._met_before = met
        sample_seconds = call_seconds * k * self._stretch
        floor = max(self._effective_needed, self._samples_needed, rule.min_seconds / sample_seconds)
        growth = max(_GROWTH * used.size, _MINIMUM_BLOCK_SECONDS / (call_seconds * k))
        wanted = min(
            max(floor / _BLOCKS, growth), max(rule.max_seconds / _BLOCKS / sample_seconds, growth)
        )
        self.starts.append(samples.size)
        return self._within_limits(math.ceil(wanted), sample_seconds, calls, spent)

    def stop(self, samples: NDArray[np.float64]) -> Stop:
        achieved = blockwise.half_width(samples, self.starts, self.warmup(samples))
        return Stop(reason=self._reason, target=self._rule.target, achieved=achieved)

    def _least_warmup(self, samples: NDArray[np.float64]) -> int:
        rule, k = self._rule, self._calls_per_sample
        busy = np.cumsum(samples) * k * self._stretch
        by_time = int(np.searchsorted(busy, self._warmup_seconds)) + 1
        return max(math.ceil(rule.warmup_calls / k), by_time)

    def _met(self, samples: NDArray[np.float64]) -> bool:
        blocks = blockwise.split(samples, self.starts, self.warmup(samples))
        if len(blocks) < _LEAST_BLOCKS:
            return False
        used = np.concatenate(blocks)
        tau = estimators.autocorrelation_time(used)
        if used.size / tau < self._effective_needed or used.size < self._samples_needed * tau:
            return False
        centers = [blockwise.block_median, *([blockwise.block_mean] if self._of_rate else [])]
        widths = [center(blocks, tau).relative_half_width for center in centers]
        is_narrow = all(width is not None and width <= self._rule.target for width in widths)
        return is_narrow and estimators.drift(used, _DRIFT_FLOOR) is None

    def _worth_overtime(self, used: NDArray[np.float64], growth: float) -> bool:
        """Return whether overtime can produce a missing interval.

        The median's interval always justifies overtime. A percentile's interval does if enough
        samples are within reach.

        Args:
            used: samples without warm-up.
            growth: factor for their number until the overtime ends.
        """
        tau = estimators.autocorrelation_time(used)
        if estimators.median_interval(used, tau).low is None:
            return True
        if self._tail is None:
            return False
        share = 1.0 if self._rule.processes == 1 else _RESERVE / self._rule.processes
        needed = share * estimators.samples_needed(self._tail) * tau
        return used.size < needed <= growth * used.size

    def _within_limits(self, wanted: int, sample_seconds: float, calls: int, seconds: float) -> int:
        """Limit a block's samples to the remaining time and calls, but take at least one."""
        k = self._calls_per_sample
        limit = self._rule.max_seconds if seconds < self._rule.max_seconds else self._last_seconds
        by_time = math.ceil(max(limit - seconds, 0.0) / sample_seconds)
        by_minimum = math.ceil((self._rule.min_calls - calls) / k)
        by_calls = math.ceil((self._rule.max_calls - calls) / k)
        return max(1, min(wanted, max(by_time, by_minimum), by_calls))

    def _end(self, reason: str) -> int:
        self._reason = reason
        return 0


class _FixedMonitor:
    def __init__(self, rule: Fixed, calls_per_sample: int, takes_turns: bool) -> None:
        self._warmup = math.ceil(rule.warmup_calls / calls_per_sample)
        measured = math.ceil(rule.measure_calls / calls_per_sample)
        self._total = self._warmup + measured
        self._block = math.ceil(measured / _BLOCKS) if takes_turns else measured
        self.starts: list[int] = []

    def warmup(self, samples: NDArray[np.float64]) -> int:
        return min(self._warmup, int(samples.size))

    def more(self, samples: NDArray[np.float64], elapsed_seconds: float = 0.0) -> int:
        """See `Monitor`; the warm-up is a single block."""
        if samples.size < self._warmup:
            return self._warmup - int(samples.size)
        if samples.size < self._total:
            self.starts.append(samples.size)
        return min(self._block, self._total - int(samples.size))

    def stop(self, samples: NDArray[np.float64]) -> Stop:
        return Stop(
            reason="fixed",
            achieved=blockwise.half_width(samples, self.starts, self.warmup(samples)),
        )
