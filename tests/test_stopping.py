"""Stopping rules on simulated calls: how many they take, how right they are, and where they end."""

import math

import numpy as np
import pytest

from perfexp.errors import UserError
from perfexp.statistics import blockwise, estimators
from perfexp.stopping import Fixed, Precision
from tests.support.selection import first_always
from tests.support.simulation import (
    RUNS,
    SERIES,
    adapted,
    autoregressive,
    nvbench_stdrel_calls,
    take,
    true_median,
)

NOISE = np.random.default_rng(0).random(500)


@pytest.mark.slow
def test_precision_needs_few_calls_at_one_percent_noise():
    taken, theirs = [], []
    for seed in range(100):
        source = 1 + 0.01 * np.random.default_rng(seed).standard_normal(5000)
        samples, monitor = take(Precision(target=0.005, max_seconds=1e9, warmup_seconds=0), source)
        taken.append(samples.size - monitor.warmup(samples))
        theirs.append(nvbench_stdrel_calls(source))
    assert np.median(taken) <= 50
    assert np.median(taken) <= 0.5 * np.median(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_always("README: the ± of a process", SERIES))
def test_the_interval_at_the_stop_covers_the_truth(name):
    """Stopping when it looks good makes intervals too narrow; this is how much is left."""
    rng, truth, covered = np.random.default_rng(21), true_median(name), 0
    for _ in range(RUNS):
        samples, monitor = take(
            Precision(max_seconds=1e9, warmup_seconds=0), SERIES[name](rng, 6000)
        )
        interval = estimators.median_interval(samples[monitor.warmup(samples) :])
        covered += interval.low is not None and interval.low <= truth <= interval.high
    assert covered / RUNS >= adapted(0.92, nominal=0.95)


def test_the_reached_precision_is_the_one_asked_for():
    source = 1e-3 * (1 + 0.03 * np.random.default_rng(0).standard_normal(100_000))
    samples, monitor = take(Precision(target=0.01, max_seconds=1e9), source)
    stop = monitor.stop(samples)
    assert stop.reason == "precision"
    assert stop.achieved <= stop.target == 0.01


def test_time_runs_out_on_noise_that_never_settles():
    source = 1e-2 * (1 + 0.5 * np.random.default_rng(0).random(10_000))
    samples, monitor = take(Precision(target=1e-6, max_seconds=2.0), source)
    assert monitor.stop(samples).reason == "max_seconds"
    assert 2.0 <= samples[monitor.warmup(samples) :].sum() + 0.5 <= 3.2


def test_calls_run_out():
    samples, monitor = take(
        Precision(target=1e-9, max_seconds=1e9, max_calls=100, warmup_seconds=0), NOISE
    )
    assert monitor.stop(samples).reason == "max_calls"
    assert samples.size == 3 + 100


def test_call_slower_than_the_limit_is_measured_min_calls_times():
    samples, monitor = take(Precision(max_seconds=5.0, min_calls=5), np.full(100, 20.0))
    assert samples.size - monitor.warmup(samples) == 5


@pytest.mark.parametrize(("elapsed_seconds", "ends"), [(0.9, False), (1.3, True)])
@pytest.mark.parametrize("calls_per_sample", [1, 4])
def test_time_spent_beside_what_is_measured_counts(calls_per_sample, elapsed_seconds, ends):
    rule = Precision(target=1e-9, max_seconds=1.0, min_calls=10, warmup_calls=3, warmup_seconds=0.0)
    monitor = rule.begin(calls_per_sample=calls_per_sample)
    assert (monitor.more(NOISE[:23] * 1e-5, elapsed_seconds) == 0) == ends


def test_a_slow_warm_up_is_not_counted():
    rule = Precision(target=1e-9, max_seconds=1.0, min_calls=5, warmup_calls=1, warmup_seconds=0.0)
    taken = np.concatenate([[5.0], 0.01 * (1 + NOISE[:40])])
    assert rule.begin().more(taken, float(taken.sum())) > 0


def test_time_spent_beside_what_is_measured_warms_up_as_well():
    rule, taken = Precision(warmup_calls=3, warmup_seconds=0.5), np.full(20, 1e-3)
    for elapsed_seconds, warmup in ((0.02, 20), (1.0, 10)):
        monitor = rule.begin()
        monitor.more(taken, elapsed_seconds)
        assert monitor.warmup(taken) == pytest.approx(warmup, abs=1)


def test_samples_without_a_time_end_nothing():
    assert Precision(warmup_seconds=0.0).begin().more(np.zeros(100)) > 0


@pytest.mark.parametrize(
    ("max_seconds", "elapsed_seconds", "ends"),
    [
        (0.4, 2.5, False),
        (0.4, 3.0, True),
        (1.0, 3.2, False),
        (1.0, 3.8, True),
        (5.0, 11.0, False),
        (5.0, 12.0, True),
    ],
)
def test_series_without_interval_continues_twice_or_two_seconds(max_seconds, elapsed_seconds, ends):
    """The first three of the 23 samples are warm-up, and an equal share of the time is theirs."""
    rule = Precision(
        target=1e-9, max_seconds=max_seconds, min_calls=10, warmup_calls=3, warmup_seconds=0.0
    )
    drifting = (np.cumsum(NOISE - 0.5) + 50.0)[:23] * 1e-5
    assert estimators.median_interval(drifting[3:]).low is None
    assert (rule.begin().more(drifting, elapsed_seconds) == 0) == ends


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.0, 0.7, 0.9])
def test_tripled_interval_of_a_cut_series_holds_the_truth(rho):
    rng, has, held = np.random.default_rng(4), 0, 0
    for _ in range(300):
        rule = Precision(target=1e-9, max_seconds=20.0, warmup_seconds=0.0)
        samples, monitor = take(rule, autoregressive(rho)(rng, 100))
        interval = estimators.median_interval(samples[monitor.warmup(samples) :])
        if interval.low is not None:
            has += 1
            below, above = interval.value - interval.low, interval.high - interval.value
            held += (
                -estimators.FEW_TOO_NARROW * above
                <= interval.value - 1
                <= estimators.FEW_TOO_NARROW * below
            )
    assert has > 60
    assert held / has > 0.85


def test_an_interval_that_comes_late_ends_the_series():
    rule = Precision(target=1e-9, max_seconds=6.0, min_calls=3, warmup_calls=3, warmup_seconds=0.0)
    samples, monitor = take(rule, 1 + 0.01 * NOISE)
    assert monitor.stop(samples).achieved is not None
    assert estimators.median_interval(samples[3 : monitor.starts[-1]]).low is None
    assert 6.0 < samples[3:].sum() < 12.0


def test_warm_up_lasts_three_calls_and_half_a_second():
    fast, slow = np.full(5000, 1e-3), np.full(50, 1.0)
    samples, monitor = take(Precision(), fast)
    assert monitor.warmup(samples) == 500
    samples, monitor = take(Precision(), slow)
    assert monitor.warmup(samples) == 3


@pytest.mark.parametrize("shape", ["ramp", "exponential", "step"])
def test_a_warm_up_longer_than_half_a_second_is_cut_or_tagged(shape):
    rng, n, length = np.random.default_rng(3), 5000, 100
    time = np.arange(n)
    extra = {
        "ramp": np.clip(1 - time / length, 0, 1),
        "exponential": np.exp(-time / (length / 5)),
        "step": (time < length).astype(float),
    }[shape]
    steady = 5e-3 * (1 + 0.01 * rng.standard_normal(n))
    samples, monitor = take(Precision(target=0.002, max_seconds=5.0), steady * (1 + extra))
    kept = samples[monitor.warmup(samples) :]
    bias = abs(np.median(kept) / np.median(steady) - 1)
    assert bias <= 0.001 or estimators.drift(kept) is not None


def test_percentiles_prolong_a_measurement_until_they_are_known():
    source = 1e-3 * (1 + 0.01 * np.random.default_rng(0).standard_normal(50_000))
    without, monitor = take(Precision(), source)
    samples, monitor = take(Precision(), source, percentiles=(50, 95, 99))
    kept = samples[monitor.warmup(samples) :]
    assert blockwise.summarise([kept]).percentiles[99.0].low is not None
    assert samples.size > without.size


@pytest.mark.parametrize(("tail", "least", "most"), [(50.0, 5.0, 5.2), (95.0, 5.2, 9.5)])
def test_series_continues_until_its_percentile_has_an_interval(tail, least, most):
    """Calls of 0.075 s: 66 fit into five seconds, p95 takes 72 and more, p99 would take 368."""
    source = 0.075 * (1 + 0.001 * np.random.default_rng(0).standard_normal(5_000))
    rule = Precision(max_seconds=5.0, warmup_seconds=0.0, tail_percentile=tail)
    samples, monitor = take(rule, source, percentiles=(50, 95, 99))
    kept = samples[monitor.warmup(samples) :]
    assert (estimators.percentile_interval(kept, 95).low is not None) == (tail == 95)
    assert least <= kept.sum() <= most


@pytest.mark.parametrize(("call_seconds", "most"), [(0.15, 5.2), (0.1, 10.2)])
def test_percentile_overtime_ends_or_never_starts_if_hopeless(call_seconds, most):
    """Of calls of 0.15 s 66 fit into ten seconds: p95 takes 72."""
    source = call_seconds * (1 + 0.001 * np.random.default_rng(0).standard_normal(5_000))
    rule = Precision(max_seconds=5.0, warmup_seconds=0.0, tail_percentile=95)
    samples, monitor = take(rule, source, percentiles=(95,))
    assert monitor.stop(samples).reason == "max_seconds"
    assert samples[monitor.warmup(samples) :].sum() <= most


def test_k_calls_per_sample_count_as_k_calls():
    samples, monitor = take(
        Precision(target=1e-9, max_seconds=1e9, max_calls=1000, warmup_seconds=0), NOISE, k=10
    )
    assert samples.size - monitor.warmup(samples) >= 100
    assert samples.size <= 102


def test_fixed_takes_exactly_what_it_says():
    samples, monitor = take(Fixed(warmup=10, measure=20), np.ones(100))
    assert samples.size == 30
    assert monitor.warmup(samples) == 10
    assert monitor.stop(samples).reason == "fixed"


def test_fixed_without_warm_up():
    samples, monitor = take(Fixed(warmup=0, measure=5), np.ones(100))
    assert (samples.size, monitor.warmup(samples)) == (5, 0)


@pytest.mark.parametrize(
    "wrong", [{"target": math.nan}, {"max_seconds": math.inf}, {"warmup_seconds": math.nan}]
)
def test_times_that_are_no_numbers_are_refused(wrong):
    with pytest.raises(UserError, match="finite number"):
        Precision(**wrong)


@pytest.mark.parametrize("wrong", [{"measure": 10**9}, {"warmup": 10**9}])
def test_more_calls_than_can_be_kept_are_refused(wrong):
    with pytest.raises(UserError, match="every time is stored"):
        Fixed(**wrong)
