"""Joint throughput of all ranks compared with a single rank, and causes of the difference.

In a burst, all ranks make calls as fast as they can, coupled only by their gradients. A burst lasts
from the first rank's start to the last rank's end. Kinds of bursts take turns, in reverse every
other round. Shares compare bursts from the same round, so that a slow phase of the machine hardly
changes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from perfexp.errors import Unsupported
from perfexp.models import Sharing
from perfexp.modes import Step
from perfexp.ranks import Burst, ProcessGroup
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
    """Measure bursts of a joined step and add their metrics to a point.

    Args:
        compares_alone: whether to also measure the first rank alone and, in training, all ranks
            without sharing.

    Raises:
        Unsupported: the point has no time.
    """
    step_by_step = loop_interval(point)
    if step_by_step is None or step_by_step.value <= 0:
        raise Unsupported("the call was not timed")
    seconds = step_by_step.value
    enough = math.ceil(round(_BURST_SECONDS / seconds, 6))
    most = math.ceil(round(_LONGEST_SECONDS / seconds, 6))
    calls = max(enough, min(_CALLS, most))
    wanted = {
        Sharing.all: True,
        Sharing.no_gradients: step.trains,
        Sharing.nothing: step.trains and compares_alone,
        Sharing.alone: compares_alone,
    }
    rounds_of: dict[Sharing, list[Sequence[Burst]]] = {kind: [] for kind in wanted if wanted[kind]}
    for number in range(_ROUNDS):
        for kind in list(rounds_of) if number % 2 else list(reversed(rounds_of)):
            bursts = group.burst(step, calls, kind)
            rounds_of[kind].append(bursts)
            if error := next((burst.error for burst in bursts if burst.error), None):
                del rounds_of[kind]
                reason = f"one rank by itself can't make the call: {error}"
                point.metrics.append(Metric.of(_FIGURES[kind], None, reason=reason))
    for kind, rounds in rounds_of.items():
        num_ranks = 1 if kind is Sharing.alone else group.size
        samples = [_seconds(bursts[:num_ranks]) / calls for bursts in rounds]
        achieved = estimators.median_interval(samples[_WARMUP:]).relative_half_width
        stop = Stop(reason="fixed", achieved=achieved)
        name = f"ranks/{kind.value}"
        point.series.append(
            Series(name=name, samples=samples, warmup=_WARMUP, calls_per_sample=calls, stop=stop)
        )
    _add_figures(point, rounds_of[Sharing.all], calls, group.size)
    in_bursts = estimators.mean_interval(_of(point, Sharing.all))
    if estimators.differ(in_bursts, step_by_step, _TOLERANCE):
        point.doubts.append(diagnostics.make("ranks_disagree", ratio=in_bursts.value / seconds))


def _of(point: Point, sharing: Sharing) -> list[float]:
    series = point.find_series(f"ranks/{sharing.value}")
    if series:
        return series.measured
    return []


def _add_figures(point: Point, rounds: Sequence[Sequence[Burst]], calls: int, size: int) -> None:
    of_all, batch = _of(point, Sharing.all), point.key.batch_size
    rates = {RANKS_RATE: batch * size / fmean(of_all)}
    for number in range(size):
        own = [_seconds([bursts[number]]) / calls for bursts in rounds[_WARMUP:]]
        rates[member(RANK_RATE, number)] = batch / fmean(own)
    point.metrics += [Metric.of(name, rate) for name, rate in rates.items()]
    parts = {}
    for kind in Sharing:
        pairs = zip(_of(point, kind), of_all, strict=False)
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
    return [whole - part for whole, part in zip(longer, shorter, strict=False)]


def _seconds(bursts: Sequence[Burst]) -> float:
    start = min(burst.start_ns for burst in bursts)
    return (max(burst.end_ns for burst in bursts) - start) * 1e-9
