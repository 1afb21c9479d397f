"""The command line from end to end: sweeps, stages and runs that replace others."""

import shutil
import subprocess
import sys
from collections import Counter
from functools import partialmethod
from pathlib import Path

import pytest

from perfexp.plan import config
from perfexp.records.paths import SweepPaths
from perfexp.records.record import Record, Status
from perfexp.records.sweep_record import Sweep
from perfexp.report.console import Console

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")


#: Commands, and a folder of theirs with a report.
REPORTED = [
    ((*FAKE, "-m", "batch_size=1,2", "output_dir=s"), "s/1-b2"),
    ((*FAKE, "experiment=all", "model=fake", "output_dir=s"), "s/1-inference"),
    ((*FAKE, "-m", "experiment=quick", "batch_size=1,2", "sweep.num_sizes=2"), "outputs/2_quick"),
    ((*FAKE, "output_dir=x"), "x"),
]


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "perfexp", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_sweep_prints_on_the_console_of_its_bars(run, monkeypatch):
    """Another console's lines would be written into the bars."""
    printing = []

    def noted(console, made, *arguments, **options):
        printing.append(console)
        return made(console, *arguments, **options)

    for name in ("sweep_header", "progress"):
        monkeypatch.setattr(Console, name, partialmethod(noted, getattr(Console, name)))
    assert run(*FAKE, "-m", "batch_size=1,2")[0] == 0
    assert len(printing) == 3
    assert len(set(map(id, printing))) == 1


@pytest.mark.slow
@pytest.mark.always("README: a sweep")
def test_a_sweep_is_a_run_for_each_combination_and_a_summary(run, tmp_path):
    code, printed, records = run(
        *FAKE, "-m", "batch_size=1,2", "precision=fp32,bf16", "output_dir=sweep"
    )
    assert code == 0
    sweep = Sweep.load(tmp_path / "sweep")
    assert (sweep.jobs, len(sweep.children), len(records)) == (4, 4, 4)
    assert {record.sweep.uid for record in records} == {sweep.uid}
    assert [child.axes for child in sweep.children] == [
        {"batch_size": "1", "precision": "fp32"},
        {"batch_size": "1", "precision": "bf16"},
        {"batch_size": "2", "precision": "fp32"},
        {"batch_size": "2", "precision": "bf16"},
    ]
    assert {"sweep.json", "sweep.csv", "sweep.png"} <= {
        path.name for path in (tmp_path / "sweep").iterdir()
    }
    assert "4 runs" in printed


@pytest.mark.slow
def test_a_run_of_a_sweep_that_fails_harms_no_other(run, tmp_path):
    code, _, records = run(
        *FAKE, "-m", "batch_size=1,100,2", "model.faults.oom=1000000", "output_dir=s"
    )
    assert code == 1
    assert [r.status for r in sorted(records, key=lambda r: r.sweep.job)] == [
        Status.OK,
        Status.OOM,
        Status.OK,
    ]
    assert Sweep.load(tmp_path / "s").children[1].status is Status.OOM


@pytest.mark.slow
def test_refused_run_of_a_sweep_is_listed_with_its_reason(run, tmp_path):
    code, _, _ = run(*FAKE, "-m", "input_size=32,0,64", "output_dir=s")
    assert code == 2
    children = Sweep.load(tmp_path / "s").children
    assert [child.status for child in children] == [Status.OK, Status.FAILED, Status.OK]
    assert "no pixels" in children[1].error


@pytest.mark.slow
@pytest.mark.always("README: the record holds the configuration")
def test_the_command_in_a_record_repeats_the_run(run, tmp_path):
    _, _, records = run.shared(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    last = next(record for record in records if record.plan["batch_size"] == 2)
    code, _, _ = run(*last.command, "output_dir=again")
    assert code == 0
    assert Record.load(tmp_path / "again").plan_hash == last.plan_hash


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "folder"), REPORTED)
def test_command_in_a_report_repeats_the_run_in_a_new_folder(run, tmp_path, arguments, folder):
    run.shared(*arguments)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")}
    [report] = list((tmp_path / folder).rglob("report.md"))[:1]
    block = report.read_text().rpartition("## To measure it again\n\n")[2].split("\n\n")[0]
    command = "\n".join(
        line.removeprefix("    ") for line in block.splitlines() if line.startswith("    ")
    )
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {file: file.stat().st_mtime_ns for file in before} == before
    [made] = set(tmp_path.rglob("record.json")) - set(before)
    assert Record.load(made).plan_hash == Record.load(report.parent).plan_hash


@pytest.mark.slow
def test_stages_have_folders_of_their_own(run, tmp_path):
    fake = ("model=fake", "gpu=fake", "tracking=none")
    run(*fake, "experiment=sanity")
    run(*fake, "experiment=quick", "stopping=fixed", "sweep.num_sizes=3")
    assert (tmp_path / "outputs/1_sanity/fake_default_fake/record.json").exists()
    quick = Record.load(tmp_path / "outputs/2_quick/fake_default_fake")
    assert [
        point.key.input_size[0] for point in quick.points if point.key.phase == "inference"
    ] == [224, 368, 512]


@pytest.mark.slow
def test_other_plan_of_the_same_combination_gets_its_own_folder(run, tmp_path):
    stage = tmp_path / "outputs" / "1_sanity"
    command = (*FAKE, "experiment=sanity")
    for extra in ((), ("batch_size=2",), ("batch_size=3",), ("batch_size=2",), ()):
        assert run(*command, *extra)[0] == 0
    found = {path.name: Record.load(path).plan["batch_size"] for path in sorted(stage.iterdir())}
    assert found == {"fake_default_fake": 1, "fake_default_fake-2": 2, "fake_default_fake-3": 3}
    assert "1_sanity/fake_default_fake-2" in run(*command, "batch_size=2")[1]
    code, text, _ = run(*FAKE, "experiment=quick", "sweep.num_sizes=2")
    assert code == 0
    assert "this combination ended" not in text
    assert "has no record" not in text


@pytest.mark.slow
def test_overwrite_replaces_a_run_and_nothing_else(run, tmp_path):
    folder = tmp_path / "x"
    run.shared(*FAKE, "output_dir=x")
    before = Record.load(folder)
    (folder / "mine.csv").write_text("mine")
    assert run(*FAKE, "output_dir=x", "batch_size=2")[0] == 2
    assert Record.load(folder).uid == before.uid
    code, _, _ = run("--overwrite", *FAKE, "output_dir=x", "batch_size=2")
    after = Record.load(folder)
    assert code == 0
    assert [point.key.batch_size for point in after.points] == [2]
    assert after.uid != before.uid
    assert (folder / "mine.csv").read_text() == "mine"
    assert run("--overwrite", "resume=x")[0] == 2
    run("--overwrite", *FAKE, "output_dir=x", "batch_size=2")
    assert Record.load(folder).points[0].started > after.points[0].started, (
        "the same plan is measured anew, too"
    )


@pytest.mark.slow
def test_overwrite_may_measure_other_points_than_there_were(run):
    fake = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "output_dir=o")
    assert run(*fake, "batch_size=2")[0] == 0
    code, _, [record] = run(*fake, "batch_size=[4,8]", "processes=2", "--overwrite")
    assert (code, {point.key.batch_size for point in record.points}) == (0, {4, 8})


def test_overwrite_of_a_run_that_is_refused_keeps_what_was_there(run, tmp_path):
    folder = tmp_path / "x"
    run.shared(*FAKE, "output_dir=x")
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "run.log"]
    before = {file: file.read_bytes() for file in files}
    assert run("--overwrite", *FAKE, "gpu=h100", "output_dir=x")[0] == 2
    assert {file: file.read_bytes() for file in files} == before
    code, text, _ = run(*FAKE, "output_dir=x")
    assert code == 0
    assert "Nothing is left to measure" in text


@pytest.mark.slow
def test_sweep_with_numbered_stage_folders_is_resumed(run, tmp_path):
    command = (*FAKE, "-m", "experiment=sanity", "mode=inference,train")
    run(*command)
    run(*command, "input_size=64", "output_dir=second")
    again = tmp_path / "outputs" / "1_sanity" / "fake_default_fake_mode-train-2"
    (again / "details" / "points.jsonl").unlink()
    (again / "record.json").unlink()
    code, text, _ = run("resume=second")
    assert code == 0, text
    assert Record.load(again).plan["input_size"] == 64
    assert "2 of 2 runs ended\n" in text
    names = sorted(path.name for path in again.parent.iterdir())
    assert names == [
        f"fake_default_fake_mode-{mode}{end}"
        for mode in ("inference", "train")
        for end in ("", "-2")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_two_runs_of_a_sweep_never_share_a_folder(run, tmp_path, monkeypatch, flags):
    """As with gpu=auto,cpu on a processor: both are called `cpu`."""
    monkeypatch.setattr("perfexp.plan.naming._device", lambda gpu, index, folders: "same")
    (tmp_path / "mine" / "gpu").mkdir(parents=True)
    shutil.copy(config.conf_dir() / "gpu" / "fake.yaml", tmp_path / "mine" / "gpu" / "other.yaml")
    sweep = ("-m", "experiment=sanity", "gpu=fake,other", "processes=2", "--config-dir=mine")
    assert (
        run(
            *flags, "model=fake", *(text for text in FAKE if text[:3] not in ("gpu", "mod")), *sweep
        )[0]
        == 0
    )
    assert {path.parent.parent.name for path in tmp_path.rglob("plan.yaml")} == {
        "fake_default_same",
        "fake_default_same-2",
    }


@pytest.mark.slow
def test_a_stage_whose_earlier_stage_failed_warns_and_says_why(run, tmp_path):
    fake = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")
    run(*fake, "experiment=sanity", "batch_size=100", "model.faults.oom=1000000")
    _, text, records = run(*fake, "experiment=quick", "sweep.num_sizes=2")
    assert [record.status for record in records] == [Status.OOM, Status.OK]
    warned = " ".join(line for line in text.splitlines() if "warning" in line)
    assert "outputs/1_sanity/fake_default_fake this combination ended oom" in warned
    (tmp_path / "outputs/1_sanity/fake_default_fake/record.json").unlink()
    _, text, _ = run(*fake, "experiment=full", "sweep.num_sizes=2")
    assert "outputs/1_sanity/fake_default_fake has no record" in text
    assert "2_quick" not in text
    _, text, _ = run(*fake, "experiment=sanity", "output_dir=elsewhere")
    assert "this combination ended" not in text
    assert "has no record" not in text


@pytest.mark.slow
def test_full_is_a_hundred_sizes_from_224_to_512(run):
    _, _, [record] = run(
        "model=fake", "gpu=fake", "tracking=none", "experiment=full", "stopping=fixed"
    )
    timed = [point for point in record.points if point.key.is_timed]
    sides = [point.key.input_size[0] for point in timed]
    assert (len(sides), sides[0], sides[-1]) == (100, 224, 512)
    assert Counter(point.key.phase for point in record.points) == {
        "inference": 100,
        "inference_layers": 100,
        "ttfp": 1,
    }
    assert all(
        point.metric("layers/closure") and point.metric("energy/per_call_joules") for point in timed
    )


@pytest.mark.slow
def test_a_stage_swept_over_models_has_a_folder_for_each(run, tmp_path):
    run(*FAKE, "-m", "experiment=sanity", "model.name=a,b")
    assert {path.name for path in (tmp_path / "outputs/1_sanity").iterdir()} == {
        "a_default_fake",
        "b_default_fake",
    }


@pytest.mark.slow
@pytest.mark.always("README: an interrupted sweep continues")
def test_sweep_resumes_by_folder_and_stays_the_same(run, tmp_path):
    run.shared(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    before = Sweep.load(tmp_path / "s")
    points = (tmp_path / "s" / "1-b2" / "details" / "points.jsonl").read_bytes()
    for name in ("details/points.jsonl", "record.json"):
        (tmp_path / "s" / "0-b1" / name).unlink()
    code, _, records = run("resume=s")
    after = Sweep.load(tmp_path / "s")
    assert code == 0
    assert (after.uid, len(after.children)) == (before.uid, 2)
    assert {record.sweep.uid for record in records} == {before.uid}
    assert (tmp_path / "s" / "1-b2" / "details" / "points.jsonl").read_bytes() == points


@pytest.mark.slow
def test_another_sweep_in_the_same_folder_is_refused(run):
    run.shared(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    code, printed, _ = run(*FAKE, "-m", "batch_size=1,4", "output_dir=s")
    assert code == 2
    assert "another sweep" in printed
    code, printed, _ = run("--multirun", "batch_size=1,2", *FAKE, "output_dir=s")
    assert code == 0, printed


@pytest.mark.slow
def test_another_order_of_axes_is_another_sweep(run):
    run.shared(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    axes, paths = ["batch_size=1,2", "input_size=64,96"], SweepPaths(Path("s"))
    sweep = Sweep.load(paths.root)
    sweep.command = [*FAKE, "-m", *axes, "output_dir=s"]
    paths.summary.write_bytes(sweep.to_json())
    code, printed, _ = run(*FAKE, "-m", *axes[::-1], "output_dir=s", "--dry-run")
    assert code == 2
    assert "holds another sweep" in printed
    assert run(*FAKE, "-m", *axes, "output_dir=s", "--dry-run")[0] == 0


@pytest.mark.slow
def test_replicates_of_a_sweep_are_interleaved_in_a_seeded_order(run):
    code, _, records = run(*FAKE, "-m", "batch_size=1,2,4", "processes=3", "output_dir=s")
    points = sorted(
        (point for record in records for point in record.points), key=lambda point: point.started
    )
    rounds = [[point.key for point in points[index : index + 3]] for index in (0, 3, 6)]
    assert code == 0
    assert [{key.replicate for key in keys} for keys in rounds] == [{0}, {1}, {2}]
    assert all({key.batch_size for key in keys} == {1, 2, 4} for keys in rounds)
    assert len({tuple(key.batch_size for key in keys) for keys in rounds}) > 1


@pytest.mark.slow
def test_experiment_may_define_a_sweep_and_overrides_still_apply(run, tmp_path):
    code, printed, records = run(
        "experiment=all", "gpu=fake", "model=fake", "tracking=none", "output_dir=s"
    )
    assert code == 0
    assert sorted(record.plan["mode"]["name"] for record in records) == ["inference", "train"]
    assert "2 of 2 runs ended" in printed


def test_settings_that_are_on_or_off_are_named_as_they_are_typed(run):
    code, printed, _ = run(
        *FAKE, "-m", "execution.channels_last=true,false", "batch_size=1,0", "output_dir=s"
    )
    assert code == 2
    assert "channels_last=true" in printed
    assert "channels_last=True" not in printed
    assert [child.axes["execution.channels_last"] for child in Sweep.load(Path("s")).children] == [
        *("true", "true", "false", "false")
    ]


def test_a_dry_run_counts_what_is_missing_and_changes_nothing(run, tmp_path):
    run.shared(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    for name in ("details/points.jsonl", "record.json"):
        (tmp_path / "s" / "0-b1" / name).unlink()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    code, printed, _ = run("resume=s", "--dry-run")
    assert code == 0
    assert "batch_size=1-fake-default-inference: 1 point" in printed
    assert "batch_size=2-fake-default-inference: nothing is left to measure" in printed
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    assert run(*FAKE, "batch_size=3", "output_dir=s/1-b2", "--dry-run")[0] == 2


@pytest.mark.slow
def test_run_of_an_experiment_sweep_can_be_resumed_alone(run, tmp_path):
    run("experiment=all", "gpu=fake", "model=fake", "tracking=none", "output_dir=s")
    sweep = (tmp_path / "s" / "sweep.json").read_bytes()
    folder = tmp_path / "s" / "0-train"
    (folder / "details" / "points.jsonl").unlink()
    code, _, records = run(f"resume={folder}")
    assert code == 0
    assert len(records) == 2
    assert (tmp_path / "s" / "sweep.json").read_bytes() == sweep
    assert not (folder / "sweep.json").exists()
    assert Record.load(folder).sweep.uid == Sweep.load(tmp_path / "s").uid


@pytest.mark.slow
def test_runs_of_a_sweep_are_not_handed_to_other_launchers(tmp_path):
    plugin = tmp_path / "hydra_plugins" / "perfexp_other"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        "from hydra._internal.core_plugins.basic_launcher import BasicLauncher\n"
        "class OtherLauncher(BasicLauncher):\n"
        "    pass\n"
    )
    (tmp_path / "mine" / "hydra" / "launcher").mkdir(parents=True)
    (tmp_path / "mine" / "hydra" / "launcher" / "other.yaml").write_text(
        "_target_: hydra_plugins.perfexp_other.OtherLauncher\n"
    )
    given = (
        *FAKE,
        "--config-dir=mine",
        "-m",
        "batch_size=1,2",
        "hydra/launcher=other",
        "output_dir=s",
    )
    process = start(tmp_path, *given)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2, printed
    assert "leave it at basic" in printed
    assert not list(tmp_path.rglob("record.json"))
