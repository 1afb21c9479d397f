"""`perfexp status`: what it counts, what it says of it, and its exit codes."""

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
from itertools import product

import pytest
import yaml
from hydra import compose, initialize_config_dir

from perfexp import commands
from perfexp.devices import lock
from perfexp.host import installation
from perfexp.main import main
from perfexp.plan import config
from perfexp.records import units
from perfexp.records.expected import Expected
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key, Point, Series, Status, point_to_line
from perfexp.records.sweep_record import PlannedRun, Sweep, SweepChild
from perfexp.run import driver
from perfexp.run.preparation import Assignment, prepare

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")


def plain_plan(*overrides):
    config.register()
    with initialize_config_dir(config_dir=str(installation.conf_dir()), version_base="1.3"):
        return config.plan_of(
            compose(config_name="config", overrides=["processes=1", *overrides]), {}
        )


@pytest.fixture(scope="module")
def plan():
    """The plan of ten sizes, as a run leaves it."""
    return plain_plan("model=resnet50", "gpu=h200", "sweep=sizes")


def leave(folder, plan, *, statuses=(Status.OK,) * 10, wall_seconds=30.0, names=(), expected=None):
    """What a run that was killed leaves: its plan, the points that it expects, and those that were finished.

    Args:
        folder: of the run.
        plan: what plan.yaml holds.
        statuses: of the finished points.
        wall_seconds: of each of them.
        names: of options, which replace those of the plan.
        expected: plan of the expected points, if not that one; False for a folder of an older version.
    """
    (folder / "details").mkdir(parents=True)
    if expected is not False:
        typed = config.typed(plan if expected is None else expected)
        content = Expected(keys=typed.keys(), point_seconds=typed.point_seconds).to_json()
        (folder / "details" / "expected.json").write_bytes(content)
    plan = plan | {group: {"name": name} for group, name in names}
    (folder / "details" / "plan.yaml").write_text(yaml.safe_dump(plan))
    lines = [
        point_to_line(
            Point(
                key=Key(
                    phase="inference", input_size=(size, size), batch_size=1, precision="torch"
                ),
                status=status,
                series=[Series(name="latency", samples=[0.001] * 100)],
                wall_seconds=wall_seconds,
            )
        )
        for size, status in zip(
            [224, 256, 288, 320, 352, 384, 416, 448, 480, 512], statuses, strict=False
        )
    ]
    (folder / "details" / "points.jsonl").write_bytes(b"".join(lines))
    return folder


def test_what_is_all_done_is_said_so_with_exit_code_0(plan, tmp_path, capsys):
    leave(tmp_path / "run", plan)
    assert commands.run(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path),
        "  model     default",
        "  resnet50  10/10 done",
    ]


def test_status_counts_points_and_estimates_the_rest(plan, tmp_path, capsys):
    leave(tmp_path / "run", plan, statuses=[Status.OK] * 5 + [Status.OOM] * 2 + [Status.TIMEOUT])
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "resnet50  5/10 done, 2 oom, 1 timeout, 2 missing, ~66 s left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["gpu=h200", "sweep=sizes"], ", ~22 s left"),
        (["gpu=cpu"], ", ~7.0 s left"),
        (["gpu=cpu", "mode=train", "probes.layers=true", "probes.energy=true"], ", ~14 s left"),
        (["stopping=fixed"], ""),
        (["mode=train", "epochs=1"], ""),
    ],
)
def test_run_without_points_shows_the_estimated_time_left(overrides, told, tmp_path, capsys):
    plain = plain_plan("model=resnet50", *overrides)
    folder = leave(tmp_path / "run", plain, statuses=())
    (folder / "details" / "points.jsonl").unlink()
    assert commands.run(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f" missing{told}\n" in shown
    plan = config.typed(plain)
    seconds = Assignment(plan=plan, plain=plain, folder=folder, name="").seconds(plan.keys())
    assert (seconds is None) == (not told)
    assert not told or f"~{units.format_seconds(seconds, 2)} left" in shown


def test_a_stopping_rule_of_somebody_elses_is_not_run(plan, tmp_path, capsys):
    evil = {"_target_": "pathlib.Path.touch", "self": str(tmp_path / "touched")}
    leave(tmp_path / "run", plan | {"stopping": evil}, statuses=(), expected=plan)
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "0/10 done, 10 missing" in capsys.readouterr().out
    assert not (tmp_path / "touched").exists()


def test_status_of_a_measured_run_changes_nothing(plan, tmp_path, capsys):
    folder = leave(tmp_path / "run", plan, statuses=[Status.OK] * 9)
    with (folder / "details" / "run.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert commands.run(["status", str(tmp_path)]) == 1
        assert "9/10 done, 1 missing, running, ~36 s left" in capsys.readouterr().out
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "missing, running" not in capsys.readouterr().out
    (folder / "details" / "run.log").unlink()
    assert commands.run(["status", str(tmp_path)]) == 1
    assert sorted(path.name for path in (folder / "details").iterdir()) == [
        "expected.json",
        "plan.yaml",
        "points.jsonl",
    ]


def test_half_written_line_is_skipped_damaged_one_is_reported(plan, tmp_path, capsys):
    torn = leave(tmp_path / "torn", plan)
    content = (torn / "details" / "points.jsonl").read_bytes()
    (torn / "details" / "points.jsonl").write_bytes(content[:-50])
    assert commands.run(["status", str(torn)]) == 1
    assert "9/10 done, 1 missing" in capsys.readouterr().out
    (torn / "details" / "points.jsonl").write_bytes(content[50:])
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "torn: points.jsonl has a line that is not a point" in capsys.readouterr().err


def test_status_rows_are_models_and_columns_are_algorithms(plan, tmp_path, capsys):
    for model in ("vgg16", "alexnet"):
        for algorithm in ("gemm", "fft"):
            names = [("model", model), ("algorithm", algorithm)]
            leave(tmp_path / "2_quick" / f"{model}_{algorithm}", plan, names=names)
    leave(
        tmp_path / "2_quick" / "other",
        plan,
        names=[("model", "vgg16"), ("gpu", "a100"), ("mode", "slow")],
    )
    commands.run(["status", str(tmp_path)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:4] == [
        ["model", "mode", "default", "·", "a100", "fft", "·", "h200", "gemm", "·", "h200"],
        ["alexnet", "inference", *["10/10", "done"] * 2],
        ["vgg16", "inference", *["10/10", "done"] * 2],
    ]


def test_runs_in_one_cell_are_added_and_folders_stay_separate(plan, tmp_path, capsys):
    leave(tmp_path / "a" / "0", plan)
    leave(tmp_path / "a" / "1", plan, statuses=[Status.OK] * 4)
    leave(tmp_path / "b" / "0", plan)
    assert commands.run(["status", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(tmp_path / "a")
    assert "14/20 done, 6 missing, ~3 min 06 s left" in lines[2]
    assert lines[3] == str(tmp_path / "b")
    assert lines[-1].startswith("in all: 24/30 done, 6 missing")


def test_a_first_prediction_that_failed_is_not_all_done(plan, tmp_path, capsys):
    folder = leave(tmp_path / "run", plan | {"cold_start": True})
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "10/10 done, first prediction missing" in capsys.readouterr().out
    key = Key(phase="ttfp", input_size=(224, 224), batch_size=1, precision="torch")
    with (folder / "details" / "points.jsonl").open("ab") as file:
        file.write(point_to_line(Point(key=key, status=Status.KILLED)))
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "10/10 done, first prediction killed" in capsys.readouterr().out


def profile_point(status):
    key = Key(phase="inference_profile", input_size=(224, 224), batch_size=1, precision="torch")
    return point_to_line(Point(key=key, status=status, facts={"profile": {"profiler": "nsys"}}))


def test_a_profile_that_failed_or_is_missing_is_not_all_done(tmp_path, capsys):
    plan = plain_plan("model=resnet50", "sweep=sizes", "profiler=nsys")
    folder = leave(tmp_path / "run", plan)
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "10/10 done, profile missing, ~60 s left\n" in capsys.readouterr().out
    points = (folder / "details" / "points.jsonl").read_bytes()
    (folder / "details" / "points.jsonl").write_bytes(points + profile_point(Status.FAILED))
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "10/10 done, profile failed\n" in capsys.readouterr().out
    (folder / "details" / "points.jsonl").write_bytes(points + profile_point(Status.OK))
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "10/10 done\n" in capsys.readouterr().out


def test_profiles_that_another_command_requested_do_not_count(plan, tmp_path, capsys):
    folder = leave(tmp_path / "run", plan)
    with (folder / "details" / "points.jsonl").open("ab") as file:
        file.write(profile_point(Status.UNSUPPORTED))
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "10/10 done\n" in capsys.readouterr().out


def test_foreign_profiler_is_not_run_and_its_failure_is_shown(tmp_path, capsys):
    evil = {"_target_": "pathlib.Path.touch", "name": "evil", "self": str(tmp_path / "touched")}
    plan = plain_plan("model=resnet50", "sweep=sizes")
    profiled = plain_plan("model=resnet50", "sweep=sizes", "profiler=nsys")
    folder = leave(tmp_path / "run", plan | {"profiler": evil}, expected=profiled)
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "10/10 done, profile missing" in capsys.readouterr().out
    with (folder / "details" / "points.jsonl").open("ab") as file:
        file.write(profile_point(Status.FAILED))
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "10/10 done, profile failed\n" in capsys.readouterr().out
    assert not (tmp_path / "touched").exists()


def test_where_a_call_was_only_marked_nothing_else_is_missing(tmp_path, capsys):
    plan = plain_plan("model=resnet50", "profiler=nvtx")
    folder = leave(tmp_path / "run", plan, statuses=())
    (folder / "details" / "points.jsonl").write_bytes(profile_point(Status.OK))
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "1/1 done\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [
        ["input_size=[224,512x1024]", "batch_size=[1,8]", "processes=2"],
        ["sweep=sizes", "sweep.num_sizes=100", "mode=train"],
        ["sweep=batch", "mode=train_inference", "precision=bf16"],
        ["mode=train_inference"],
        ["mode=train_inference", "batch_size=[1,8]", "processes=2", "profiler=nsys"],
        ["mode=train_inference", "batch_size=[1,8]", "profiler=torch", "profiler.all_points=true"],
    ],
)
def test_the_points_that_are_expected_are_those_of_the_plan(overrides, tmp_path):
    plain = plain_plan("model=fake", *overrides)
    plan, paths = config.typed(plain), RunPaths(tmp_path / "run")
    paths.create()
    prepare(paths, plan, plain, keys_again=())
    expected = Expected.load(paths.expected)
    assert expected.keys == [
        *plan.timed_keys(),
        *plan.first_prediction_keys(),
        *plan.profile_keys(),
    ]
    assert expected.point_seconds == plan.point_seconds


def test_a_sweep_of_somebody_elses_is_not_run(plan, tmp_path, capsys):
    evil = {"_target_": "pathlib.Path.touch", "self": str(tmp_path / "touched")}
    leave(tmp_path / "run", plan | {"sweep": evil}, expected=plan)
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "10/10 done" in capsys.readouterr().out
    assert not (tmp_path / "touched").exists()


def test_status_of_an_older_folder_has_no_total_before_record(plan, tmp_path, capsys):
    folder = leave(tmp_path / "run", plan, expected=False)
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "10 done, total unknown\n" in capsys.readouterr().out
    points = [
        json.loads(line) for line in (folder / "details" / "points.jsonl").read_bytes().splitlines()
    ]
    when = "2026-03-01T10:00:00+00:00"
    about = {
        "uid": "1",
        "name": "x",
        "perfexp_version": "0",
        "status": "ok",
        "started": when,
        "ended": when,
    }
    record = {"schema_version": 1, **about, "plan": {}, "plan_hash": "", "points": points}
    (folder / "record.json").write_text(json.dumps(record))
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "10/10 done" in capsys.readouterr().out


def test_expected_points_that_cannot_be_read_are_reported(plan, tmp_path, capsys):
    folder = leave(tmp_path / "run", plan)
    (folder / "details" / "expected.json").write_text("[]")
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "expected.json cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 99}', '{"photos": 3}'])
def test_a_run_whose_record_show_cannot_read_is_not_done(plan, tmp_path, capsys, content):
    folder = leave(tmp_path / "run", plan)
    (folder / "record.json").write_text(content)
    assert commands.run(["status", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert commands.run(["show", str(folder)]) == 2
    assert capsys.readouterr().err.removeprefix("error: ").strip() in told.err
    assert "done" not in told.out


def leave_sweep(folder, *children, uid="s", started="2026-03-01T10:00:00+00:00", jobs=None):
    folder.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(
        uid=uid, name="batch_size", started=started, command=["-m", "batch_size=1,2"], jobs=jobs
    )
    for job, (directory, error) in enumerate(children):
        status = Status.FAILED if error else Status.OK
        sweep.children.append(
            SweepChild(job=job, name=f"r{job}", directory=directory, status=status, error=error)
        )
    (folder / "sweep.json").write_bytes(sweep.to_json())


def test_a_run_that_was_refused_is_shown_with_the_reason(plan, tmp_path, capsys):
    leave(tmp_path / "s" / "0", plan)
    leave_sweep(tmp_path / "s", ("0", None), ("1", "no such model"), jobs=2)
    assert commands.run(["status", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "s: sweep over batch_size, 2 of 2 runs have ended" in out
    assert "  run 1 r1: failed: no such model" in out


def test_runs_of_a_sweep_that_have_not_begun_are_not_all_done(plan, tmp_path, capsys):
    leave(tmp_path / "s" / "0", plan)
    leave_sweep(tmp_path / "s", ("0", None), jobs=2)
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "1 of 2 runs have ended" in capsys.readouterr().out


def test_status_finds_stage_runs_by_sweep_latest_counts(plan, tmp_path, capsys):
    leave(tmp_path / "1_sanity" / "a", plan)
    leave_sweep(tmp_path / "old", ("../1_sanity/a", "it was busy"), jobs=2)
    leave_sweep(
        tmp_path / "new", ("../1_sanity/a", None), started="2026-03-02T10:00:00+00:00", jobs=1
    )
    assert commands.run(["status", str(tmp_path / "new")]) == 0
    assert "10/10 done" in capsys.readouterr().out
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "1_sanity: sweep over batch_size, 1 of 1 runs have ended" in capsys.readouterr().out


def test_links_are_not_followed(plan, tmp_path, capsys):
    leave(tmp_path / "elsewhere" / "run", plan)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "elsewhere")
    assert commands.run(["status", str(tmp_path / "here")]) == 2
    assert "There is no run in or below" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_the_users_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert commands.run(["status"]) == 2
    assert "There is no folder outputs" in capsys.readouterr().err


def test_what_a_real_run_leaves_is_done(tmp_path, capsys):
    assert main([*FAKE, f"output_dir={tmp_path / 'run'}", "batch_size=[1,2]"]) == 0
    capsys.readouterr()
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "fake   2/2 done" in capsys.readouterr().out


def interrupted_sweep(folder, *names, plan, ended=1, begun=0, planned=True):
    """A sweep over models and algorithms, of which some runs have ended, some have begun, and the others left nothing.

    Args:
        folder: of the sweep.
        names: model and algorithm of each run.
        plan: of each run that has begun.
        ended: how many have ended; each has measured all ten points.
        begun: how many have begun besides; each has measured five.
        planned: whether the sweep wrote its runs when it began.
    """
    sweep = Sweep(
        uid="s", name="axes", started="2026-03-01T10:00:00+00:00", command=["-m"], jobs=len(names)
    )
    for number, (model, algorithm) in enumerate(names):
        options = {
            "model": model,
            "algorithm": algorithm,
            "mode": "inference",
            "precision": "torch",
            "gpu": "h200",
        }
        one = PlannedRun(
            job=number, directory=str(number), options=options, points={"timed": 10}, seconds=22.0
        )
        sweep.planned += [one] * planned
        if number < ended + begun:
            statuses = [Status.OK] * (10 if number < ended else 5)
            chosen = [("model", model), ("algorithm", algorithm)]
            leave(folder / str(number), plan, statuses=statuses, names=chosen)
        if number < ended:
            sweep.children.append(
                SweepChild(job=number, name=f"r{number}", directory=str(number), status=Status.OK)
            )
    folder.mkdir(exist_ok=True)
    (folder / "sweep.json").write_bytes(sweep.to_json())


def test_status_counts_points_of_unstarted_runs_as_missing(plan, tmp_path, capsys):
    names = product(("alexnet", "vgg16"), ("default", "gemm"))
    interrupted_sweep(tmp_path / "s", *names, plan=plan, begun=1)
    leave(tmp_path / "b" / "0", plan)
    assert commands.run(["status", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:] == [
        f"{tmp_path / 's'}: sweep over axes, 1 of 4 runs have ended",
        "  model    default                            gemm",
        "  alexnet  10/10 done                         5/10 done, 5 missing, ~2 min 36 s left",
        "  vgg16    0/10 done, 10 missing, ~22 s left  0/10 done, 10 missing, ~22 s left",
        "in all: 25/50 done, 25 missing, ~3 min 20 s left",
    ]


def test_status_of_an_unstarted_sweep_names_runs_and_points(plan, tmp_path, capsys):
    interrupted_sweep(
        tmp_path / "s", ("resnet50", "default"), ("resnet50", "fft"), plan=plan, ended=0
    )
    assert commands.run(["status", str(tmp_path), "--json"]) == 1
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["model"], run["algorithm"], run["points"]) for run in runs] == [
        ("resnet50", "default", {"missing": 10}),
        ("resnet50", "fft", {"missing": 10}),
    ]


def test_unlimited_run_is_estimated_by_measured_ones(plan, tmp_path, capsys):
    interrupted_sweep(tmp_path / "s", ("resnet50", "default"), ("vgg16", "default"), plan=plan)
    sweep = Sweep.load(tmp_path / "s")
    sweep.planned[1].seconds = None
    (tmp_path / "s" / "sweep.json").write_bytes(sweep.to_json())
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "vgg16     0/10 done, 10 missing, ~5 min 06 s left" in capsys.readouterr().out


def test_uncounted_runs_of_an_older_sweep_are_mentioned(plan, tmp_path, capsys):
    interrupted_sweep(
        tmp_path / "s", ("alexnet", "default"), ("vgg16", "default"), plan=plan, planned=False
    )
    assert commands.run(["status", str(tmp_path)]) == 1
    assert (
        "1 of 2 runs have ended; those that have not begun are not counted"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("directory", ["a\0b", "x" * 256, "0"])
def test_planned_runs_with_folders_that_cannot_be_are_refused(tmp_path, capsys, directory):
    sweep = Sweep(uid="s", name="axes", started="", jobs=2)
    sweep.planned = [PlannedRun(job=0, directory="0"), PlannedRun(job=1, directory=directory)]
    (tmp_path / "sweep.json").write_bytes(sweep.to_json())
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "is not a perfexp sweep" in capsys.readouterr().err


def test_refused_run_is_in_its_models_row_with_the_reason(plan, tmp_path, capsys):
    interrupted_sweep(tmp_path / "s", ("alexnet", "default"), plan=plan)
    sweep = Sweep.load(tmp_path / "s")
    axes = {"model.name": "vgg16", "batch_size": "0"}
    why = "batch_size=0 is not a batch size"
    sweep.children += [
        SweepChild(
            job=1, name="v", directory="1_vgg16_0", status=Status.FAILED, axes=axes, error=why
        )
    ]
    (tmp_path / "s" / "sweep.json").write_bytes(sweep.to_json())
    assert commands.run(["status", str(tmp_path)]) == 1
    assert (
        "  vgg16    1 run refused\nnot measured\n  run 1 v: failed: batch_size=0 is not"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_sweep_writes_planned_runs_before_the_first_begins(tmp_path, monkeypatch, processes):
    seen = []
    folder = tmp_path / "s"
    monkeypatch.setattr(
        driver, "measure", lambda *_, **__: seen.append(Sweep.load(folder).planned) or sys.exit(5)
    )
    arguments = [
        "-m",
        "batch_size=1,[1,2,4],0",
        f"processes={processes}",
        "cold_start=true",
        f"output_dir={folder}",
    ]
    with pytest.raises(SystemExit):
        main([*FAKE, *arguments])
    first, second = seen[0]  # the third one is refused
    assert (first.job, first.directory, second.directory) == (0, "0-b1", "1-b1-2-4")
    assert [first.points, second.points] == [
        {"timed": processes, "first prediction": processes},
        {"timed": 3 * processes, "first prediction": processes},
    ]
    assert first.options == {
        "model": "fake", "algorithm": "default", "mode": "inference", "precision": "torch", "gpu": "fake"
    }  # fmt: skip
    assert [first.overrides, second.overrides] == [["batch_size=1"], ["batch_size=[1,2,4]"]]


def test_what_is_left_in_all_is_the_sum_of_what_the_lines_say(tmp_path, capsys):
    plan = plain_plan(
        "model=resnet50", "sweep=sizes", "stopping=fixed"
    )  # which has no limit of time
    leave(tmp_path / "a" / "0", plan, statuses=[Status.OK] * 9, wall_seconds=2.0)
    leave(tmp_path / "a" / "1", plan, statuses=(), names=[("model", "vgg16")])
    leave(tmp_path / "b" / "0", plan, statuses=[Status.OK] * 8, wall_seconds=40.0)
    leave(tmp_path / "b" / "1", plan, statuses=())
    assert commands.run(["status", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("~")[2] for line in lines if line.endswith(" left")] == [
        "8.5 s left",  # as the others of the same run, and loading
        "26 s left",  # as all there are
        "1 min 53 s left",  # two as the others of the same run, ten as all that measure the same
        "2 min 28 s left",
    ]


def refused_by_a_worker(folder):
    """A real run that finds its device in use, in a folder that somebody has a file in: otherwise it leaves none."""
    folder.mkdir()
    (folder / "notes.txt").touch()
    fake = (*FAKE, "+gpu.script.lock_name=perfexp-test-status", "device_lock=fail")
    with lock.held("perfexp-test-status", wait=False, purpose="something else", waiting=print):
        assert main([*fake, f"output_dir={folder}"]) == 2


def test_run_refused_by_a_worker_has_a_reason_and_misses_nothing(tmp_path, capsys):
    refused_by_a_worker(tmp_path / "run")
    capsys.readouterr()
    assert commands.run(["status", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        str(tmp_path),
        "  model  default",
        "  fake   1 run refused",
        "not measured",
    ]
    assert lines[4].startswith("  run: refused: ")
    assert "measures something else" in lines[4]


def test_a_refused_run_among_interleaved_ones_is_told_once(tmp_path, capsys):
    fake = (*FAKE, "+gpu.script.lock_name=perfexp-test-status", "device_lock=fail", "processes=2")
    for name in ("0-b1", "1-b2"):
        (tmp_path / "s" / name).mkdir(parents=True)
        (tmp_path / "s" / name / "notes.txt").touch()
    with lock.held("perfexp-test-status", wait=False, purpose="something else", waiting=print):
        assert main([*fake, "-m", "batch_size=1,2", f"output_dir={tmp_path / 's'}"]) == 2
    capsys.readouterr()
    assert commands.run(["status", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "  fake   2 runs refused\n" in told
    assert told.count("measures something else") == 2


def test_an_empty_reason_is_none(tmp_path, capsys):
    refused_by_a_worker(tmp_path / "run")
    (tmp_path / "run" / "details" / "refused.txt").write_text("")
    capsys.readouterr()
    assert commands.run(["status", str(tmp_path)]) == 1
    assert "0/1 done, 1 missing" in capsys.readouterr().out


def test_a_profile_that_is_refused_is_no_run_that_was(tmp_path):
    arguments = (*FAKE, "profiler=torch", "profiler.modules=true", f"output_dir={tmp_path / 'run'}")
    assert main([*arguments]) == 1
    assert not (tmp_path / "run" / "details" / "refused.txt").exists()


def test_a_refused_run_that_was_begun_again_is_refused_no_more(tmp_path, capsys):
    refused_by_a_worker(tmp_path / "run")
    assert "measures something else" in (tmp_path / "run" / "details" / "refused.txt").read_text()
    assert main(["+gpu.script.lock_name=perfexp-test-status", f"resume={tmp_path / 'run'}"]) == 0
    assert not (tmp_path / "run" / "details" / "refused.txt").exists()
    capsys.readouterr()
    assert commands.run(["status", str(tmp_path)]) == 0
    assert "1/1 done" in capsys.readouterr().out


def test_status_title_is_the_given_folder_or_its_full_path(plan, tmp_path, monkeypatch, capsys):
    leave(tmp_path / "run", plan)
    monkeypatch.chdir(tmp_path)
    for asked, title in (("run", "run"), (".", str(tmp_path))):
        assert commands.run(["status", asked]) == 0
        assert capsys.readouterr().out.splitlines()[0] == title


@pytest.mark.slow
def test_a_terminal_gets_a_table_with_bold_titles(plan, tmp_path):
    leave(tmp_path / "run", plan)
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [sys.executable, "-m", "perfexp", "status", str(tmp_path)]
    subprocess.run(command, stdout=theirs, check=True, env=environment | {"TERM": "xterm"})
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert re.search(r"\x1b\[1mmodel +\x1b\[0m", shown)
    assert "10/10 done" in shown
