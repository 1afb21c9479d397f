"""Joint: what several ranks do together: throughput, what sharing the gradients costs, and what one rank does alone.

All ranks make so many calls as fast as they can, without hearing of one another but through the gradients; the stretch
lasts from the first rank's start to the last one's end. Stretches of different kinds take turns, and shares are of one
round each, every other one in reverse, so that what slows all of them for a while hardly changes any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from perfexp.errors import Unsupported
from perfexp.models import Sharing
from perfexp.modes import Step
from perfexp.ranks import Crew, Stretch
from perfexp.records import diagnostics
from perfexp.records.record import Metric, Point, Series, Stop
from perfexp.records.summary import loop_interval
from perfexp.statistics import estimators

#: A stretch lasts about so long; what its barrier leaves of skew, some ten microseconds, is little of that.
_STRETCH_SECONDS = 0.05
#: It begins with an idle device, so that longer calls have to be several too, unless that takes longer than this.
_CALLS, _LONGEST_SECONDS = 4, 0.2
#: Rounds, of which the first are warm-up: a kind of stretch that is new may still choose kernels.
_ROUNDS, _WARMUP = 22, 2
_COMMUNICATION, _EFFICIENCY = "ranks/communication_share", "ranks/scaling_efficiency"
#: The stretches of all and the calls of the first rank may differ by this fraction before the point says so.
_TOLERANCE = 0.05


def measure(point: Point, step: Step, crew: Crew, *, compares_alone: bool) -> None:
    """Measure stretches of calls and put them, with what follows from them, into a point.

    Args:
        point: that has been timed.
        step: joined by the crew.
        crew: the ranks.
        compares_alone: whether the first rank is also measured alone.

    Raises:
        Unsupported: the point has no time.
    """
    step_by_step = loop_interval(point)
    if step_by_step is None or step_by_step.value <= 0:
        raise Unsupported("the call was not timed")
    seconds = step_by_step.value
    enough, most = (math.ceil(round(limit / seconds, 6)) for limit in (_STRETCH_SECONDS, _LONGEST_SECONDS))
    calls = max(enough, min(_CALLS, most))
    kinds = [Sharing.all]
    kinds += [Sharing.no_gradients] if step.trains else []
    kinds += [Sharing.alone] if compares_alone else []
    found: dict[Sharing, list[Sequence[Stretch]]] = {kind: [] for kind in kinds}
    for number in range(_ROUNDS):
        for kind in list(found) if number % 2 else list(reversed(found)):
            stretches = crew.stretch(step, calls, kind)
            found[kind].append(stretches)
            if error := stretches[0].error:
                del found[kind]
                reason = f"the first rank alone can't make the call: {error}"
                point.metrics.append(Metric(name=_EFFICIENCY, value=None, unit="1", reason=reason))
    for kind, rounds in found.items():
        samples = [_seconds(stretches[:1] if kind is Sharing.alone else stretches) / calls for stretches in rounds]
        stop = Stop(reason="fixed", achieved=estimators.median_interval(samples[_WARMUP:]).relative_half_width)
        name = f"ranks/{kind.value}"
        point.series.append(
            Series(name=name, samples=samples, warmup=_WARMUP, calls_per_sample=calls, stop=stop),
        )
    _add_figures(point, found[Sharing.all], calls, crew.size)
    in_stretches = estimators.mean_interval(_of(point, Sharing.all))
    if estimators.differ(in_stretches, step_by_step, _TOLERANCE):
        point.doubts.append(diagnostics.make("ranks_disagree", ratio=in_stretches.value / seconds))


def _of(point: Point, sharing: Sharing) -> list[float]:
    """Seconds of a call in the stretches of a kind; nothing where there were none."""
    series = point.find_series(f"ranks/{sharing.value}")
    return series.measured if series else []


def _add_figures(point: Point, rounds: Sequence[Sequence[Stretch]], calls: int, size: int) -> None:
    of_all, batch = _of(point, Sharing.all), point.key.batch_size
    rates = {"samples_per_second": batch * size / fmean(of_all)}
    for number in range(size):
        own = [_seconds([stretches[number]]) / calls for stretches in rounds[_WARMUP:]]
        rates[f"{number}/samples_per_second"] = batch / fmean(own)
    point.metrics += [Metric(name=f"ranks/{name}", value=rate, unit="samples/s") for name, rate in rates.items()]
    parts = {kind: [each / whole for each, whole in zip(_of(point, kind), of_all, strict=False)] for kind in Sharing}
    shares = {_COMMUNICATION: [1 - part for part in parts[Sharing.no_gradients]], _EFFICIENCY: parts[Sharing.alone]}
    point.facts["ranks"] = {}
    for name, of_rounds in shares.items():
        if of_rounds:
            share = estimators.median_interval(of_rounds)
            point.metrics.append(Metric(name=name, value=share.value, unit="1"))
            point.facts["ranks"][name.removeprefix("ranks/")] = {"low": share.low, "high": share.high}


def _seconds(stretches: Sequence[Stretch]) -> float:
    """From the first start to the last end."""
    return (max(each.end_ns for each in stretches) - min(each.start_ns for each in stretches)) * 1e-9
