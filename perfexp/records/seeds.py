"""Seeds: statistics over trainings to a target accuracy, one process with a seed each."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.records.point_times import interval_of
from perfexp.records.quantities import (
    ACCURACY,
    REACHED_SHARE,
    TARGET_ACCURACY,
    TARGET_P,
    TIME_TO_ACCURACY,
)
from perfexp.records.record import Metric, Point
from perfexp.records.rows import Row
from perfexp.records.units import digits
from perfexp.records.wording import metric_text, range_text
from perfexp.statistics import estimators
from perfexp.statistics.estimators import Interval


def metrics(seeds: Sequence[Point]) -> dict[str, Metric]:
    """Return metrics over all seeds by name; empty without a target accuracy.

    A stop at the target selects the last accuracy, so that accuracies of several evaluations have
    no interval and no p-value.

    Args:
        seeds: a point's finished processes, at least one.
    """
    targets = _values(seeds, TARGET_ACCURACY)
    if not targets:
        return {}
    times, accuracies = _values(seeds, TIME_TO_ACCURACY), _values(seeds, ACCURACY)
    summaries = [_metric(REACHED_SHARE, estimators.share_interval(len(times), len(seeds)))]
    if time := estimators.median_of_trials(times, len(seeds)):
        summaries.append(_metric(TIME_TO_ACCURACY, time))
    else:
        reason = f"reached by {len(times)} of {len(seeds)} seeds"
        summaries.append(Metric.of(TIME_TO_ACCURACY, None, reason=reason))
    if accuracies:
        accuracy, p_value = estimators.mean_of_shares(accuracies), _p_value(accuracies, targets[0])
        if any(sum(epoch.accuracy is not None for epoch in seed.epochs) > 1 for seed in seeds):
            accuracy = Interval(value=accuracy.value, low=None, high=None)
            reason = "an early stop selects accuracies; set mode.train.eval_every=EPOCHS"
            p_value = Metric.of(TARGET_P, None, reason=reason)
        summaries += [_metric(ACCURACY, accuracy), p_value]
    return {metric.name: metric for metric in summaries}


def _p_value(accuracies: Sequence[float], target: float) -> Metric:
    """Return the p-value for a mean accuracy at or below the target, or why there is none."""
    p = estimators.p_above(accuracies, target)
    if p is None:
        reason = "the accuracies do not vary" if len(accuracies) > 1 else "this is a single seed"
        return Metric.of(TARGET_P, None, reason=reason)
    return Metric.of(TARGET_P, p)


def sentences(row: Row) -> list[str]:
    """Return the time to a target accuracy and the accuracy, a line each; empty without a target.

    For example: `time to 94 % accuracy: 2.59 s ± 1.4 %, reached by 100 % (83.2 … 100 %) of seeds`.
    """
    target = row.value(TARGET_ACCURACY)
    if target is None:
        return []
    time = metric_text(row.metric(TIME_TO_ACCURACY)) or "no median"
    reached, accuracy = _share(row, REACHED_SHARE), _share(row, ACCURACY)
    lines = [f"time to {_percent(target)} accuracy: {time}, reached by {reached} of seeds"]
    if p := row.metric(TARGET_P):
        text = f"no p-value: {p.reason}"
        if p.value is not None:
            text = f"p = {digits(p.value, 2)} for a mean above {_percent(target)}"
        lines.append(f"accuracy: {accuracy}, {text}")
    return lines


def _values(seeds: Sequence[Point], name: str) -> list[float]:
    intervals = [interval_of(seed.metric(name)) for seed in seeds]
    return [interval.value for interval in intervals if interval]


def _metric(name: str, interval: Interval) -> Metric:
    return Metric.of(name, interval.value, low=interval.low, high=interval.high)


def _share(row: Row, name: str) -> str:
    """Return a share with its interval as text, in percent."""
    share = interval_of(row.metric(name))
    if share is None:
        return "an unknown share"
    ends = range_text(share, lambda value, _: _percent(value)) or "no interval"
    return f"{_percent(share.value)} ({ends})"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
