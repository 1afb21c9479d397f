"""Joint throughput of all ranks compared with a single rank, and causes of the difference.

Several devices are slower than their number suggests, because they exchange gradients and compete
for memory, power and the host. `procedure` measures how much. In a burst, all ranks make calls
as fast as they can, coupled only by their gradients. A burst lasts from the first rank's start to
the last rank's end. Kinds of bursts take turns, in reverse every other round. Shares compare bursts
from the same round, so that a slow phase of the machine hardly changes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from perfexp.errors import Unsupported
from perfexp.measuring.modes import Step
from perfexp.measuring.ranks import Burst, ProcessGroup
from perfexp.models import Sharing
from perfexp.records import diagnostics
from perfexp.records.point_times import loop_interval
from perfexp.records.quantities import (
    COMMUNICATION,
    CONTENTION,
    EFFICIENCY,
    RANK_RATE,
    RANKS_RATE,
    STATISTICS,
    member,
)
from perfexp.records.record import Metric, Point, Series, Stop
from perfexp.statistics import estimators

#: Target length of a burst. Its barrier leaves a skew of some ten microseconds.
_BURST_SECONDS = 0.05
#: Minimum calls in a burst, because it begins with an idle device, unless they take longer than
#: this.
_CALLS, _LONGEST_SECONDS = 4, 0.2
#: Rounds, and warm-up rounds among them: the first bursts of a kind may still choose kernels.
_ROUNDS, _WARMUP = 22, 2
#: Metric that is missing without bursts of a kind.
_FIGURES = {Sharing.nothing: STATISTICS, Sharing.alone: EFFICIENCY}
#: If bursts and the first rank's calls differ by more than this, the point gets a diagnostic.
_TOLERANCE = 0.05


def measure(point: Point, step: Step, group: ProcessGroup, *, compares_alone: bool) -> None:
    """Measure bursts of a joined step and add their series and metrics to a point.

    If bursts and the loop of the first rank disagree, a diagnostic is added.

    Args:
        point: a point with its call already timed.
        step: the step of the group, which all ranks make.
        compares_alone: whether to also measure the first rank alone and, in training, all ranks
            without sharing.

    Raises:
        Unsupported: the point has no time.
    """
    in_loop = loop_interval(point)
    if in_loop is None or in_loop.value <= 0:
        raise Unsupported("the call was not timed")
    seconds = in_loop.value
    enough = math.ceil(round(_BURST_SECONDS / seconds, 6))
    most = math.ceil(round(_LONGEST_SECONDS / seconds, 6))
    calls = max(enough, min(_CALLS, most))
    is_measured = {
        Sharing.all: True,
        Sharing.no_gradients: step.trains,
        Sharing.nothing: step.trains and compares_alone,
        Sharing.alone: compares_alone,
    }
    rounds_of: dict[Sharing, list[Sequence[Burst]]] = {
        kind: [] for kind in is_measured if is_measured[kind]
    }
    for number in range(_ROUNDS):
        kinds = list(rounds_of)
        # alternate the order, so that a drift affects all kinds alike
        if number % 2 == 0:
            kinds.reverse()
        for kind in kinds:
            bursts = group.burst(step, calls, kind)
            rounds_of[kind].append(bursts)
            if error := next((burst.error for burst in bursts if burst.error), None):
                # the other kinds go on without it
                del rounds_of[kind]
                reason = f"one rank by itself can't make the call: {error}"
                point.metrics.append(Metric.of(_FIGURES[kind], None, reason=reason))
    for kind, rounds in rounds_of.items():
        num_ranks = 1 if kind is Sharing.alone else group.size
        samples = [_span_seconds(bursts[:num_ranks]) / calls for bursts in rounds]
        achieved = estimators.median_interval(samples[_WARMUP:]).relative_half_width
        stop = Stop(reason="fixed", achieved=achieved)
        name = f"ranks/{kind.value}"
        point.series.append(
            Series(name=name, samples=samples, warmup=_WARMUP, calls_per_sample=calls, stop=stop)
        )
    _add_figures(point, rounds_of[Sharing.all], calls, group.size)
    in_bursts = estimators.mean_interval(_call_seconds(point, Sharing.all))
    if estimators.differ(in_bursts, in_loop, _TOLERANCE):
        point.doubts.append(diagnostics.make("ranks_disagree", ratio=in_bursts.value / seconds))


def _call_seconds(point: Point, sharing: Sharing) -> list[float]:
    """Return the seconds per call in each round of a kind of burst, warm-up rounds excluded.

    They are empty if there were no such bursts.
    """
    series = point.find_series(f"ranks/{sharing.value}")
    if series:
        return series.measured
    return []


def _add_figures(point: Point, rounds: Sequence[Sequence[Burst]], calls: int, size: int) -> None:
    """Add the rates in samples/s, and the shares of time by cause, with their intervals as facts.

    Args:
        rounds: bursts of all ranks in each round.
        calls: calls per burst.
        size: number of ranks.
    """
    of_all, batch = _call_seconds(point, Sharing.all), point.key.batch_size
    rates = {RANKS_RATE: batch * size / fmean(of_all)}
    for number in range(size):
        call_seconds = [_span_seconds([bursts[number]]) / calls for bursts in rounds[_WARMUP:]]
        rates[member(RANK_RATE, number)] = batch / fmean(call_seconds)
    point.metrics += [Metric.of(name, rate) for name, rate in rates.items()]
    # each kind's time in a round relative to the time with everything shared
    parts = {}
    for kind in Sharing:
        pairs = zip(_call_seconds(point, kind), of_all, strict=False)
        parts[kind] = [part / whole for part, whole in pairs]
    shares = {
        EFFICIENCY: parts[Sharing.alone],
        COMMUNICATION: [1 - part for part in parts[Sharing.no_gradients]],
        STATISTICS: _differences(parts[Sharing.no_gradients], parts[Sharing.nothing]),
        CONTENTION: _differences(parts[Sharing.nothing], parts[Sharing.alone]),
    }
    point.facts["ranks"] = {}
    for name, of_rounds in shares.items():
        if of_rounds:
            share = estimators.median_interval(of_rounds)
            point.metrics.append(Metric.of(name, share.value))
            point.facts["ranks"][name.removeprefix("ranks/")] = {
                "low": share.low,
                "high": share.high,
            }
            if name == EFFICIENCY and share.high is not None and share.high * size < 1:
                ratio = share.value * size
                slower = diagnostics.make(
                    "multi_gpu_slower", ratio=ratio, count=size, fewer=1, scope=""
                )
                point.doubts.append(slower)


def _differences(longer: Sequence[float], shorter: Sequence[float]) -> list[float]:
    """Return the differences round by round; empty if one kind of burst is missing."""
    return [long - short for long, short in zip(longer, shorter, strict=False)]


def _span_seconds(bursts: Sequence[Burst]) -> float:
    """Return the seconds from the first rank's start to the last rank's end."""
    start = min(burst.start_ns for burst in bursts)
    return (max(burst.end_ns for burst in bursts) - start) * 1e-9
