"""`perfexp check` and `perfexp baseline`: exit codes, lines, GitHub's files, and named baselines."""

import errno
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from perfexp import commands
from perfexp.records.diagnostics import make
from perfexp.records.record import Metric, Record, Status
from perfexp.records.sweep_record import Sweep, SweepChild
from tests.support.verdicts import record

FLAT = [1.0, 1.001, 0.999]
FAKE = (
    "model=fake",
    "gpu=fake",
    "processes=3",
    "input_size=64",
    "tracking=none",
    "probes.work=false",
)


def made(points=(FLAT,), *, seed=0, host="node1", scale=1.0, model="resnet18", board="NVIDIA H200"):
    factors = [[scale * factor for factor in point] for point in points]
    found = record(f"run {seed}", factors, np.random.default_rng(seed))
    found.plan["algorithm"], found.plan["model"] = {"name": "default"}, {"name": model}
    found.environment = {
        "host": host,
        "device": {"name": board, "kind": "cuda", "power_limit_watts": 700.0},
    }
    return found


@pytest.fixture
def checked(tmp_path, capsys, monkeypatch):
    """Check a record against another one; returns the exit code, stdout and stderr."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("PERFEXP_BASELINES", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)

    def run(baseline, new, *options):
        for name, one in (("baseline", baseline), ("new", new)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "record.json").write_bytes(one.to_json())
        return checked_by(capsys, "check", "new", "--against", "./baseline", *options)

    return run


def checked_by(capsys, *arguments):
    capsys.readouterr()
    code = commands.run([*map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err.splitlines()


def with_metric(one, name, value, **ends):
    for point in one.points:
        unit = "bytes" if name.endswith("_bytes") else "1"
        point.metrics.append(Metric(name=name, value=value, unit=unit, **ends))
    return one


# Exit codes


def test_an_equal_run_passes(checked):
    code, lines, errors = checked(made(), made(seed=1))
    assert (code, lines) == (0, [])
    assert errors == ["passed: 1 same, margin ±1 %, against ./baseline"]


def test_each_regression_is_a_line_and_the_exit_code_is_1(checked):
    code, lines, errors = checked(
        made([FLAT] * 3), made([FLAT, [1.1 * one for one in FLAT], FLAT], seed=1)
    )
    assert code == 1
    [line] = lines
    assert line.startswith("▼ SLOWER device of 33: 5.499 ms, was 5.001 ms, ratio 1.100 ± ")
    assert errors == ["failed: 1 worse, 2 same, margin ±1 %, against ./baseline"]


def test_a_regression_within_the_margin_passes(checked):
    slower = made(seed=1, scale=1.02)
    assert checked(made(), slower)[0] == 1
    assert checked(made(), slower, "--margin", "5%")[0] == 0


def test_an_improvement_passes(checked):
    assert checked(made(), made(seed=1, scale=0.9))[:2] == (0, [])


def test_a_point_that_was_not_measured_is_missing(checked):
    other = made([FLAT] * 2, seed=1)
    for point in other.points:
        if point.key.input_size == (33, 33):
            point.status, point.series = Status.OOM, []
    code, lines, _ = checked(made([FLAT] * 3), other)
    assert code == 1
    assert len(lines) == 2
    assert lines[0].startswith("MISSING ")
    assert lines[0].endswith("(B: oom)")
    assert checked(made([FLAT] * 3), other, "--fail-on", "slower")[0] == 0


def test_a_figure_that_only_the_baseline_has_is_missing(checked):
    code, lines, _ = checked(with_metric(made(), "memory/peak_bytes", 1e9), made(seed=1))
    assert (code, lines) == (1, ["MISSING 32 · batch 1, memory"])
    assert checked(made(), with_metric(made(seed=1), "memory/peak_bytes", 1e9))[0] == 0


def test_a_run_of_a_sweep_without_a_record_is_missing(checked, tmp_path, capsys):
    checked(made(), made(seed=1))
    children = [
        SweepChild(job=0, name="measured", directory="run", status=Status.OK),
        SweepChild(job=1, name="vgg16", directory="none", status=Status.FAILED),
    ]
    (tmp_path / "sweep").mkdir()
    (tmp_path / "new").rename(tmp_path / "sweep" / "run")
    sweep = Sweep(uid="s", name="s", started="2026-01-01T00:00:00+00:00", children=children)
    (tmp_path / "sweep" / "sweep.json").write_bytes(sweep.to_json())
    code, lines, _ = checked_by(
        capsys, "check", tmp_path / "sweep", "--against", tmp_path / "baseline"
    )
    assert (code, lines) == (1, ["MISSING vgg16 (failed)"])


def test_more_memory_fails(checked):
    one, two = (
        with_metric(made(seed=seed), "memory/peak_bytes", size)
        for seed, size in ((0, 1e9), (1, 1.2e9))
    )
    code, lines, _ = checked(one, two, "--metric", "device,memory")
    assert code == 1
    assert "▼ MORE memory of 32" in lines[0]


def test_cycles_are_judged_only_if_they_are_named(checked):
    one, two = (
        with_metric(made(seed=seed), "device/cycles_per_call", value)
        for seed, value in ((0, 1e7), (1, 2e7))
    )
    assert checked(one, two)[0] == 0
    assert checked(one, two, "--metric", "device,cycles")[0] == 1


def test_undecided_fails_only_if_asked_for(checked):
    noisy = made([[1.0, 1.05, 0.97]], seed=1)
    assert checked(made(), noisy)[:2] == (0, [])
    code, lines, _ = checked(made(), noisy, "--fail-on", "undecided")
    assert code == 1
    assert "? UNDECIDED device" in lines[0]


def test_a_worse_figure_that_is_undecided_is_no_pass(checked):
    noisy = made([[1.0, 1.25, 1.05]], seed=1)
    code, lines, _ = checked(made(), noisy)
    assert code == 2
    [line] = lines
    assert line.startswith(
        "worse beyond the margin, but undecided: device of 1 point; measure in more processes"
    )
    assert checked(made(), noisy, "--allow-undecided")[0] == 0


def test_one_point_without_an_interval_is_no_pass(checked):
    one, two = (made([[1.0], [1.0]], seed=seed) for seed in (0, 1))
    for side in (one, two):
        for point in side.points:
            point.series[0].samples = point.series[0].samples[:3]
    code, lines, _ = checked(one, two)
    assert (code, lines[0].split(";")[0]) == (2, "without an interval: device of 2 points")


@pytest.mark.parametrize(("accuracy", "code"), [(0.001, 1), (0.74, 1), (0.755, 0), (0.9, 0)])
def test_accuracy_is_exact_with_the_margin_in_points(accuracy, code, checked):
    one, two = (
        with_metric(made(seed=seed), "accuracy", value)
        for seed, value in ((0, 0.76), (1, accuracy))
    )
    found, lines, _ = checked(one, two)
    assert found == code
    assert all(line.startswith("▼ LOWER accuracy") for line in lines)


def test_slower_fails_whatever_else_does(checked):
    for names in ("missing", "undecided"):
        assert checked(made(), made(seed=1, scale=1.1), "--fail-on", names)[0] == 1
    code, _, errors = checked(made(), made(seed=1), "--fail-on", ",")
    assert (code, "--fail-on is empty" in errors[0]) == (2, True)


def test_a_graph_time_of_anchors_only_is_not_missing(checked):
    one, two = made(), made(seed=1)
    for point in one.points:
        point.series.append(msgspec.structs.replace(point.series[0], name="device/graph"))
    assert checked(one, two)[:2] == (0, [])
    two.points[0].metrics.append(
        Metric(name="device/graph_seconds", value=None, unit="seconds", reason="no graph")
    )
    assert checked(one, two)[:2] == (1, ["MISSING 32 · batch 1, device/graph"])


def unmeasured(one):
    for point in one.points:
        point.status, point.series = Status.FAILED, []
    return one


def limited(one):
    one.environment["device"]["power_limit_watts"] = 500.0
    return one


def erroneous(one):
    one.points[1].doubts.append(make("precision_unavailable", precision="bf16", reason="too old"))
    return one


@pytest.mark.parametrize(
    ("new", "options", "reason"),
    [
        (unmeasured(made(seed=1)), (), "(failed)"),
        (limited(made(seed=1)), (), "--allow power_limit"),
        (erroneous(made(seed=1)), (), "--allow diagnostics"),
        (made(seed=1), ("--metric", "device,energy"), "not measured on both sides: energy"),
        (made(seed=1), ("--fail-on", "faster"), "slower"),
    ],
)
def test_what_has_no_answer_is_never_green(new, options, reason, checked):
    code, lines, errors = checked(made(), new, *options)
    assert code == 2
    assert reason in " ".join(lines + errors)


@pytest.mark.parametrize(("factor", "code"), [(1.02, 2), (1.3, 1)])
def test_one_process_gives_a_verdict_only_on_large_differences(factor, code, checked):
    assert checked(made([[1.0]]), made([[factor]], seed=1))[0] == code


def test_an_empty_folder_and_a_missing_one_have_exit_code_2(checked, tmp_path, capsys):
    checked(made(), made(seed=1))
    (tmp_path / "empty").mkdir()
    assert checked_by(capsys, "check", "empty", "--against", "./baseline")[0] == 2
    assert checked_by(capsys, "check", "new", "--against", "./nowhere")[0] == 2
    assert checked_by(capsys, "check", "new", "--against", "nowhere")[0] == 2
    assert checked_by(capsys, "check", "new", "--against", "./new")[0] == 2


@pytest.mark.slow
@pytest.mark.always("README: perfexp check")
def test_a_slower_model_is_caught_from_measurement_to_exit_code(run, capsys):
    for folder, changes in (("base", ()), ("equal", ()), ("slow", ("model.base_seconds=1.1e-3",))):
        assert run(*FAKE, f"output_dir={folder}", *changes)[0] == 0
    assert checked_by(capsys, "check", "equal", "--against", "base")[0] == 0
    code, lines, _ = checked_by(capsys, "check", "slow", "--against", "base", "--metric", "device")
    assert code == 1
    assert lines[0].startswith("▼ SLOWER device")


# GitHub


def test_github_gets_annotations_and_a_summary(checked, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, lines, _ = checked(made(), made(seed=1, scale=1.1), "--github")
    assert code == 1
    [line] = lines
    assert line.startswith("::error title=perfexp check::▼ SLOWER device of 32 · batch 1")
    assert "± 0." in line and "%25" in line and "%" not in line.replace("%25", "")
    text = summary.read_text()
    assert text.startswith("before\nfailed: 1 worse")
    assert "▼ SLOWER |" in text and "| device | 5.0" in text


def test_names_in_a_record_are_no_workflow_commands(checked, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    name = "x\n::add-mask::secret"
    one, two = (made(seed=seed, scale=scale, model=name) for seed, scale in ((0, 1.0), (1, 1.1)))
    two.plan["algorithm"]["name"] = "\n::stop-commands::x"
    code, lines, _ = checked(one, two, "--github")
    assert (code, len(lines)) == (1, 1)
    assert lines[0].startswith("::error title=perfexp check::")
    code, lines, _ = checked(one, two)
    assert lines[0].startswith("▼ SLOWER")


def test_github_elsewhere_and_errors_are_annotated(checked, tmp_path, monkeypatch):
    code, lines, errors = checked(made(), made(seed=1), "--github")
    assert code == 2
    assert (
        "GITHUB_STEP_SUMMARY is not set" in lines[0]
        and "GITHUB_STEP_SUMMARY is not set" in errors[0]
    )
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "missing" / "summary.md"))
    assert checked(made(), made(seed=1), "--github")[0] == 2


# Named baselines


def test_a_baseline_is_added_listed_used_shown_and_removed(checked, tmp_path, capsys):
    assert checked(made(), made(seed=1))[0] == 0
    code, lines, _ = checked_by(capsys, "baseline", "add", "main", "baseline")
    place = tmp_path / "data" / "perfexp" / "baselines" / "node1-nvidia-h200" / "main"
    assert (code, lines) == (0, [f"added {place}"])
    assert Record.load(place / "0").to_json() == Record.load(tmp_path / "baseline").to_json()
    _, lines, _ = checked_by(capsys, "baseline", "list")
    assert lines[-1].split() == ["node1-nvidia-h200", "main", "2026-01-01", "1", "run", "run", "0"]
    assert checked_by(capsys, "check", "new", "--against", "main")[0] == 0
    assert "resnet18" in " ".join(checked_by(capsys, "baseline", "show", "main")[1])
    code, _, errors = checked_by(capsys, "baseline", "add", "main", "new")
    assert (code, "--force" in errors[0]) == (2, True)
    assert checked_by(capsys, "baseline", "add", "main", "new", "--force")[0] == 0
    assert Record.load(place / "0").name == "run 1"
    assert checked_by(capsys, "baseline", "rm", "main")[0] == 0
    assert not place.exists()
    assert checked_by(capsys, "baseline", "list")[1] == [f"no baselines in {place.parent.parent}"]


def test_a_baseline_that_can_not_be_replaced_stays(checked, tmp_path, capsys, monkeypatch):
    checked(made(), made(seed=1))
    folder = ("--folder", tmp_path / "own")
    assert checked_by(capsys, "baseline", "add", "main", "baseline", *folder)[0] == 0
    rename = Path.rename

    def full(path, target):
        if path.name == "main" and ".new-" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    assert checked_by(capsys, "baseline", "add", "main", "new", "--force", *folder)[0] == 2
    [place] = (tmp_path / "own").glob("*/*")
    assert Record.load(place / "0").name == "run 0"


def test_a_machine_whose_host_name_is_random_has_a_name(checked, capsys):
    checked(made(host="a1b2"), made(seed=1, host="c3d4"))
    assert checked_by(capsys, "baseline", "add", "main", "baseline", "--machine", "runner")[0] == 0
    assert checked_by(capsys, "check", "new", "--against", "main")[0] == 2
    assert checked_by(capsys, "check", "new", "--against", "main", "--machine", "runner")[0] == 0
    assert checked_by(capsys, "baseline", "add", "main", "baseline", "--machine", "../x")[0] == 2


def test_an_unreadable_baseline_is_listed_as_such(checked, tmp_path, capsys):
    checked(made(), made(seed=1))
    folder = ("--folder", tmp_path / "own")
    for name in ("good", "bad"):
        checked_by(capsys, "baseline", "add", name, "baseline", *folder)
    next((tmp_path / "own").glob("*/bad/0/record.json")).write_text("{}")
    code, lines, _ = checked_by(capsys, "baseline", "list", *folder)
    text = " ".join(lines)
    assert code == 0
    assert "unreadable" in text and "good 2026-01-01 1 run run 0" in " ".join(text.split())


def test_a_baseline_is_of_its_machine_and_gpu(checked, tmp_path, capsys):
    checked(made(), made(seed=1, board="NVIDIA L4"))
    folder = ("--folder", tmp_path / "own")
    assert checked_by(capsys, "baseline", "add", "main", "baseline", *folder)[0] == 0
    code, _, errors = checked_by(capsys, "check", "new", "--against", "main", *folder)
    assert code == 2
    assert (
        "no baseline main of node1-nvidia-l4" in errors[0]
        and "only of node1-nvidia-h200" in errors[0]
    )
    named = ("--machine", "node1-nvidia-h200", *folder)
    assert "--machine" in errors[0]
    assert checked_by(capsys, "check", "new", "--against", "main", *named)[0] == 0
    assert checked_by(capsys, "baseline", "add", "main", "new", *folder)[0] == 0
    code, _, errors = checked_by(capsys, "baseline", "rm", "main", *folder)
    assert (code, "--machine" in errors[0]) == (2, True)
    assert (
        checked_by(capsys, "baseline", "rm", "main", "--machine", "node1-nvidia-l4", *folder)[0]
        == 0
    )
    assert [path.name for path in (tmp_path / "own").glob("*/*")] == ["main"]


def test_a_sweep_becomes_a_baseline_of_several_records(checked, tmp_path, capsys):
    children = [SweepChild(job=2, name="alexnet", directory="none", status=Status.KILLED)]
    for number, model in enumerate(("resnet18", "vgg16")):
        (folder := tmp_path / "sweep" / str(number)).mkdir(parents=True)
        (folder / "record.json").write_bytes(made(seed=number, model=model).to_json())
        children.append(SweepChild(job=number, name=model, directory=str(number), status=Status.OK))
    sweep = Sweep(uid="s", name="s", started="2026-01-01T00:00:00+00:00", children=children)
    (tmp_path / "sweep" / "sweep.json").write_bytes(sweep.to_json())
    code, _, errors = checked_by(capsys, "baseline", "add", "both", tmp_path / "sweep")
    assert (code, errors) == (0, ["left out, without a record: alexnet (killed)"])
    checked(made(), made(seed=7, model="vgg16"))
    code, lines, _ = checked_by(
        capsys, "check", "new", "--against", "both", "--fail-on", "slower,missing"
    )
    assert code == 1
    assert [line.split(" · ")[0] for line in lines] == ["MISSING resnet18"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("add", "main"),
        ("add", "../main", "baseline"),
        ("rm",),
        ("show", "none"),
        ("rm", "*"),
        ("keep", "x"),
    ],
)
def test_wrong_commands_of_baselines_have_exit_code_2(arguments, checked, capsys):
    checked(made(), made(seed=1))
    assert checked_by(capsys, "baseline", *arguments)[0] == 2


def test_a_linked_baseline_is_neither_read_nor_removed(checked, tmp_path, capsys):
    checked(made(), made(seed=1))
    (tmp_path / "own" / "node1-nvidia-h200").mkdir(parents=True)
    (tmp_path / "elsewhere" / "0").mkdir(parents=True)
    (tmp_path / "elsewhere" / "0" / "record.json").write_bytes(made().to_json())
    (tmp_path / "own" / "node1-nvidia-h200" / "main").symlink_to(tmp_path / "elsewhere")
    for command in (("baseline", "rm", "main"), ("check", "new", "--against", "main")):
        assert checked_by(capsys, *command, "--folder", tmp_path / "own")[0] == 2
    assert json.loads((tmp_path / "elsewhere" / "0" / "record.json").read_text())["name"] == "run 0"


@pytest.mark.parametrize(
    "command", [("rm", "main"), ("add", "main", "new", "--force"), ("show", "main")]
)
def test_linked_baseline_record_is_neither_read_nor_removed(command, checked, tmp_path, capsys):
    checked(made(), made(seed=1))
    folder = ("--folder", tmp_path / "own")
    assert checked_by(capsys, "baseline", "add", "main", "baseline", *folder)[0] == 0
    [place] = (tmp_path / "own").glob("*/main")
    (place / "0").rename(tmp_path / "elsewhere")
    (place / "0").symlink_to(tmp_path / "elsewhere")
    code, _, errors = checked_by(capsys, "baseline", *command, *folder)
    assert (code, len(errors), "main/0 is a link" in errors[0]) == (2, 1, True)
    assert (tmp_path / "elsewhere" / "record.json").exists()
    assert (place / "0").is_symlink()
    assert "unreadable" in " ".join(checked_by(capsys, "baseline", "list", *folder)[1])
