"""Sequential tests: the levels of looks, and what `perfexp ab` decides on synthetic runs whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from perfexp.comparison import comparison_table, judging
from perfexp.comparison.document import Verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.records.record import SweepMembership
from perfexp.statistics import sequential
from perfexp.statistics.sequential import LEAST, MOST, level
from perfexp.summaries.analysis import Analysis
from tests.support import verdicts
from tests.support.verdicts import TOGETHER, Shares, in_turn, judged, record

PAIRS = 60


def test_all_looks_together_have_the_level_of_one():
    """Sums of normal numbers: the share that is beyond a boundary at any look, by what has been spent until then."""
    draws = np.random.default_rng(0).standard_normal((40_000, MOST)).cumsum(axis=1)
    looks = np.arange(LEAST, MOST + 1)
    boundaries = stats.norm.isf(np.array([level(int(look)) for look in looks]) / 2) * np.sqrt(looks)
    crossed = np.maximum.accumulate(np.abs(draws[:, LEAST - 1 :]) > boundaries, axis=1).mean(axis=0)
    spent = 0.05 * np.log1p((math.e - 1) * looks / MOST)
    assert crossed == pytest.approx(spent, abs=0.004)
    assert spent[-1] == pytest.approx(0.05)


def test_level_is_0_before_looks_begin_and_constant_after_them():
    assert [level(count) for count in range(LEAST)] == [0.0] * LEAST
    assert level(LEAST) == pytest.approx(0.05 * math.log1p((math.e - 1) * LEAST / MOST))
    assert level(MOST + 5) == level(MOST)


def shares(name, pairs=PAIRS):
    return Shares.of(TOGETHER[name], pairs, in_turn)


def test_identical_sides_are_the_same_after_a_few_processes():
    found = shares("identical, 0.5 %")
    assert found.verdicts[Verdict.SAME] >= 0.95
    assert found.verdicts[Verdict.BETTER] + found.verdicts[Verdict.WORSE] == 0
    assert found.processes[0] < verdicts.PROCESSES + 3


def test_clear_difference_needs_fewer_processes():
    found = shares("3 % faster, 0.5 %")
    assert found.verdicts[Verdict.BETTER] >= 0.95
    assert found.processes[0] <= verdicts.PROCESSES / 2


def test_testing_after_each_pair_keeps_false_verdicts_rare():
    """Welch's test after each pair of identical sides: at the levels of the looks, and at 5 % each time."""
    one, two = np.random.default_rng(1).standard_normal((2, 4000, MOST))
    looks = range(LEAST, MOST + 1)
    p_values = [
        stats.ttest_ind(one[:, :n], two[:, :n], axis=1, equal_var=False).pvalue for n in looks
    ]
    false = np.any([p <= level(n) for n, p in zip(looks, p_values, strict=True)], axis=0).mean()
    assert false == pytest.approx(0.05, abs=0.01)
    assert np.any([p <= 0.05 for p in p_values], axis=0).mean() > 0.2


def both(count, run_level, *, other="ab"):
    """Two runs of a few processes each, 3 % apart."""
    rng, made = np.random.default_rng(3), []
    for number, ratio in enumerate((1.0, 0.97)):
        one = record(
            ["one", "two"][number],
            [[ratio * np.exp(0.005 * rng.standard_normal()) for _ in range(count)]],
            rng,
        )
        one.sweep = SweepMembership(uid=("ab", other)[number], job=number, level=run_level)
        made.append(one)
    return made


def test_verdict_and_interval_use_the_level_of_their_look():
    [strict], [usual] = judged(*both(3, 1e-4)), judged(*both(3, None))
    assert (strict.verdict, usual.verdict) == (Verdict.UNDECIDED, Verdict.BETTER)
    assert strict.p == usual.p
    assert strict.high / strict.low > 2 * usual.high / usual.low - 1
    assert strict.further_processes is None
    [elsewhere] = judged(*both(3, 1e-4, other="another"))
    assert elsewhere.verdict is Verdict.BETTER


def test_before_the_first_look_nothing_is_decided():
    [pair] = judged(*both(1, level(1)))
    assert (pair.verdict, pair.low, pair.p) == (Verdict.UNDECIDED, None, 1.0)


@pytest.mark.parametrize(
    ("count", "note"),
    [
        (1, "a longer --max-seconds to continue"),
        (MOST, f"after {MOST} processes of each side, the most"),
    ],
)
def test_the_table_names_the_confidence_and_what_would_decide(count, note):
    made = both(count, level(count) and 1e-15)
    compared = judging.compare(
        [Side.of(one.name, one.name, [Analysis.of(one)]) for one in made], Settings(margin=0.031)
    )
    text = "\n".join(
        [
            *comparison_table.header(compared),
            *comparison_table.grid(compared, compared.sides[1]).notes,
        ]
    )
    assert note in text
    words = (
        "no intervals before 2 processes"
        if count == 1
        else "100 % intervals, which hold 95 % of the time"
    )
    assert words in text
    assert sequential.level(count) == compared.sides[1].level or count == MOST
