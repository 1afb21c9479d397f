"""Trainings to a target accuracy: figures over seeds in reports, tables and MLflow, and compared."""

from dataclasses import replace

import numpy as np
import pytest

from perfexp.comparison import comparison_table, judging
from perfexp.comparison.document import Verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.records import summary
from perfexp.records.analysis import Analysis
from perfexp.records.record import Epoch, Metric
from perfexp.report.sections import brief, sections
from perfexp.report.tables import flat
from perfexp.report.tables.flat import charted, point_runs
from tests.support.builders import Builder

SEEDS, EPOCH_SECONDS, TARGET = 20, 0.3, 0.94


def training(replicate, evaluations, *, every=1, epoch_seconds=EPOCH_SECONDS, target=TARGET):
    """A training with an accuracy each `every` epochs, which ends at the target."""
    point = Builder().point(phase="train", n=10, replicate=replicate)
    for number in range(1, every * len(evaluations) + 1):
        accuracy = None if number % every else evaluations[number // every - 1]
        epoch = Epoch(
            number=number, seconds=epoch_seconds, samples_per_second=1.0, accuracy=accuracy
        )
        point.epochs.append(epoch)
    seconds = sum(epoch.seconds for epoch in point.epochs)
    if evaluations[-1] < target:
        seconds = None
    point.metrics += [
        Metric.of("train/target_accuracy", target),
        Metric.of("time_to_accuracy_seconds", seconds),
        Metric.of("accuracy", evaluations[-1]),
    ]
    return point


def trained(*points, uid="one", target=TARGET):
    plan = {"mode": {"name": "train", "train": {"target_accuracy": target}}}
    return Builder().record(*points, uid=uid, plan=plan)


def speedrun(accuracies, **settings):
    """A record of seeds that are evaluated once, after ten epochs."""
    points = [training(seed, [one], every=10) for seed, one in enumerate(accuracies)]
    return trained(*points, **settings)


def lines(record):
    [text] = [part.content for part in brief(Analysis.of(record)) if part.title == ""]
    return text[:2]


def test_time_share_accuracy_and_p_value_are_two_lines():
    accuracies = [0.9391, 0.9402, 0.9388, 0.9410, 0.9405, 0.9413, 0.9399, 0.9407]
    record = speedrun(accuracies)
    assert lines(record) == [
        "time to 94 % accuracy: 3.00 s, reached by 62.5 % (24.5 … 91.5 %) of seeds",
        "accuracy: 94.02 % (93.94 … 94.09 %), p = 0.28 for a mean above 94 %",
    ]
    titles = [part.title for part in sections(Analysis.of(record))]
    assert "time to accuracy" in titles


def test_accuracies_of_trainings_that_stop_early_have_no_p_value():
    record = trained(training(0, [0.9, 0.95]), training(1, [0.93, 0.935, 0.941]))
    [_, text] = lines(record)
    assert "no p-value: an early stop selects accuracies" in text
    row = Analysis.of(record).rows[0]
    assert row.value("time_to_accuracy_seconds") == pytest.approx(2.5 * EPOCH_SECONDS)
    assert row.value("train/reached_share") == 1.0


def test_a_single_seed_has_neither_interval_nor_p_value():
    [_, text] = lines(speedrun([0.95]))
    assert text == "accuracy: 95 % (no interval), no p-value: this is a single seed"


def test_seeds_without_an_accuracy_are_not_counted_as_alike():
    points = [training(seed, [0.95]) for seed in range(3)]
    for point in points[1:]:
        point.metrics = [one for one in point.metrics if one.name != "accuracy"]
    [_, text] = lines(trained(*points))
    assert text.endswith("no p-value: this is a single seed")


def test_half_of_the_seeds_without_the_target_leave_no_median():
    row = Analysis.of(speedrun([0.95, 0.93, 0.92, 0.951])).rows[0]
    metric = row.metric("time_to_accuracy_seconds")
    assert (metric.value, metric.reason) == (None, "reached by 2 of 4 seeds")
    assert "time_to_accuracy" not in row.figures
    assert row.figures["accuracy"].values == (0.95, 0.93, 0.92, 0.951)


def test_figures_over_seeds_are_columns_and_charts():
    analysis = Analysis.of(speedrun(list(np.linspace(0.939, 0.945, SEEDS))))
    [line] = flat.overall(analysis)
    assert line["train_reached_share"] == 0.8
    assert line["train_reached_share_low"] < 0.6 < line["train_reached_share_high"]
    assert line["accuracy_low"] < line["accuracy"] < line["accuracy_high"]
    assert line["train_target_p"] < 0.01
    names = {f"{one.group}/{one.name}" for run in point_runs(analysis) for one in charted(run)}
    assert {"train/accuracy", "train/accuracy_low", "train/target_p"} <= names
    assert any(name.startswith("train/time_to_accuracy") for name in names)


def test_training_without_a_target_is_unchanged():
    record = trained(Builder().training())
    assert not [part for part in sections(Analysis.of(record)) if part.title == "time to accuracy"]


def side(record):
    return Side.of(record.uid, record.uid, [Analysis.of(record)])


def compare(*sides, **settings):
    return judging.compare(sides, Settings(**settings))


def verdicts(*sides, **settings):
    return {pair.measure: pair.verdict for pair in compare(*sides, **settings).pairs}


def draw(rng, *, epochs=(6, 7, 8), mean=0.9401):
    """Seeds that reach the target after some epochs, in processes that differ by 0.5 %."""
    points = []
    for seed in range(SEEDS):
        evaluations = [0.9] * (int(rng.choice(epochs)) - 1)
        seconds = EPOCH_SECONDS * float(np.exp(0.005 * rng.standard_normal()))
        last = float(rng.normal(mean, 0.0014))
        points.append(training(seed, [*evaluations, last], epoch_seconds=seconds, target=0.93))
    return points


def drawn(rng, uid="one", **recipe):
    return side(trained(*draw(rng, **recipe), uid=uid, target=0.93))


MEASURES = ("time_to_accuracy", "accuracy")


@pytest.mark.parametrize(("margin", "most"), [(0.01, 0.05), (1e-6, 0.065)])
def test_identical_recipes_have_no_winner_in_95_percent(margin, most):
    """The second margin is none at all: each verdict is false with the level of 5 %."""
    rng, decided, pairs = np.random.default_rng(7), dict.fromkeys(MEASURES, 0), 200
    sides = [drawn(rng), drawn(rng, "two")]
    for _ in range(pairs):
        pair = []
        for one in sides:
            figures = summary.single_figures(draw(rng), lambda _: None)
            [measurement] = one.measurements
            pair.append(replace(one, measurements=(replace(measurement, figures=figures),)))
        for measure, verdict in verdicts(*pair, margin=margin, measures=MEASURES).items():
            decided[measure] += verdict in (Verdict.BETTER, Verdict.WORSE)
    assert max(decided.values()) <= most * pairs


def test_a_recipe_of_fewer_epochs_or_a_higher_mean_wins():
    rng = np.random.default_rng(3)
    sides = drawn(rng), drawn(rng, "two", epochs=(5, 6), mean=0.943)
    found = verdicts(*sides, margin=0.001, measures=MEASURES)
    assert set(found.values()) == {Verdict.BETTER}


def test_margin_of_accuracies_over_seeds_is_in_points():
    rng = np.random.default_rng(4)
    sides = []
    for mean in (0.2, 0.195):
        accuracies = rng.normal(mean, 0.001, SEEDS).tolist()
        sides.append(side(speedrun(accuracies, uid=str(mean))))
    found = verdicts(*sides, margin=0.01, measures=["accuracy"])
    assert found == {"accuracy": Verdict.SAME}
    found = verdicts(*sides, margin=0.001, measures=["accuracy"])
    assert found == {"accuracy": Verdict.WORSE}


def test_single_seeds_have_no_verdict():
    sides = side(speedrun([0.95], uid="one")), side(speedrun([0.5], uid="two"))
    assert verdicts(*sides, measures=["accuracy"]) == {"accuracy": Verdict.UNDECIDED}


def test_a_seed_that_fails_leaves_no_time_to_compare():
    rng = np.random.default_rng(5)
    points = draw(rng)
    points[3] = training(3, [0.5, 0.6], target=0.93)
    found = compare(drawn(rng), side(trained(*points, uid="two", target=0.93)), measures=MEASURES)
    assert [pair.measure for pair in found.pairs] == ["accuracy"]
    assert [(alone.side, alone.measure) for alone in found.alone] == [("one", "time_to_accuracy")]
    [line] = comparison_table.alone(found, found.sides[1])
    assert line.endswith(
        "time_to_accuracy of 1 point; on the other side not every seed reached the target"
    )


def test_times_to_different_targets_are_not_compared():
    rng = np.random.default_rng(6)
    other = side(trained(*draw(rng), uid="two", target=0.8))
    found = verdicts(drawn(rng), other, measures=MEASURES)
    assert found["time_to_accuracy"] is Verdict.NOT_COMPARABLE
    assert found["accuracy"] is not Verdict.NOT_COMPARABLE
