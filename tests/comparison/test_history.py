"""`perfexp check --history`: steps and drifts over many runs, with commits, sizes and exit codes."""

import json

import numpy as np
import pytest

from perfexp import commands
from perfexp.comparison import history
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.records.analysis import Analysis
from perfexp.records.record import Metric
from tests.support.verdicts import record

RUNS, NOISE = 40, 0.01


def run_of(number, factor=1.0, *, commit=None, model="resnet18", metrics=()):
    """A record with one process, as one nightly run leaves it."""
    made = record("default", [[factor]], np.random.default_rng([17, number]))
    made.uid, made.started = f"run {number}", f"2026-01-01T{number // 60:02}:{number % 60:02}:00"
    made.plan["model"] = {"name": model}
    made.environment["git"] = {"commit": commit or f"c{number:07}", "dirty": False}
    made.environment["device"]["power_limit_watts"] = 700.0
    for name, value in metrics:
        unit = name.rpartition("_")[2]
        made.points[0].metrics.append(Metric(name=name, value=value, unit=unit))
    return made


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Check the last of some records against the first, with all of them as its history."""
    monkeypatch.chdir(tmp_path)

    def check(records, *options, against=0):
        for number, one in enumerate(records):
            (folder := tmp_path / "runs" / str(number)).mkdir(parents=True, exist_ok=True)
            (folder / "record.json").write_bytes(one.to_json())
        sides = f"runs/{len(records) - 1}", "--against", f"runs/{against}"
        code = commands.run(["check", *sides, "--history", "runs", *options])
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err.splitlines()

    return check


def noisy(levels, seed=0):
    noise = NOISE * np.random.default_rng(seed).standard_normal(len(levels))
    return [run_of(number, factor) for number, factor in enumerate(levels * np.exp(noise))]


def stepped(step=1.03, at=25, runs=RUNS):
    return np.where(np.arange(runs) < at, 1.0, step)


def test_a_step_that_no_pair_shows_fails_with_its_commits(checked):
    code, lines, errors = checked(noisy(stepped()))
    assert code == 1
    [line] = lines
    assert line.startswith("CHANGED device of 32 · batch 1 between c0000024 and c0000025: +3.0 % (")
    assert "; SLOWER since the baseline: +3.0 % (+2.5 … " in line
    assert errors[0].startswith("failed: 1 undecided")


def test_a_slow_drift_fails_with_its_total(checked):
    code, lines, _ = checked(noisy(1.001 ** np.arange(60)), "--json")
    changes = json.loads("\n".join(lines))["changes"]
    assert code == 1
    assert all(one["percent"][0] > 0 for one in changes)
    total, low, high = changes[0]["total"]
    assert 2 < low < total < high < 6.1
    assert len(changes) > 1


def test_a_change_before_the_baseline_is_printed_and_passes(checked):
    code, lines, _ = checked(noisy(stepped()), "--allow-undecided", against=30)
    assert code == 0
    assert [line.split(" ")[0] for line in lines] == ["CHANGED"]
    assert "since the baseline" not in lines[0]


def test_an_improvement_is_printed_and_passes(checked):
    code, lines, _ = checked(noisy(stepped(0.97)), "--allow-undecided")
    assert code == 0
    assert lines[0].startswith("CHANGED device of 32 · batch 1 between c0000024 and c0000025: -3.")


def test_a_regression_that_was_undone_passes(checked):
    levels = np.concatenate([stepped(at=15, runs=30), np.ones(15)])
    code, lines, _ = checked(noisy(levels), "--allow-undecided")
    assert code == 0
    sizes = [line.split(": ")[1].split()[0] for line in lines]
    assert [size[0] for size in sizes] == ["+", "-"]
    assert "since the baseline" not in " ".join(lines)


def test_a_steady_history_prints_nothing(checked):
    assert checked(noisy(np.ones(RUNS)), "--allow-undecided")[:2] == (0, [])


def test_a_change_within_the_margin_is_printed_and_passes(checked):
    code, lines, _ = checked(noisy(stepped()), "--allow-undecided", "--margin", "5%")
    assert (code, len(lines)) == (0, 1)


def test_a_long_history_is_cut_to_its_latest_runs(checked, monkeypatch):
    monkeypatch.setattr(history, "_MOST_RUNS", 25)
    code, lines, _ = checked(noisy(np.concatenate([np.full(10, 0.9), stepped(at=20, runs=30)])))
    change, pair = lines
    assert (code, pair.split()[1]) == (1, "SLOWER")
    assert "between c0000029 and c0000030: " in change


def test_a_run_below_a_baseline_that_is_cut_off_passes(checked, monkeypatch):
    monkeypatch.setattr(history, "_MOST_RUNS", 25)
    levels = np.concatenate([np.full(10, 1.2), np.full(20, 0.95), np.ones(10)])
    code, lines, _ = checked(noisy(levels), "--allow-undecided")
    assert code == 0
    assert "since the baseline" not in " ".join(lines)


def test_memory_changes_at_an_exact_step(checked):
    sizes = [1.23e9] * 20 + [1.29e9] * 4
    records = [
        run_of(number, metrics=[("memory/peak_bytes", size)]) for number, size in enumerate(sizes)
    ]
    code, lines, _ = checked(records, "--metric", "memory")
    assert code == 1
    assert "CHANGED memory of 32 · batch 1 between c0000019 and c0000020: +4.9 % (" in lines[-1]
    assert "; MORE since the baseline: +4.9 %" in lines[-1]


def test_runs_of_a_commit_stay_together(checked):
    """A commit of before the step, measured again after it, is not a return to the old level."""
    records = noisy(stepped(runs=40))
    again = run_of(41, 1.001, commit="c0000003")
    code, lines, _ = checked([*records[:-1], again, records[-1]])
    assert code == 1
    assert [line.split(": ")[0].split()[-3:] for line in lines] == [["c0000024", "and", "c0000025"]]


def test_runs_of_other_models_and_conditions_are_left_out(checked):
    others = [run_of(100 + number, 2.0, model="vgg16") for number in range(20)]
    limited = [run_of(200 + number, 1.5) for number in range(20)]
    for one in limited:
        one.environment["device"]["power_limit_watts"] = 500.0
    own = noisy(np.ones(6))
    code, lines, _ = checked([own[0], *others, *limited, *own[1:]], "--allow-undecided")
    assert (code, lines) == (
        2,
        [
            "--history: at most 6 comparable runs, 10 are needed; "
            "others differ in power_limit (--allow)"
        ],
    )
    code, lines, _ = checked([own[0], *limited, *own[1:]], "--allow=power_limit")
    assert (code, len(lines)) == (0, 1)


@pytest.mark.parametrize("runs", [2, history.LEAST_RUNS - 1])
def test_a_short_history_has_no_answer(runs, checked):
    code, lines, _ = checked(noisy(np.ones(runs)), "--allow-undecided")
    assert (code, lines) == (2, [f"--history: at most {runs} comparable runs, 10 are needed"])


def test_a_short_history_is_told_beside_a_regression(checked):
    runs, short = noisy(stepped(1.2, at=5, runs=8)), "at most 8 comparable runs, 10 are needed"
    code, lines, _ = checked(runs)
    assert (code, lines[0].split()[1], lines[1]) == (1, "SLOWER", f"--history: {short}")
    assert json.loads("\n".join(checked(runs, "--json")[1]))["undecided"] == [lines[1]]


def test_a_measure_that_no_run_has_gives_no_answer(checked):
    code, lines, _ = checked(noisy(np.ones(12)), "--metric", "energy")
    assert code == 2
    assert lines[-1] == "--history: at most 0 comparable runs, 10 are needed"


def test_a_missing_and_an_empty_folder_are_errors(checked, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        code, lines, errors = checked(noisy(np.ones(2)), "--history", folder)
        assert (code, lines, len(errors)) == (2, [], 1)
        assert f"There is no record.json and no sweep.json in or below {folder}." in errors[0]


def test_unreadable_records_are_left_out_with_a_line(checked, tmp_path):
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "record.json").write_text("{")
    code, _, errors = checked(noisy(stepped()))
    assert code == 1
    assert errors[0].startswith("left out: ") and "bad" in errors[0]


def test_a_copied_run_counts_once(checked):
    records = noisy(np.ones(8))
    assert checked([*records[:4], *records[:4], *records[4:]])[0] == 2


def test_baseline_of_another_model_is_not_a_level(checked):
    """Changes are printed, but there is no level since which the new run could be worse."""
    records = noisy(stepped())
    records[0].plan["model"] = {"name": "vgg16"}
    code, lines, _ = checked(records, "--allow-undecided")
    assert code == 0
    assert [line.split(" ")[0] for line in lines] == ["CHANGED"]
    assert "since the baseline" not in lines[0]


def side_of(*records):
    return Side.of("", "folder", [Analysis.of(one) for one in records])


def test_run_of_another_model_is_left_out_for_a_sweep():
    """It shares no model with the sweep, whose points then have the same key."""
    models = "resnet18", "vgg16"
    sides = [
        side_of(*(run_of(first + number, model=model) for number, model in enumerate(models)))
        for first in (0, 200)
    ]
    earlier = [side_of(run_of(10 + number)) for number in range(history.LEAST_RUNS)]
    foreign = side_of(run_of(100, model="alexnet"))
    assert history.history(sides, [foreign, *earlier], Settings()) == ([], [])
