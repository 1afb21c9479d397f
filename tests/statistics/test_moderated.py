"""The variance between processes, shrunk towards what is known: formulas, and coverage with known truth."""

import math

import numpy as np
import pytest
from scipy import special, stats

from perfexp.records import diagnostics, priors, summary
from perfexp.records.record import Key, Point, Status
from perfexp.statistics import ratios
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import Repeats, geometric_mean, pooled, spread_interval
from perfexp.statistics.prior import LEAST_VARIANCE, Component, Prior
from tests.support.builders import Builder

PRIOR = Prior(variance=1e-4, degrees=3.0)


def held(rng, *, processes, prior=PRIOR, noise=1.0, within=0.0, runs=4000):
    """Share of intervals that hold 1, for figures whose variances differ as the prior says, times `noise`²."""
    found = 0
    for _ in range(runs):
        variance = noise**2 * prior.variance * prior.degrees / rng.chisquare(prior.degrees)
        values = np.exp(rng.normal(0, math.sqrt(variance + within), processes))
        interval = Repeats(values=tuple(values), within=within, prior=prior.on([])).interval
        found += interval.low <= 1 <= interval.high
    return found / runs


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 20])
def test_intervals_hold_the_truth_for_any_number_of_processes(processes):
    assert held(np.random.default_rng(processes), processes=processes) >= 0.95 - 0.012


@pytest.mark.parametrize(("processes", "least"), [(1, 0.87), (3, 0.86), (5, 0.9)])
@pytest.mark.parametrize("degrees", [3.0, 100.0])
def test_intervals_hold_it_on_a_machine_three_times_as_noisy(processes, least, degrees):
    prior = Prior(variance=1e-4, degrees=degrees)
    assert held(np.random.default_rng(7), processes=processes, prior=prior, noise=3.0) >= least


@pytest.mark.parametrize("processes", [1, 3])
def test_what_the_calls_of_a_process_explain_is_in_the_interval(processes):
    assert held(np.random.default_rng(3), processes=processes, within=4e-4) >= 0.95 - 0.012


def test_the_variance_is_the_mean_of_prior_and_own_by_degrees():
    """By hand: s² of (0, 0.02, 0.04) is 4e-4 with two degrees, the prior 1e-4 with three."""
    found = Repeats(values=tuple(np.exp([0.0, 0.02, 0.04])), prior=PRIOR)
    assert found.component.variance == pytest.approx((3 * 1e-4 + 2 * 4e-4) / 5)
    assert found.component.degrees == pytest.approx(5)
    half = stats.t.ppf(0.975, 5) * math.sqrt(2.2e-4 / 3)
    interval = found.interval
    assert interval.value == pytest.approx(math.exp(0.02))
    assert math.log(interval.high / interval.value) == pytest.approx(half)


def test_interval_without_a_prior_is_students_of_the_logarithms():
    values = (1.0, 1.02, 0.99, 1.01)
    expected = stats.ttest_1samp(np.log(values), 0).confidence_interval(0.95)
    found = geometric_mean(values)
    assert (found.low, found.high) == (
        pytest.approx(math.exp(expected.low)),
        pytest.approx(math.exp(expected.high)),
    )
    assert geometric_mean([1.0]) == Interval(value=1.0, low=None, high=None)


def test_one_process_has_no_interval_where_its_samples_have_none():
    bare, known = Interval(value=1.0, low=None, high=None), Interval(value=1.0, low=0.99, high=1.01)
    assert Repeats.of([bare], PRIOR).interval.low is None
    assert Repeats.of([bare, known], PRIOR).component == Repeats.of([bare, known]).own
    one = Repeats.of([known], PRIOR)
    assert one.interval.relative_half_width > 0.01
    few = Repeats.of([known], PRIOR, effective=10)
    assert few.within == pytest.approx(9 * one.within)


def test_more_processes_do_not_lower_variance_between_servers():
    prior = Prior(variance=1e-4, degrees=3.0, server=4e-4)
    for count in (1, 5, 100):
        forked = Repeats(values=(1.0,) * count, prior=prior)
        assert forked.error.variance == pytest.approx(forked.component.variance / count + 4e-4)
        assert forked.without_server().error.variance == pytest.approx(
            forked.component.variance / count
        )
        assert forked.error.degrees >= forked.without_server().error.degrees


def test_the_figures_of_a_machine_replace_what_was_known():
    rng, truth = np.random.default_rng(0), 9e-4
    cells = [Component(variance=truth * float(rng.chisquare(4)) / 4, degrees=4) for _ in range(200)]
    one, many = PRIOR.on(cells[:1]), PRIOR.on(cells)
    assert PRIOR.on([]).variance == pytest.approx(PRIOR.variance)
    assert PRIOR.on([]).degrees < one.degrees < many.degrees <= PRIOR.degrees
    assert PRIOR.variance < one.variance
    # the mean of log s² is that of log s₀² + log ν₀ / χ², whatever s₀² the machine has
    bias = special.digamma(PRIOR.degrees / 2) - math.log(PRIOR.degrees / 2)
    assert many.variance == pytest.approx(truth * math.exp(bias), rel=0.15)
    assert many.cells == 200
    rounded = [Component(variance=variance, degrees=4) for variance in (0.0, 1e-30)]
    assert PRIOR.on(rounded) == PRIOR.on([Component(variance=LEAST_VARIANCE, degrees=4)] * 2)


def test_single_processes_are_decided_beyond_process_spread():
    one, two, near = (
        Repeats(values=(value,), prior=priors.of_kind("cuda")["device"])
        for value in (1.0, 2.0, 1.001)
    )
    assert ratios.log_ratio(two, one).p_beyond(0.01) < 0.05
    assert ratios.log_ratio(near, one).p_beyond(0.01) == 1.0
    assert ratios.log_ratio(Repeats(values=(2.0,)), one).interval().low is None


def test_components_are_pooled_by_their_degrees_of_freedom():
    found = pooled([Component(variance=1e-4, degrees=1), Component(variance=4e-4, degrees=2)])
    assert (found.variance, found.degrees) == (pytest.approx(3e-4), 3)


def test_the_interval_of_a_spread_holds_the_true_one():
    groups = np.exp(np.random.default_rng(5).normal(0, 0.02, (2000, 10)))
    intervals = [spread_interval(Repeats(values=tuple(group)).own) for group in groups]
    held = np.mean([one.low <= math.expm1(0.02) <= one.high for one in intervals])
    assert held == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("processes", [3, 8])
def test_another_run_lies_within_root_two_times_the_interval(processes):
    runs = np.random.default_rng(processes).normal(0, 0.02, (4000, 2, processes))
    intervals = [geometric_mean(np.exp(run[0])) for run in runs]
    apart = np.array(
        [abs(run[1].mean() - math.log(one.value)) for run, one in zip(runs, intervals, strict=True)]
    )
    half = np.array([one.log_half_width for one in intervals])
    assert np.mean(apart <= math.sqrt(2) * half) == pytest.approx(0.95, abs=0.012)
    assert np.mean(apart <= half) < 0.92


@pytest.mark.parametrize(
    ("figure", "bound_by", "name"),
    [
        ("device", "launch", "device"),
        ("device/graph", None, "device"),
        ("energy", "launch", "device"),
        ("latency", "gpu", "latency"),
        ("p95", "gpu", "latency"),
        ("samples_per_second", "gpu", "rate"),
        ("epoch", "gpu", "rate"),
        ("latency", "launch", "host-bound"),
        ("samples_per_second", "mixed", "host-bound"),
        ("latency", None, "host-bound"),
        ("memory", None, "memory"),
    ],
)
def test_each_figure_has_a_class(figure, bound_by, name):
    assert priors.class_of(figure, bound_by) == name


def test_the_shipped_priors_have_what_figures_of_each_kind_need():
    for kind, known in priors.shipped().items():
        assert {"host-bound", "memory"} <= known.keys(), kind
        assert all(one.cells >= 4 and one.origin for one in known.values()), kind
    assert {"device", "latency", "rate"} <= priors.of_kind("cuda").keys()


def timed(**facts):
    doubts = (
        [diagnostics.make("busy_host", load=facts["other_cpu_cores"], cores=2)]
        if "other_cpu_cores" in facts
        else []
    )
    key = Key(phase="inference", input_size=(32, 32), batch_size=1, precision="fp32", replicate=0)
    return Point(key=key, status=Status.OK, facts=facts, doubts=doubts)


def test_processes_of_a_server_share_it_and_fresh_ones_do_not():
    known = priors.of_kind("cuda")
    server = known["host-bound"].server
    assert server > 0
    of_gpu = {"device_method": "queue", "bound_by": "launch"}
    assert priors.find(known, [timed(**of_gpu, process_start="forked")], "latency").server == server
    assert priors.find(known, [timed(**of_gpu, process_start="fresh")], "latency").server == 0.0
    assert (
        priors.find(known, [timed(device_method="queue", process_start="forked")], "device").server
        == 0.0
    )


def test_other_cpu_work_widens_runs_but_not_alternating_ones():
    known = priors.of_kind("cpu")
    idle, busy = timed(process_start="forked"), timed(process_start="forked", other_cpu_cores=1.0)
    usual = priors.find(known, [idle, idle], "latency").server
    assert priors.find(known, [busy, busy], "latency").server == pytest.approx(
        usual + math.log(2) ** 2
    )
    assert priors.find(known, [idle, busy], "latency").server == pytest.approx(
        usual + (math.log(2) / 2) ** 2
    )
    assert (
        priors.find(known, [busy], "memory").server == priors.find(known, [idle], "memory").server
    )
    of_gpu = timed(process_start="fresh", device_method="queue", other_cpu_cores=1.0)
    assert priors.find(priors.of_kind("cuda"), [of_gpu], "latency").server == 0.0
    assert priors.find(known, [busy], "latency", free=1) == priors.find(known, [idle], "latency")
    busier = timed(process_start="forked", other_cpu_cores=1.5)
    assert priors.find(known, [busier], "latency", free=1).server == pytest.approx(
        usual + math.log(1.5) ** 2
    )
    figure = Repeats(values=(1.0, 1.01, 0.99), prior=priors.find(known, [busy], "latency"))
    assert figure.half_width > 3 * figure.without_server().half_width


@pytest.mark.parametrize(
    ("session", "cpu", "ranks", "free"),
    [
        ({"threads": 1}, {"logical_cores": 2, "affinity": [0, 1]}, None, 1),
        ({"threads": 1}, {"logical_cores": 64, "affinity": [0, 1]}, None, 1),
        ({"threads": 2}, {"logical_cores": 8}, None, 6),
        ({"threads": 4}, {"logical_cores": 2}, None, 0),
        ({"threads": 1}, {}, None, 0),
        ({}, {"logical_cores": 2}, None, 0),
        ("unknown", None, None, 0),
        ({"threads": 1}, {"logical_cores": 2}, {"devices": 2}, 0),
    ],
)
def test_work_on_spare_cores_does_not_widen_intervals(make_record, session, cpu, ranks, free):
    others = 1.0
    points = [
        Builder().point(
            0.01 * factor,
            replicate=number,
            facts={"other_cpu_cores": others, "process_start": "forked"},
        )
        for number, factor in enumerate((1.0, 1.01, 0.99))
    ]
    for point in points:
        point.doubts = [diagnostics.make("busy_host", load=others, cores=2)]
    made = make_record(points=points)
    made.environment |= {"session": session, "cpu": cpu} | ({"ranks": ranks} if ranks else {})
    assert priors.free_cores(made) == free
    [row] = summary.rows(made)
    widened = priors.find(priors.of_record(made), points, "latency", free).server
    assert row.figures["latency"].prior.server == widened


def test_ratios_of_extreme_figures_have_finite_ends():
    """A damaged record may hold any number."""
    other, baseline = Repeats(values=(1e-300, 1e300)), Repeats(values=(1e-300, 1.0))
    for one in (ratios.log_ratio(other, baseline), ratios.log_ratio(baseline, other)):
        interval = one.interval()
        assert 0 < interval.low < interval.value < interval.high < math.inf
    assert ratios.LogRatio(value=1000.0).interval().value < math.inf
