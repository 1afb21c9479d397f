"""Stopping rules: when a series' warm-up ends and when the series has enough samples.

A plan's `stopping` is one of two rules: `Precision` stops at a narrow interval of the median,
`Fixed` after a number of calls. For each series the rule creates a monitor, and `collect` asks the
monitor before each block how many samples to take. A rule also limits the number of processes that
repeat the measurement.
"""

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

#: Minimum block length, so that the checks between blocks take little of the time.
_MINIMUM_BLOCK_SECONDS = 0.005
#: Relative growth of the number of samples from check to check.
_GROWTH = 0.1
#: Blocks in a series that needs only the minimum samples and seconds, and the minimum number of
#: blocks.
_BLOCKS, _LEAST_BLOCKS = 8, 3
#: Minimum effective samples per process if several processes share `min_effective`.
_LEAST_EFFECTIVE = 10.0
#: A series may end if its relative drift is below this.
_DRIFT_FLOOR = 0.0005
#: Minimum overtime for a series without an interval; otherwise the overtime equals the limit.
_OVERTIME_SECONDS = 2.0
#: Maximum calls in a fixed measurement: 800 MB of times.
_MOST_CALLS = 100_000_000
#: Maximum processes in a plan.
_MOST_PROCESSES = 1000
#: Factor on a process's share of the samples that a percentile over all processes needs. The
#: reserve is needed because correlations are estimates.
_RESERVE = 1.25
#: Number of points that get a budget each, and the budget per point if there are many.
_FEW_POINTS, _SHARE = 8, 0.1
#: Maximum time for a series: 30 years.
_MOST_SECONDS = 1_000_000_000


def measurements(points: int) -> float:
    """Return how many times a run gets the budget for one point; many points share budgets.

    Up to 8 points get a budget each; more points get a tenth each, but 8 budgets in total at least.
    """
    return max(min(points, _FEW_POINTS), points * _SHARE)


class Steady(StrEnum):
    """Device state that a warm-up waits for: call time, clock and temperature are constant."""

    thermal = "thermal"


class Monitor(Protocol):
    """Watches one series grow and decides how many samples it needs.

    Attributes:
        starts: index of the first sample in each block so far; blocks begin after the warm-up
            calls, and `warmup` may later count more samples as warm-up.
    """

    starts: list[int]

    def more(self, samples: NDArray[np.float64], elapsed_seconds: float = 0.0) -> int:
        """Return the size of the next block or warm-up part; 0 if there are enough samples.

        Args:
            samples: all samples so far, warm-up included, in seconds per call.
            elapsed_seconds: time spent on them, including untimed work such as filling a queue.
        """

    def warmup(self, samples: NDArray[np.float64]) -> int:
        """Return the number of leading samples that are warm-up and count for no statistic."""

    def stop(self, samples: NDArray[np.float64]) -> Stop:
        """Return why the series ended and the precision reached; once `more` has returned 0."""


class StoppingRule(Protocol):
    """A plan's `stopping` settings; `begin` creates the monitor for each series.

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
        """Return the rule for each of a run's `points`.

        Its series are shorter if points share budgets. The plan asks for it once it has counted
        the points.
        """

    def longest_seconds(self) -> float | None:
        """Return about how many seconds a series can take, without overtime.

        None if only calls are limited. The plan estimates the duration of a run by it.
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

    The settings are described in `plan/key_descriptions.yaml`, under `stopping`.

    Raises:
        UserError: a setting is out of range.
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
        """Check the settings and derive the limits that are not settings."""
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
        """See `StoppingRule`; a series has several blocks even if it does not take turns."""
        return _PrecisionMonitor(self, calls_per_sample, percentiles, busy_seconds, of_rate=of_rate)

    def shared_by(self, points: int) -> Precision:
        """See `StoppingRule`; all limits shrink by a point's share of the budgets."""
        shared = copy(self)
        if self.budget_seconds and points:
            share = measurements(points) / points
            shared.min_seconds *= share
            shared.max_seconds *= share
            shared.warmup_seconds *= share
            shared.overtime_seconds *= share
        return shared

    def longest_seconds(self) -> float | None:
        """See `StoppingRule`."""
        return self.max_seconds + self.warmup_seconds


class Fixed:
    """Rule with fixed numbers of warm-up calls and measured calls.

    Raises:
        UserError: a number is out of range.
    """

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
    """Monitor of `Precision`: checks after each block whether the interval is narrow enough.

    `k` is the number of calls per sample, and `spent` the seconds of the calls after the warm-up.
    """

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
        #: Seconds at which overtime ends.
        self._last_seconds = rule.max_seconds + max(rule.max_seconds, rule.overtime_seconds)
        self._warmup_seconds = max(rule.warmup_seconds - busy_seconds, 0.0)
        self._calls_per_sample = calls_per_sample
        needed = max((estimators.samples_needed(p) for p in percentiles), default=0)
        # percentiles pool the calls of all processes
        self._samples_needed = needed / rule.processes
        self._effective_needed = max(
            min(_LEAST_EFFECTIVE, rule.min_effective), rule.min_effective / rule.processes
        )
        #: Largest percentile that is worth overtime; None if there is none.
        self._tail = max((p for p in percentiles if 50 < p <= rule.tail_percentile), default=None)
        #: Whether the previous check met the rule: a single lucky check must not end a series.
        self._met_before = False
        #: Elapsed time per sampled time: untimed work, such as filling a queue, counts for limits.
        self._stretch = 1.0
        self._reason = ""
        self.starts: list[int] = []

    def warmup(self, samples: NDArray[np.float64]) -> int:
        """See `Monitor`; the longest of `warmup_calls`, `warmup_seconds` and the transient."""
        least = self._least_warmup(samples)
        if least >= samples.size:
            return samples.size
        return max(least, estimators.transient_cut(samples))

    def more(self, samples: NDArray[np.float64], elapsed_seconds: float = 0.0) -> int:
        """See `Monitor`; first the warm-up, then blocks that grow until a reason ends them."""
        rule, k = self._rule, self._calls_per_sample
        if samples.size == 0:
            return max(1, math.ceil(rule.warmup_calls / k))
        call_seconds = max(float(np.median(samples)), 1e-9)
        sampled_seconds = float(samples.sum()) * k
        self._stretch = max(1.0, elapsed_seconds / max(sampled_seconds, 1e-9))
        sample_seconds = call_seconds * k * self._stretch
        least = self._least_warmup(samples)
        if least >= samples.size:
            missing_seconds = self._warmup_seconds - sampled_seconds * self._stretch
            missing = max(1, math.ceil(missing_seconds / sample_seconds))
            return self._within_limits(missing, sample_seconds, 0, 0.0)
        measured = samples[least:]
        spent, calls = float(measured.sum()) * k * self._stretch, measured.size * k
        if calls >= rule.max_calls:
            return self._end("max_calls")
        used = samples[self.warmup(samples) :]
        is_out_of_time = spent >= rule.max_seconds and calls >= rule.min_calls
        if is_out_of_time and (
            spent >= self._last_seconds
            or not self._is_worth_overtime(used, self._last_seconds / spent)
        ):
            return self._end("max_seconds")
        is_met = spent >= rule.min_seconds and self._is_precise(samples)
        if is_met and self._met_before:
            return self._end("precision")
        self._met_before = is_met
        self.starts.append(samples.size)
        wanted = self._block_samples(used.size, call_seconds * k, sample_seconds)
        return self._within_limits(wanted, sample_seconds, calls, spent)

    def stop(self, samples: NDArray[np.float64]) -> Stop:
        """See `Monitor`; the precision is the median's relative half-width."""
        achieved = blockwise.half_width(samples, self.starts, self.warmup(samples))
        return Stop(reason=self._reason, target=self._rule.target, achieved=achieved)

    def _least_warmup(self, samples: NDArray[np.float64]) -> int:
        """Return the samples that `warmup_calls` and `warmup_seconds` require as warm-up."""
        rule, k = self._rule, self._calls_per_sample
        busy = np.cumsum(samples) * k * self._stretch
        by_time = int(np.searchsorted(busy, self._warmup_seconds)) + 1
        return max(math.ceil(rule.warmup_calls / k), by_time)

    def _block_samples(self, used: int, timed_seconds: float, sample_seconds: float) -> int:
        """Return the next block's size: an eighth of what is needed, or 10 % of what there is.

        Args:
            used: number of samples after the warm-up so far.
            timed_seconds: seconds of a sample's calls.
            sample_seconds: seconds of a sample with the untimed work around it.
        """
        rule = self._rule
        needed = max(
            self._effective_needed, self._samples_needed, rule.min_seconds / sample_seconds
        )
        growth = max(_GROWTH * used, _MINIMUM_BLOCK_SECONDS / timed_seconds)
        most = max(rule.max_seconds / _BLOCKS / sample_seconds, growth)
        return math.ceil(min(max(needed / _BLOCKS, growth), most))

    def _is_precise(self, samples: NDArray[np.float64]) -> bool:
        """Return whether a check finds enough samples, narrow intervals and no drift."""
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

    def _is_worth_overtime(self, used: NDArray[np.float64], growth: float) -> bool:
        """Return whether an interval is missing that overtime can produce.

        A missing interval of the median always justifies overtime. A percentile's does if enough
        samples are within reach.

        Args:
            used: samples without warm-up.
            growth: factor by which their number grows until the overtime ends.
        """
        tau = estimators.autocorrelation_time(used)
        if estimators.median_interval(used, tau).low is None:
            return True
        if self._tail is None:
            return False
        share = 1.0 if self._rule.processes == 1 else _RESERVE / self._rule.processes
        needed = share * estimators.samples_needed(self._tail) * tau
        return used.size < needed <= growth * used.size

    def _within_limits(self, wanted: int, sample_seconds: float, calls: int, spent: float) -> int:
        """Limit a block's samples to the remaining time and calls, but take at least one.

        Args:
            wanted: samples to take if nothing limits them.
            sample_seconds: elapsed seconds per sample.
            calls: calls after the warm-up so far.
            spent: seconds that they took.
        """
        k = self._calls_per_sample
        limit = self._rule.max_seconds if spent < self._rule.max_seconds else self._last_seconds
        by_time = math.ceil(max(limit - spent, 0.0) / sample_seconds)
        by_minimum = math.ceil((self._rule.min_calls - calls) / k)
        by_calls = math.ceil((self._rule.max_calls - calls) / k)
        return max(1, min(wanted, max(by_time, by_minimum), by_calls))

    def _end(self, reason: str) -> int:
        """Store the reason for the end, and return 0 for `more`: no further samples."""
        self._reason = reason
        return 0


class _FixedMonitor:
    """Monitor of `Fixed`: counts samples, the warm-up first."""

    def __init__(self, rule: Fixed, calls_per_sample: int, takes_turns: bool) -> None:
        self._warmup = math.ceil(rule.warmup_calls / calls_per_sample)
        measured = math.ceil(rule.measure_calls / calls_per_sample)
        self._total = self._warmup + measured
        # several blocks only if other series run in between
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
