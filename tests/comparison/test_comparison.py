"""Comparison: verdicts on synthetic records whose truth is known, histories, many pairs, and what is paired."""

import math
import re

import numpy as np
import pytest
from msgspec.structs import replace as replace_key
from scipy import stats

from perfexp.comparison import comparison_table, judging, measures
from perfexp.comparison.document import Verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.errors import UserError
from perfexp.records.analysis import Analysis
from perfexp.records.record import Epoch, Metric, Point, Series, Status, SweepMembership
from perfexp.statistics import ratios
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.prior import Prior
from tests.support import verdicts
from tests.support.simulation import adapted
from tests.support.verdicts import SCENARIOS, Scenario, Shares, judged, record

PAIRS = 200


def shares(name):
    return Shares.of(SCENARIOS[name], PAIRS)


def differing(found):
    return found.verdicts[Verdict.BETTER] + found.verdicts[Verdict.WORSE]


@pytest.mark.parametrize(
    "name", ["identical, 0.5 %", "identical, 1 %", "identical, sticky clocks 2 %"]
)
def test_identical_sides_have_no_winner_and_cover_the_truth(name):
    found = shares(name)
    assert differing(found) <= 0.01
    assert abs(found.covered - 0.95) <= adapted(0.97, 0.95, PAIRS) - 0.95


def test_a_difference_far_below_the_margin_is_the_same():
    found = shares("0.2 % faster, 0.5 %")
    assert found.verdicts[Verdict.SAME] >= adapted(0.80, 0.83, PAIRS)
    assert differing(found) == 0


@pytest.mark.parametrize("name", ["3 % faster, 0.5 %", "3 % faster, 1 %"])
def test_a_difference_far_above_the_margin_is_found(name):
    found = shares(name)
    assert found.verdicts[Verdict.BETTER] >= 0.90
    assert found.verdicts[Verdict.WORSE] == 0


@pytest.mark.slow
def test_few_of_the_verdicts_of_a_sweep_of_100_points_are_false():
    false, named = np.mean([verdicts.sweep(seed) for seed in range(10)], axis=0)
    assert false <= 0.05
    assert named >= 0.9


def repeats(*values):
    return Repeats(values=values)


def test_the_ratio_of_two_samples_is_that_of_welchs_test():
    """`scipy.stats.ttest_ind` on the logarithms."""
    one, two = (1.0, 1.02, 0.99, 1.01), (1.1, 1.13, 1.08)
    found = ratios.log_ratio(repeats(*two), repeats(*one))
    expected = stats.ttest_ind(np.log(two), np.log(one), equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert found.degrees == pytest.approx(expected.df)
    assert (found.interval().low, found.interval().high) == pytest.approx(
        (math.exp(low), math.exp(high))
    )
    assert found.p_beyond(0.0) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize(
    ("times", "factor", "start", "remedy"),
    [
        ([0.93, 1.0, 1.07], 1.09, "+N: ", "processes={total}, enough for the largest N"),
        ([0.95, 1.0, 1.05], 1.019, "UNDECIDED without +N: even 100 processes", "--margin"),
    ],
)
def test_an_undecided_pair_comes_with_what_would_decide_it(times, factor, start, remedy):
    rng, other = np.random.default_rng(0), [factor * value for value in times]
    found = compare(record("one", [times], rng), record("two", [other], rng))
    [pair], [note] = found.pairs, comparison_table.grid(found, found.sides[1]).notes
    assert pair.verdict is Verdict.UNDECIDED
    assert note.startswith(start)
    assert remedy.format(total=len(times) + (pair.further_processes or 0)) in note


def test_recommended_process_count_decides_in_80_percent():
    truth, spread = 1.02, 0.01
    rng = np.random.default_rng(5)
    side = lambda ratio, count: repeats(*(ratio * np.exp(spread * rng.standard_normal(count))))  # noqa: E731
    exact = spread * np.array([1.0, 0.0, -1.0])
    one, two = repeats(*np.exp(exact)), repeats(*(truth * np.exp(exact)))
    ratio = ratios.log_ratio(two, one)
    assert ratio.p_beyond(0.01) > 0.05
    count = 3 + ratios.further_processes(two, one, ratio, 0.01)
    decided = [
        ratios.log_ratio(side(truth, count), side(1.0, count)).p_beyond(0.01) <= 0.05
        for _ in range(300)
    ]
    assert np.mean(decided) == pytest.approx(0.8, abs=0.08)
    assert ratios.further_processes(two, one, ratio, math.expm1(ratio.value)) is None


def test_the_false_discovery_rate_follows_benjamini_and_hochberg():
    """The example of their paper, table 1: four hypotheses are rejected at 5 %."""
    p_values = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    p_values += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    assert ratios.benjamini_hochberg(p_values, 0.05) == [True] * 4 + [False] * 11
    assert ratios.benjamini_hochberg(p_values[::-1], 0.05) == [False] * 11 + [True] * 4
    assert ratios.benjamini_hochberg([], 0.05) == []


def test_the_geometric_mean_holds_for_other_models():
    """Five models of four points each: the truth is within the interval about as often as stated."""
    held = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        models = {
            str(name): (0.05 * rng.standard_normal() + 0.01 * rng.standard_normal(4)).tolist()
            for name in range(5)
        }
        mean = ratios.geometric_mean(models)
        held += mean.low <= 1 <= mean.high
    assert 0.87 <= held / 200 <= 0.99
    assert ratios.geometric_mean({"one": [0.0, 0.1]}).low is None


# Pairs


def sides(*records):
    return [
        Side.of(name, name, map(Analysis.of, [one] if not isinstance(one, list) else one))
        for name, one in zip("ABC", records, strict=False)
    ]


def compare(*records, **settings):
    return judging.compare(sides(*records), Settings(**settings))


def named(name, model="resnet18", *, points=((1.0, 1.001, 0.999),), batch_size=1):
    made = record(name, points, np.random.default_rng(list(map(ord, name + model))))
    made.plan["model"] = {"name": model}
    for point in made.points:
        point.key = type(point.key)(
            phase="inference",
            input_size=point.key.input_size,
            batch_size=batch_size,
            precision="fp32",
            replicate=point.key.replicate,
        )
    return made


def test_setting_that_differs_between_all_runs_is_the_subject():
    found = compare(
        [named("default"), named("default", "vgg16")], [named("fft", "vgg16"), named("fft")]
    )
    assert {(pair.model, pair.point) for pair in found.pairs} == {
        ("resnet18", "resnet18"),
        ("vgg16", "vgg16"),
    }
    assert [(one.key, one.baseline, one.other) for one in found.sides[1].differences] == [
        ("algorithm", "default", "fft")
    ]
    assert "inference · 32 · batch 1" in found.constant


def test_what_both_sides_share_identifies_points():
    found = compare(
        [named("default"), named("fft")], [named("fft", "vgg16"), named("default", "vgg16")]
    )
    assert sorted(pair.point for pair in found.pairs) == ["default", "fft"]


def test_points_of_one_side_are_listed():
    two = named("two", points=[[1.0] * 3, [1.0] * 3])
    two.points[0].status = Status.OOM
    found = compare(named("one", points=[[1.0] * 3] * 3), two)
    alone = [(one.side, one.point.split(" · ")[-2], one.against, one.status) for one in found.alone]
    assert alone == [("A", "32", "B", Status.OOM), ("A", "34", "B", None)]
    assert len(found.pairs) == 1


def test_the_largest_regressions_come_first():
    flat = [[1.0, 1.001, 0.999]] * 4
    found = compare(
        named("one", points=flat),
        named("two", points=[[f * c for c in flat[0]] for f in (1, 0.8, 1.3, 1.1)]),
    )
    assert [round(pair.ratio, 1) for pair in found.pairs] == [1.3, 1.1, 1.0, 0.8]
    assert [pair.word for pair in found.pairs] == ["SLOWER", "SLOWER", "SAME", "FASTER"]


def test_points_that_differ_in_batch_size_come_in_its_order():
    sides = [named(name, points=[[1.0, 1.001, 0.999]] * 4) for name in ("one", "two")]
    for side in sides:
        sizes = list(dict.fromkeys(point.key.input_size for point in side.points))
        batches = dict(zip(sizes, (64, 8, 128, 1), strict=True))
        for point in side.points:
            point.key = replace_key(
                point.key, input_size=(32, 32), batch_size=batches[point.key.input_size]
            )
    assert [pair.key.batch_size for pair in compare(*sides).pairs] == [1, 8, 64, 128]


def test_settings_that_are_on_or_off_are_spelled_as_they_are_set():
    one, two = twice()
    for side, value in ((one, True), (two, False)):
        side.plan["execution"] = {**side.plan.get("execution", {}), "channels_last": value}
    texts = [f"{one.baseline} {one.other}" for one in compare(one, two).sides[1].differences]
    assert any("channels_last true" in text and "channels_last false" in text for text in texts), (
        texts
    )


def test_each_further_side_is_compared_with_the_first():
    found = compare(named("one"), named("two"), named("three"))
    assert [pair.side for pair in found.pairs] == ["B", "C"]


@pytest.mark.parametrize(("ratio", "word"), [(1.08, "UNDECIDED"), (1.2, "SLOWER")])
def test_single_process_verdict_allows_for_an_outlier(ratio, word):
    one, two = named("one", points=[[1.0]]), named("two", points=[[ratio]])
    for made in (one, two):
        made.priors = dict.fromkeys(("device", "host-bound"), Prior(variance=1e-4, degrees=100.0))
    found = compare(one, two)
    [pair] = [pair for pair in found.pairs if pair.processes == (1, 1)]
    assert pair.word == word
    assert (pair.further_processes is not None) is (word == "UNDECIDED")
    half_width = stats.t.ppf(0.995, 3) * math.sqrt(2e-4)
    assert pair.high == pytest.approx(ratio * math.exp(half_width), rel=1e-3)
    assert any(
        "a 99 % interval" in note for note in comparison_table.grid(found, found.sides[1]).notes
    )


def twice():
    """Two runs of one plan."""
    one, two = named("one"), named("two")
    two.plan["algorithm"] = one.plan["algorithm"]
    return one, two


@pytest.mark.parametrize(
    ("accuracies", "is_subject"), [((0.9, 0.9), True), ((0.9, None), False), ((None, None), False)]
)
def test_a_seed_is_of_accuracies_and_not_of_times(accuracies, is_subject):
    one, two = twice()
    for made, seed, accuracy in ((one, 0, accuracies[0]), (two, 1, accuracies[1])):
        made.plan["seed"] = seed
        if accuracy:
            with_metric(made, "accuracy", [accuracy])
    [found] = compare(one, two).sides[1].differences
    assert (found.text, found.role.value) == ("seed 0 → 1", "subject" if is_subject else "neutral")


@pytest.mark.parametrize(
    ("key", "values", "text"),
    [
        ("processes", (1, 3), "processes 1 → 3"),
        ("percentiles", ([50], [99]), "percentiles [50] → [99]"),
        ("probes", ({"energy": False}, {"energy": True}), "probes energy false → energy true"),
        (
            "execution",
            ({"compile": None}, {"compile": "default"}),
            "execution compile null → compile default",
        ),
        ("gpu", ({"count": 1}, {"count": 2}), "gpus 1 → 2"),
    ],
)
def test_a_difference_has_the_name_of_what_differs(key, values, text):
    one, two = twice()
    one.plan[key], two.plan[key] = values
    assert [found.text for found in compare(one, two).sides[1].differences] == [text]


def trained(seconds, starts, name="one"):
    """Epochs of these seconds, each with an evaluation of one, and cold starts of these seconds."""
    made = record(name, [(1.0, 1.001, 0.999)], np.random.default_rng(1))
    made.points[0].facts["bound_by"] = "gpu"
    made.points[0].epochs = [
        Epoch(number=number, seconds=one, samples_per_second=1 / one, evaluation_seconds=1.0)
        for number, one in enumerate(seconds, 1)
    ]
    for replicate, start in enumerate(starts):
        key = replace_key(made.points[0].key, phase="ttfp", replicate=replicate)
        parts = [
            Series(name="ttfp/imports", samples=[start]),
            Series(name="ttfp/second_call", samples=[9.0]),
        ]
        made.points.append(Point(key=key, status=Status.OK, series=parts))
    return made


def test_epochs_runtimes_and_cold_starts_are_compared():
    before = trained((10.0, 10.01, 9.99), (4.0, 4.01, 3.99))
    after = trained((20.0, 20.01, 19.99), (2.0, 2.01, 1.99), "two")
    found = {
        pair.measure: (round(pair.ratio, 2), pair.word) for pair in compare(before, after).pairs
    }
    assert found["epoch"] == (2.0, "SLOWER")
    assert found["runtime"] == (round(63 / 33, 2), "SLOWER")
    assert found["ttfp"] == (0.5, "FASTER")


def test_one_cold_start_has_a_ratio_and_no_verdict():
    found = compare(trained((), (4.0,)), trained((), (2.0,), "two")).pairs
    [pair] = [pair for pair in found if pair.measure == "ttfp"]
    assert (pair.ratio, pair.word) == (pytest.approx(0.5), "UNDECIDED")


def test_a_higher_rate_is_faster():
    """A loop of half the time has twice the samples/s."""
    one, two = named("one"), named("two", points=[[0.5, 0.501, 0.499]])
    for point in (*one.points, *two.points):
        point.series.append(Series(name="throughput", samples=point.series[0].samples))
        point.series.append(Series(name="latency", samples=point.series[0].samples))
    found = {pair.measure: pair for pair in compare(one, two).pairs}
    assert found.keys() == {"device", "latency", "p95", "throughput"}
    assert {pair.word for pair in found.values()} == {"FASTER"}
    assert found["throughput"].ratio == pytest.approx(2, rel=0.01)
    assert found["p95"].ratio == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("times", "calls", "is_marked", "note"),
    [
        ((1.0,), 20, True, "≈ estimated, or without an interval: too few effective samples"),
        (
            (1.0, 1.001, 0.999),
            300,
            False,
            "p95 is the mean of the processes' own; perfexp show DIR has that of all",
        ),
    ],
)
def test_percentile_is_marked_estimated_or_explained_by_a_note(times, calls, is_marked, note):
    rng = np.random.default_rng(0)
    one, two = (named(name, points=(times,)) for name in ("one", "two"))
    for point in (*one.points, *two.points):
        point.series.append(Series(name="latency", samples=rng.normal(1, 0.01, calls).tolist()))
    found = compare(one, two, measures=["p95"])
    grid = comparison_table.grid(found, found.sides[1])
    assert [cell.startswith("≈ ") for column in grid.columns[1:3] for cell in column.cells] == [
        is_marked
    ] * 2
    assert any(line.startswith(note) for line in grid.notes)
    [line] = comparison_table.csv_lines(found)
    assert (line["estimated"], line["other_estimated"]) == (is_marked, is_marked)


def with_metric(made, name, values, unit="1", width=None):
    """Give each process of a record a figure, with an interval of this relative half-width."""
    for point, value in zip(made.points, values, strict=False):
        ends = {"low": value * (1 - width), "high": value * (1 + width)} if width else {}
        point.metrics.append(Metric(name=name, value=value, unit=unit, **ends))
    return made


@pytest.mark.parametrize(
    ("time", "cycles", "clock", "device"),
    [
        (0.9, 1.0, "faster only because the clock was higher", "one"),
        (1.1, 1.0, "slower only because the clock was lower", "one"),
        (1.0, 1.1, "more cycles in the same time: the clock was higher", "one"),
        (0.9, 0.9, "", "one"),
        (0.9, 1.0, None, "another"),
    ],
)
def test_time_and_cycles_that_disagree_name_the_clock(time, cycles, clock, device):
    flat = (1.0, 1.0005, 0.9995)
    one, two = (
        named("one", points=[flat]),
        named("two", points=[[time * factor for factor in flat]]),
    )
    two.environment = {"device": {"name": device, "kind": "cuda"}}
    one.environment = {"device": {"name": "one", "kind": "cuda"}}
    for made, scale in ((one, 1.0), (two, cycles)):
        with_metric(made, "device/cycles_per_call", [1e7 * scale * factor for factor in flat])
    pairs = {pair.measure: pair for pair in compare(one, two).pairs}
    assert pairs["device"].clock == clock
    assert pairs["cycles"].clock is None


def test_cycles_without_a_verdict_do_not_judge_the_clock():
    made = [with_metric(named(name), "device/cycles_per_call", [1e7]) for name in ("one", "two")]
    assert [pair.clock for pair in compare(*made).pairs] == [None, None]


def test_a_count_that_all_processes_repeat_has_a_verdict():
    one, two = (
        with_metric(named(name), "memory/peak_bytes", [size] * 3)
        for name, size in (("a", 1e9), ("b", 2e9))
    )
    found = {pair.measure: pair for pair in compare(one, two).pairs}
    assert found["memory"].word == "MORE"
    assert (found["memory"].low, found["memory"].high) == (
        pytest.approx(2, rel=1e-3),
        pytest.approx(2, rel=1e-3),
    )


@pytest.mark.parametrize(
    ("widths", "within"),
    [((0.1, 0.01), (math.atanh(0.1) ** 2 + math.atanh(0.01) ** 2) / 2), ((None, 0.01), None)],
)
def test_energy_interval_is_relative_to_its_process_energy(widths, within):
    made = named("one", points=[(1.0, 1.001)])
    for point, value, width in zip(made.points, (1.0, 4.0), widths, strict=True):
        ends = {"low": value * (1 - width), "high": value * (1 + width)} if width else {}
        point.metrics.append(
            Metric(name="energy/per_image_joules", value=value, unit="joules", **ends)
        )
    [found] = measures.repeats(Analysis.of(made)).values()
    assert found["energy"].values == (1.0, 4.0)
    assert found["energy"].within == (within and pytest.approx(within / 1.96**2))


@pytest.mark.parametrize(
    ("width", "ratio", "word"),
    [(0.01, 1.01, "UNDECIDED"), (0.01, 2.0, "MORE"), (0.3, 1.5, "UNDECIDED")],
)
def test_energy_of_one_process_is_decided_if_windows_allow(width, ratio, word):
    sides = [
        with_metric(
            named(str(value), points=[(1.0,)]), "energy/per_image_joules", [value], "joules", width
        )
        for value in (1.0, ratio)
    ]
    [pair] = compare(*sides, measures=["energy"]).pairs
    assert pair.word == word
    assert pair.high / pair.ratio - 1 > math.sqrt(2) * width


def test_energy_note_names_the_metric_and_its_loop():
    sides = [
        with_metric(named(name), "energy/per_image_joules", [joules], "joules", 0.01)
        for name, joules in (("a", 1.0), ("b", 1.1))
    ]
    found = compare(*sides)
    notes = comparison_table.grid(found, found.sides[1]).notes
    assert any(
        "energy is energy/per_image of perfexp show: of a loop of calls back to back" in note
        for note in notes
    )
    times = compare(*sides, measures=["latency"])
    assert not any(
        "per_image" in note for note in comparison_table.grid(times, times.sides[1]).notes
    )


@pytest.mark.slow
def test_the_interval_of_energy_holds_the_truth_of_other_runs():
    """Eight processes that differ by 0.5 %, of which one measures energy in windows that differ by 1 %."""
    held, pairs = 0, 300
    for seed in range(pairs):
        rng, sides = np.random.default_rng(seed), []
        for name in ("one", "two"):
            factors = np.exp(0.005 * rng.standard_normal(8))
            joules = float(factors[0] * np.exp(0.01 * rng.standard_normal()))
            made = record(name, [factors.tolist()], rng)
            sides.append(with_metric(made, "energy/per_image_joules", [joules], "joules", 0.0196))
        [pair] = [pair for pair in judged(*sides) if pair.measure == "energy"]
        held += pair.low <= 1 <= pair.high
    assert held / pairs >= 0.93


def answer(*factors, **settings):
    """The sentence on runs whose times have these factors, the first of which is the baseline's."""
    flat = (1.0, 1.001, 0.999)
    runs = [
        named(f"run{number}", points=[[factor * one for one in flat] for factor in of_run])
        for number, of_run in enumerate(factors)
    ]
    return comparison_table.conclusion(compare(*runs, **settings))


@pytest.mark.parametrize(
    ("factors", "sentence"),
    [
        ([[1.0], [1.6]], r"B is 1\.60× slower than A \(± [\d.]+ %, GPU time\)"),
        ([[1.6], [1.0]], r"B is 1\.60× faster than A \(± [\d.]+ %, GPU time\)"),
        ([[1.0], [1.0]], r"B and A are the same within ±1 % \(± [\d.]+ %, GPU time\)"),
        (
            [[1.0], [1.01]],
            r"undecided whether B is better or worse than A: a wider --margin may decide \(± .*\)",
        ),
        (
            [[1.0, 1.0, 1.0], [0.5, 0.5, 1.0]],
            r"B against A: faster at 2, same at 1 of 3 points \(GPU time; geometric mean 0\.630×\)",
        ),
        (
            [[1.0, 1.0], [1.01, 2.0]],
            r"B against A: (undecided|slower) at 1, (undecided|slower) at 1 of 2 points "
            r"\(GPU time; geometric mean 1\.42×\); a wider --margin may decide",
        ),
        ([[1.0], [0.9], [0.5]], r"largest gain of 2 sides: C is 2\.00× faster than A \(.*\)"),
        ([[1.0], [1.0], [2.0]], "none of 2 sides is shown to be better than A at all points"),
    ],
)
def test_a_comparison_is_answered_in_one_sentence(factors, sentence):
    assert re.fullmatch(sentence, answer(*factors))


def test_conclusion_names_other_measures_or_the_chosen_one():
    sides = [
        with_metric(
            named(name, points=[[time * one for one in (1.0, 1.001, 0.999)]]),
            "memory/peak_bytes",
            [size] * 3,
        )
        for name, time, size in (("a", 1.0, 2**30), ("b", 1.6, 2**29))
    ]
    assert comparison_table.conclusion(compare(*sides)).endswith("GPU time); memory 0.500×")
    of_memory = comparison_table.conclusion(compare(*sides, measures=["memory"]))
    assert of_memory == "memory of B is less: 512 MiB against 1024 MiB"


def test_an_accuracy_of_0_is_answered_without_a_ratio():
    sides = [
        with_metric(named(name), "accuracy", [share])
        for name, share in (("a", 0.0), ("b", 0.5), ("c", 0.6))
    ]
    of_one = comparison_table.conclusion(compare(*sides[:2], measures=["accuracy"]))
    assert of_one == "accuracy of B is higher: 0.5000 against 0"
    of_several = comparison_table.conclusion(compare(*sides, measures=["accuracy"]))
    assert of_several == "none of 2 sides is shown to be better than A at all points"


@pytest.mark.parametrize(
    ("level", "remedy"),
    [
        (None, "measure both again with processes="),
        (0.007, "repeat perfexp ab with output_dir=DIR"),
    ],
)
def test_an_undecided_answer_names_what_would_decide(level, remedy):
    rng, times = np.random.default_rng(0), [0.93, 1.0, 1.07]
    one, two = record("one", [times], rng), record("two", [[1.09 * time for time in times]], rng)
    for job, made in enumerate((one, two)):
        made.sweep = SweepMembership(uid="ab", job=job, level=level) if level else None
    assert f"better or worse than A: {remedy}" in comparison_table.conclusion(compare(one, two))


def test_conclusion_on_incomparable_runs_names_the_confounder():
    one, two = named("one"), named("two")
    one.environment, two.environment = (
        {"device": {"power_limit_watts": watts}} for watts in (700.0, 500.0)
    )
    sentence = comparison_table.conclusion(compare(one, two))
    assert sentence.startswith("B cannot be compared with A: power_limit: 700 → 500; ")


def test_what_can_not_be_paired_is_refused():
    with pytest.raises(UserError, match="batch 8"):
        compare(named("one"), named("two", batch_size=8))
    with pytest.raises(UserError, match=r"several results .*; name one run.s folder"):
        compare([named("one"), named("two")], named("three"))
    with pytest.raises(UserError, match="the same run"):
        compare(one := named("one"), [one, named("two", "vgg16")])
    empty = named("empty")
    empty.points.clear()
    with pytest.raises(UserError, match="no timed point"):
        compare(named("one"), empty)


def test_a_scenario_without_noise_has_the_ratio_that_it_states():
    quiet = Scenario(ratio=0.9, processes=0.0)
    assert verdicts.pair(quiet, 0).ratio == pytest.approx(0.9, rel=0.002)


def test_margin_is_documented_as_relative_or_absolute():
    assert "relative, but absolute for exact measures" in " ".join(judging.Settings.__doc__.split())
