"""Several processes together, and detectable differences."""

import math

import numpy as np
import pytest
from scipy import stats

from perfexp.statistics import blockwise, moderated
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import geometric_mean
from perfexp.statistics.prior import Component


@pytest.mark.parametrize("processes", [3, 5, 10])
def test_detectable_difference_is_detected_in_four_of_five_cases(processes):
    deviation = 0.03
    ratio = moderated.detectable_ratio(Component(variance=deviation**2, degrees=9), processes)
    generator = np.random.default_rng(3)
    one = generator.normal(0, deviation, (20_000, processes))
    other = generator.normal(math.log1p(ratio), deviation, (20_000, processes))
    rejected = stats.ttest_ind(one, other, axis=1, equal_var=False).pvalue < 0.05
    assert rejected.mean() == pytest.approx(0.8, abs=0.03)


def processes_with(*, zeros):
    """Summary of 100 calls of about 1, 1.1 and 1.2 s in three processes, of which the second begins with zeros."""
    generator = np.random.default_rng(7)
    samples = [level * np.exp(generator.normal(0, 0.01, 100)) for level in (1.0, 1.1, 1.2)]
    samples[1][:zeros] = 0.0
    return moderated.combined(
        [blockwise.summarise([one]) for one in samples], samples
    ).summary, samples


def test_a_process_with_a_call_of_0_counts_as_the_others_do():
    (whole, _), (found, samples) = processes_with(zeros=0), processes_with(zeros=1)
    assert found.n == 300
    assert found.minimum == 0
    assert found.median.value == pytest.approx((1.0 * 1.1 * 1.2) ** (1 / 3), rel=0.01)
    assert found.mean.value == pytest.approx(np.prod([one.mean() for one in samples]) ** (1 / 3))
    assert found.median.relative_half_width == pytest.approx(
        whole.median.relative_half_width, rel=0.05
    )


@pytest.mark.parametrize("zeros", [60, 100])
def test_process_with_median_zero_does_not_isolate_the_first(zeros):
    found, samples = processes_with(zeros=zeros)
    together = np.concatenate(samples)
    assert found.n == 300
    assert (found.median.value, found.mean.value) == (
        np.median(together),
        pytest.approx(together.mean()),
    )
    assert found.mean.low < np.mean([one.mean() for one in samples]) < found.mean.high
    assert found.mean.relative_half_width > 0.3


def test_a_constant_process_counts_as_the_others_do():
    samples = [np.full(100, 1.0), 1.1 * np.exp(np.random.default_rng(7).normal(0, 0.01, 100))]
    found = moderated.combined([blockwise.summarise([one]) for one in samples], samples).summary
    assert found.n == 200
    assert found.median.value == pytest.approx(math.sqrt(1.1), rel=0.01)


def far_apart():
    """Summaries and samples of three processes of about 1, 7 and 150 ms."""
    generator = np.random.default_rng(0)
    samples = [1e-3 * np.exp(generator.normal(level, 0.05, 400)) for level in (0.0, 2.0, 5.0)]
    return [blockwise.summarise([one]) for one in samples], samples


def test_percentile_interval_spans_distant_processes_by_ratio():
    summaries, samples = far_apart()
    found = moderated.combined(summaries, samples).summary.percentiles[95]
    demanded = geometric_mean([one.percentiles[95].value for one in summaries])
    assert math.log(found.high / found.value) == pytest.approx(
        math.log(demanded.high / demanded.value)
    )
    assert math.log(found.value / found.low) == pytest.approx(
        math.log(demanded.value / demanded.low)
    )


def test_percentile_interval_does_not_cross_the_median():
    generator = np.random.default_rng(0)
    samples = [1e-3 * np.exp(generator.normal(0.0, 0.01, 400)) for _ in range(3)]
    for one, share in zip(samples, (1.1, 1.6, 3.0), strict=True):
        one[::10] *= share  # the tails of the processes differ, their medians do not
    found = moderated.combined(
        [blockwise.summarise([one], percentiles=(5, 50, 95)) for one in samples], samples
    ).summary
    assert found.percentiles[95].low == found.median.low < found.percentiles[95].value
    mirrored = [1e-6 / one for one in samples]
    found = moderated.combined(
        [blockwise.summarise([one], percentiles=(5, 50, 95)) for one in mirrored], mirrored
    ).summary
    assert found.percentiles[5].high == found.median.high > found.percentiles[5].value


def test_logarithmic_width_grows_with_the_interval_even_beyond_0():
    ends = [(1 - width, 1 + width) for width in (0.01, 0.5, 0.9, 0.999, 1.0, 1.5)]
    widths = [Interval(value=1.0, low=low, high=high).log_half_width for low, high in ends]
    assert widths == sorted(widths)
    assert widths[-1] < 2
    assert Interval(value=0.0, low=0.0, high=4.0).log_half_width is None
    assert Interval(value=2.0, low=1.98, high=2.02).log_half_width == pytest.approx(0.01, rel=1e-3)
