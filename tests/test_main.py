"""The command line from end to end, on the scripted device: real processes, real files, simulated time."""

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from perfexp.__main__ import dispatch
from perfexp.devices import auto, lock
from perfexp.host import installation
from perfexp.main import main
from perfexp.plan import naming
from perfexp.plan.config import FORMAT
from perfexp.records.record import Record, Status, is_layers
from perfexp.records.sweep_record import Sweep

TWO_MS = ("model.base_seconds=0.002", "model.seconds_per_megapixel=0")
FAKE = ("model=fake", "gpu=fake", "tracking=none", "ttfp=false", "stopping=fixed")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs perfexp in a folder of its own: exit code, what it printed, and the records that it left."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments):
        code = main(arguments)
        printed = capsys.readouterr()
        records = [Record.load(file) for file in sorted(tmp_path.rglob("record.json"))]
        return code, printed.out + printed.err, records

    return go


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"], ["model=fake", "-h"]])
def test_help_is_printed_and_nothing_is_measured(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert dispatch(arguments) == 0
    assert capsys.readouterr().out.startswith("perfexp measures how fast")
    assert not list(tmp_path.iterdir())


def test_one_command_leaves_record_table_picture_and_report(run, tmp_path):
    code, printed, [record] = run(*FAKE, "output_dir=here")
    assert code == 0
    assert record.status is Status.OK
    names = {path.name for path in (tmp_path / "here").iterdir()}
    files = ("points.jsonl", "record.json", "environment.json", "run.log", "manifest.json")
    assert {"plan.yaml", "expected.json", *files} <= names
    assert {"fake_default_overall.csv", "report.md", "time.png"} <= names
    assert "simulated" in printed


def test_every_file_that_a_run_writes_is_in_its_manifest(run, tmp_path):
    run(*FAKE, "output_dir=here")
    listed = set(json.loads((tmp_path / "here" / "manifest.json").read_text())["files"])
    assert {path.name for path in (tmp_path / "here").iterdir()} == listed


def test_without_an_output_folder_a_run_gets_one_of_its_own(run, tmp_path):
    run(*FAKE)
    run(*FAKE)
    folders = list((tmp_path / "outputs").glob("*/*-fake-default-inference*"))
    assert len(folders) == 2


def test_sizes_and_batch_sizes_make_points_in_one_worker(run):
    code, _, [record] = run(*FAKE, "input_size=[32,64x96]", "batch_size=[1,4]", "mode=train_inference", "output_dir=x")
    assert code == 0
    assert [(p.key.phase, p.key.input_size, p.key.batch_size) for p in record.points] == [
        ("train", (32, 32), 1),
        ("inference", (32, 32), 1),
        ("train", (32, 32), 4),
        ("inference", (32, 32), 4),
        ("train", (64, 96), 1),
        ("inference", (64, 96), 1),
        ("train", (64, 96), 4),
        ("inference", (64, 96), 4),
    ]
    assert Path("x/run.log").read_text().count("perfexp.worker.entry") == 1


def test_the_scripted_truth_is_what_is_reported(run):
    _, _, [record] = run(
        *FAKE, "model.noise=0", "model.base_seconds=0.002", "model.seconds_per_megapixel=0", "output_dir=x"
    )
    point = record.points[0]
    assert point.find_series("device").measured == pytest.approx([2e-3] * 20, rel=1e-6)
    assert point.facts["bound_by"] == "gpu"


def test_a_training_step_is_taken_apart(run):
    _, _, [record] = run(*FAKE, "mode=train", "model.noise=0", "data.num_samples=640", "batch_size=64", "output_dir=x")
    point = record.points[0]
    assert [s.name for s in point.series if s.name.startswith("phase/")] == [
        "phase/data",
        "phase/forward",
        "phase/loss",
        "phase/backward",
        "phase/optimizer",
    ]
    assert point.metric("phases_over_whole").value == pytest.approx(1, abs=0.01)
    epoch = point.metric("epoch_seconds")
    step = point.find_series("throughput").measured
    assert epoch.estimated
    assert epoch.value == pytest.approx(10 * sum(step) / len(step), rel=1e-3)


def test_epochs_are_whole_passes_with_their_runtime(run):
    _, _, [record] = run(*FAKE, "mode=train", "epochs=2", "data.num_samples=640", "batch_size=64", "output_dir=x")
    point = record.points[0]
    assert len(point.find_series("throughput").samples) == 20  # the scripted device waits for no step
    epochs = point.find_series("epoch").samples
    assert point.metric("total_runtime_seconds").value == pytest.approx(sum(epochs))
    assert not point.metric("epoch_seconds").estimated


def test_time_to_first_prediction_is_taken_in_a_process_of_its_own(run):
    _, _, [record] = run(*FAKE, "ttfp=true", "output_dir=x")
    point = next(point for point in record.points if point.key.phase == "ttfp")
    parts = {series.name for series in point.series}
    assert {"ttfp/imports", "ttfp/context", "ttfp/weights", "ttfp/first_call", "ttfp/second_call"} <= parts
    assert Path("x/run.log").read_text().count("--what=ttfp") == 1


def test_a_size_that_a_model_does_not_take_is_unsupported_in_the_first_prediction_too(run):
    code, _, [record] = run("model=alexnet", "gpu=cpu", "input_size=16", "ttfp=true", "tracking=none", "output_dir=x")
    assert (code, len(record.points)) == (1, 2)
    for point in record.points:
        assert point.status is Status.UNSUPPORTED
        assert "can't take 1 × 3 × 16 × 16" in point.error


def test_replicates_are_fresh_processes(run):
    _, _, [record] = run(*FAKE, "replicate=3", "output_dir=x")
    assert [point.key.replicate for point in record.points] == [0, 1, 2]
    assert Path("x/run.log").read_text().count("perfexp.worker.entry") == 3


def test_a_point_without_memory_is_a_result_and_the_next_one_goes_on(run):
    code, printed, [record] = run(*FAKE, "batch_size=[1,100,2]", "model.faults.oom=1000000", "output_dir=x")
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.OOM, Status.OK]
    assert "scripted" in printed


def test_a_size_that_the_model_can_not_take_is_unsupported_and_the_sweep_goes_on(run):
    code, printed, [record] = run(*FAKE, "input_size=[16,64]", "model.smallest=32", "output_dir=x")
    assert code == 1
    assert [point.status for point in record.points] == [Status.UNSUPPORTED, Status.OK]
    assert "at least 32" in printed


def test_repeating_the_command_measures_only_what_is_missing(run):
    run(*FAKE, "batch_size=[1,2]", "output_dir=x")
    lines = Path("x/points.jsonl").read_bytes().splitlines(keepends=True)
    Path("x/points.jsonl").write_bytes(lines[0])
    code, _, [record] = run(*FAKE, "batch_size=[1,2]", "output_dir=x")
    assert code == 0
    assert Path("x/points.jsonl").read_bytes().splitlines(keepends=True)[0] == lines[0]
    assert len(record.points) == 2


def test_a_record_keeps_its_identity_when_the_command_is_repeated(run):
    _, _, [before] = run(*FAKE, "output_dir=x")
    _, _, [after] = run(*FAKE, "output_dir=x")
    assert before.uid == after.uid


def test_another_plan_in_the_same_folder_is_refused_with_what_differs(run):
    run(*FAKE, "output_dir=x")
    code, printed, [record] = run(*FAKE, "output_dir=x", "batch_size=8")
    assert code == 2
    assert "batch_size: 1 → 8" in printed
    assert record.plan["batch_size"] == 1


def test_where_output_goes_is_not_part_of_the_plan(run):
    _, _, [one] = run(*FAKE, "output_dir=a")
    _, _, [_, two] = run(*FAKE, "output_dir=b", "quiet=true")
    assert one.plan_hash == two.plan_hash


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("model=resnet51", "resnet50"),
        ("modle=resnet50", "model"),
        ("batchsize=4", "batch_size"),
        ("stopping.epsilonn=1", "epsilon"),
        ("precision=fp8", "fp32"),
        ("experiment=ful", "full"),
        ("stopping.epsilon=abc", "stopping.epsilon"),
        ("seed=x", "seed"),
        ("input_size=0", "input_size=0"),
        ("batch_size=[1,0]", "batch_size=0"),
        ("batch_size=[1", "batch_size=[1"),
        ("percentiles=[50,100]", "percentiles"),
        ("epochs=1", "mode=train"),
        ("replicate=0", "replicate=0"),
        ("model._target_=os.system", "_target_"),
        ("+model.kwargs={_target_:os.system}", "_target_"),
        ("+novelty=1", "novelty"),
        ("execution.cuda_graph=maybe", "execution.cuda_graph"),
        ("execution.threads=0", "execution.threads=0"),
        ("stopping.epsilon=0", "epsilon=0"),
        ("+probe.x=${oc.decode:'{_target_: os.system}'}", "_target_"),
        ("--experimental-rerun=x.pickle", "pickle"),
    ],
)
def test_a_wrong_word_is_told_in_one_message_with_what_is_possible(run, argument, told, tmp_path):
    code, printed, records = run("gpu=fake", "model=fake", "tracking=none", argument)
    assert code == 2
    assert told in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) <= 3
    assert records == []
    assert not list(tmp_path.rglob("plan.yaml"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *((f"hydra.{setting}", f"hydra.{setting.partition('=')[0]} is not accepted") for setting in (
            "run.dir=h", "run.dir=/proc/x", "sweep.dir=h", "sweep.subdir=h", "output_subdir=h", "job.chdir=true",
            "verbose=true", "job_logging={version:7}", "sweeper=x",
        )),
        ("hydra=null", "hydra is not accepted"),
        ("~hydra.sweep.dir", "hydra.sweep.dir is not accepted"),
        ("-m hydra.sweeper.params={seed:'1,2'}", "-m KEY=A,B"),
        ("-m seed=1,2 hydra.sweeper.max_batch_size=0", "hydra.sweeper.max_batch_size=0"),
        ("-m batch_size=glob(*)", "'batch_size=glob(*)' matches no value"),
        ("-m model=glob(zz*)", "'model=glob(zz*)' matches no value"),
        ("-m seed=range(3,1)", "'seed=range(3,1)' matches no value"),
        ("batch_size=glob(*)", "batch_size=glob(*)"),
        ("-m --cfg job", "-m and --cfg exclude one another"),
        ("--cfg job -p nope", "'nope' not found"),
        ("--package mode", "--package is for --cfg"),
        ("--resolve", "--resolve is for --cfg"),
        ("--cfg nope", "invalid choice: 'nope'"),
        ("--nope", "--nope"),
        ("--shell-completion", "--shell-completion"),
    ],
)  # fmt: skip
def test_what_hydra_does_not_take_or_perfexp_would_ignore_is_refused_in_one_line(run, arguments, told, tmp_path):
    code, printed, _ = run(*FAKE, *arguments.split())
    assert code == 2
    [line] = printed.splitlines()
    assert line.startswith("error: ")
    assert "unexpected" not in line
    assert told in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--cfg hydra", "sweeper:"),
        ("--cfg job -p mode", "name: inference"),
        ("--shell-completion install=bash", "hydra_bash_completion perfexp"),
    ],
)
def test_flags_that_print_measure_nothing(run, arguments, told, tmp_path):
    code, printed, _ = run(*FAKE, *arguments.split())
    assert code == 0
    assert told in printed
    assert not list(tmp_path.iterdir())


def test_a_model_that_needs_a_name_says_so(run):
    code, printed, _ = run("model=torchvision", "gpu=fake", "tracking=none")
    assert code == 2
    assert "model.name" in printed


def test_a_device_that_the_job_does_not_have_is_named_with_the_one_it_has(run):
    code, printed, _ = run("model=fake", "gpu=cpu", "tracking=none")
    assert code == 2
    assert "gpu=fake" in printed


@pytest.mark.parametrize("arguments", [FAKE, ("status",), ("ui",)])
def test_a_current_folder_that_has_been_deleted_is_said_in_one_line(arguments, tmp_path):
    code = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
        "from perfexp.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout + done.stderr == (
        "error: The current folder has been deleted: change to one that exists (cd DIR).\n"
    )


def test_a_folder_that_can_not_be_written_is_told(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, printed, _ = run(*FAKE, "output_dir=file/below")
    assert code == 2
    assert "output_dir" in printed
    assert "Traceback" not in printed


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told(run, tmp_path):
    (tmp_path / "ro").mkdir()
    (tmp_path / "ro").chmod(stat.S_IRUSR | stat.S_IXUSR)
    code, printed, _ = run(*FAKE, "output_dir=ro/x")
    assert code == 2
    assert "can't be written" in printed


def test_a_sweep_is_a_run_for_each_combination_and_a_summary(run, tmp_path):
    code, printed, records = run(*FAKE, "-m", "batch_size=1,2", "precision=fp32,bf16", "output_dir=sweep")
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
    assert {"sweep.json", "sweep.csv", "sweep.png"} <= {path.name for path in (tmp_path / "sweep").iterdir()}
    assert "4 runs" in printed


@pytest.mark.slow
def test_a_run_of_a_sweep_that_fails_harms_no_other(run, tmp_path):
    code, _, records = run(*FAKE, "-m", "batch_size=1,100,2", "model.faults.oom=1000000", "output_dir=s")
    assert code == 1
    assert [r.status for r in sorted(records, key=lambda r: r.sweep.job)] == [Status.OK, Status.OOM, Status.OK]
    assert Sweep.load(tmp_path / "s").children[1].status is Status.OOM


@pytest.mark.slow
def test_a_run_of_a_sweep_that_is_refused_is_listed_with_its_reason(run, tmp_path):
    code, _, _ = run(*FAKE, "-m", "input_size=32,0,64", "output_dir=s")
    assert code == 2
    children = Sweep.load(tmp_path / "s").children
    assert [child.status for child in children] == [Status.OK, Status.FAILED, Status.OK]
    assert "no pixels" in children[1].error


@pytest.mark.slow
def test_the_command_in_a_record_repeats_the_run(run, tmp_path):
    _, _, records = run(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    last = next(record for record in records if record.plan["batch_size"] == 2)
    code, _, _ = run(*last.command, "output_dir=again")
    assert code == 0
    assert Record.load(tmp_path / "again").plan_hash == last.plan_hash


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ((*FAKE, "-m", "batch_size=1,2", "output_dir=s"), "s/1_2"),
        ((*FAKE, "experiment=all", "model=fake", "output_dir=s"), "s/1_inference"),
        ((*FAKE, "-m", "experiment=quick", "batch_size=1,2", "sweep.num_sizes=2"), "outputs/2_quick"),
        ((*FAKE, "output_dir=s"), "s"),
    ],
)
def test_the_command_in_a_report_measures_the_same_into_a_new_folder(run, tmp_path, arguments, folder):
    run(*arguments)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.*")}
    [report] = list((tmp_path / folder).rglob("report.md"))[:1]
    block = report.read_text().rpartition("## To measure it again\n\n")[2].split("\n\n")[0]
    command = "\n".join(line.removeprefix("    ") for line in block.splitlines() if line.startswith("    "))
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
    assert [point.key.input_size[0] for point in quick.points if point.key.phase == "inference"] == [224, 368, 512]


@pytest.mark.slow
def test_another_plan_for_the_same_combination_gets_a_folder_of_its_own(run, tmp_path):
    stage = tmp_path / "outputs" / "1_sanity"
    command = (*FAKE, "experiment=sanity")
    for extra in ((), ("batch_size=2",), ("batch_size=3",), ("batch_size=2",), ()):
        assert run(*command, *extra)[0] == 0
    found = {path.name: Record.load(path).plan["batch_size"] for path in sorted(stage.iterdir())}
    assert found == {"fake_default_fake": 1, "fake_default_fake-2": 2, "fake_default_fake-3": 3}
    assert "1_sanity/fake_default_fake-2" in run(*command, "batch_size=2")[1]
    code, text, _ = run(*FAKE, "experiment=quick", "sweep.num_sizes=2")
    assert code == 0
    assert "warning" not in text


@pytest.mark.slow
def test_overwrite_replaces_a_run_and_nothing_else(run, tmp_path):
    folder = tmp_path / "x"
    run(*FAKE, "output_dir=x")
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
    assert Record.load(folder).points[0].started > after.points[0].started, "the same plan is measured anew, too"


@pytest.mark.slow
def test_overwrite_of_a_run_that_is_refused_keeps_what_was_there(run, tmp_path):
    folder = tmp_path / "x"
    run(*FAKE, "output_dir=x")
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "run.log"}
    assert run("--overwrite", *FAKE, "gpu=h100", "output_dir=x")[0] == 2
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "run.log"} == before
    code, text, _ = run(*FAKE, "output_dir=x")
    assert code == 0
    assert "Nothing is left to measure" in text


@pytest.mark.slow
def test_a_sweep_of_a_stage_whose_folders_have_numbers_is_resumed(run, tmp_path):
    command = (*FAKE, "-m", "experiment=sanity", "mode=inference,train")
    run(*command)
    run(*command, "input_size=64", "output_dir=second")
    again = tmp_path / "outputs" / "1_sanity" / "fake_default_fake_mode-train-2"
    (again / "points.jsonl").unlink()
    (again / "record.json").unlink()
    code, text, _ = run("resume=second")
    assert code == 0, text
    assert Record.load(again).plan["input_size"] == 64
    assert "2 of 2 runs ended\n" in text
    names = sorted(path.name for path in again.parent.iterdir())
    assert names == [f"fake_default_fake_mode-{mode}{end}" for mode in ("inference", "train") for end in ("", "-2")]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_two_runs_of_a_sweep_never_share_a_folder(run, tmp_path, monkeypatch, flags):
    """As with gpu=auto,cpu on a processor: both are called `cpu`."""
    monkeypatch.setattr("perfexp.plan.naming._device", lambda gpu, index, folders: "same")
    (tmp_path / "mine" / "gpu").mkdir(parents=True)
    shutil.copy(installation.conf_dir() / "gpu" / "fake.yaml", tmp_path / "mine" / "gpu" / "other.yaml")
    sweep = ("-m", "experiment=sanity", "gpu=fake,other", "replicate=2", "--config-dir=mine")
    assert run(*flags, "model=fake", *(text for text in FAKE if text[:3] not in ("gpu", "mod")), *sweep)[0] == 0
    assert {path.parent.name for path in tmp_path.rglob("plan.yaml")} == {"fake_default_same", "fake_default_same-2"}


@pytest.mark.slow
def test_a_stage_whose_earlier_stage_failed_warns_and_says_why(run, tmp_path):
    fake = ("model=fake", "gpu=fake", "tracking=none", "ttfp=false", "stopping=fixed")
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
    assert "warning" not in text


@pytest.mark.slow
def test_full_is_a_hundred_sizes_from_224_to_512(run):
    _, _, [record] = run("model=fake", "gpu=fake", "tracking=none", "ttfp=false", "experiment=full", "stopping=fixed")
    timed = [point for point in record.points if not is_layers(point.key)]
    sides = [point.key.input_size[0] for point in timed]
    assert (len(sides), sides[0], sides[-1]) == (100, 224, 512)
    assert len(record.points) == 200
    assert all(point.metric("layers/closure") and point.metric("energy/per_call_joules") for point in timed)


@pytest.mark.slow
def test_a_stage_swept_over_models_has_a_folder_for_each(run, tmp_path):
    run(*FAKE, "-m", "experiment=sanity", "model.name=a,b")
    assert {path.name for path in (tmp_path / "outputs/1_sanity").iterdir()} == {"a_default_fake", "b_default_fake"}


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "perfexp", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def worker_of(process):
    [worker] = psutil.Process(process.pid).children()
    return worker.pid


def points_in(folder):
    file = folder / "points.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def sizes(count):
    return f"input_size=[{','.join(str(32 + number) for number in range(count))}]"


LONG = (*FAKE, sizes(400), "stopping.measure=2000", "output_dir=x")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_keeps_what_is_finished_and_can_go_on(tmp_path, number, run):
    process = start(tmp_path, *LONG)
    wait_for(lambda: points_in(tmp_path / "x") >= 2)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    record = Record.load(tmp_path / "x")
    statuses = [point.status for point in record.points]
    assert statuses.count(Status.OK) >= 2
    assert set(statuses) == {Status.OK, Status.INTERRUPTED}
    assert record.status is Status.INTERRUPTED
    assert "Traceback" not in printed
    assert "to continue: perfexp resume=x\n" in printed


@pytest.mark.slow
def test_a_sweep_whose_terminal_goes_away_keeps_what_is_finished(tmp_path):
    process = start(tmp_path, *LONG[:-1], "-m", "batch_size=1,2", "output_dir=s")
    wait_for(lambda: points_in(tmp_path / "s" / "0_1") >= 2)
    process.send_signal(signal.SIGHUP)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    assert "to continue: perfexp resume=" in printed
    assert Sweep.load(tmp_path / "s").children[0].status is Status.INTERRUPTED


@pytest.mark.slow
def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path):
    ignored = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = ["-m", "perfexp", *FAKE, sizes(40), "stopping.measure=500", "output_dir=x"]
    process = subprocess.Popen(
        [sys.executable, "-c", ignored, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    )
    wait_for(lambda: points_in(tmp_path / "x") >= 1)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 0
    assert Record.load(tmp_path / "x").status is Status.OK


@pytest.mark.slow
@pytest.mark.parametrize("sweep", [(), ("-m", "batch_size=1,2")])
def test_a_folder_that_is_deleted_while_it_is_measured_into_is_named(tmp_path, sweep):
    process = start(tmp_path, *FAKE, sizes(30), "stopping.measure=2000", "output_dir=x", *sweep)
    folder = tmp_path / "x" / "0_1" if sweep else tmp_path / "x"
    wait_for(lambda: points_in(folder) >= 1)
    shutil.rmtree(tmp_path / "x")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1, printed
    told = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert f"The output folder {folder} is gone" in told[0]
    assert "Traceback" not in printed
    assert len(told) == 1 or sweep


def test_a_folder_that_is_gone_is_what_keeps_a_worker_from_starting(run, tmp_path, monkeypatch):
    from perfexp.orchestration import supervisor

    begin = supervisor.WorkerProcess

    def gone(command, log):
        shutil.rmtree(log.parent)
        return begin(command, log)

    monkeypatch.setattr(supervisor, "WorkerProcess", gone)
    code, printed, _ = run(*FAKE, "output_dir=x", "quiet=true")
    assert code == 1
    [line] = printed.splitlines()
    assert f"The output folder {tmp_path / 'x'} is gone" in line


@pytest.mark.slow
def test_a_killed_worker_costs_one_point_at_most_and_another_takes_the_rest(tmp_path):
    process = start(tmp_path, *FAKE, sizes(60), "stopping.measure=4000", "output_dir=x")
    wait_for(lambda: points_in(tmp_path / "x") >= 2)
    os.kill(worker_of(process), signal.SIGKILL)
    printed, _ = process.communicate(timeout=120)
    statuses = [point.status for point in Record.load(tmp_path / "x").points]
    killed = statuses.count(Status.KILLED)  # none, where the signal came while the second one was being kept
    assert killed <= 1
    assert process.returncode == killed, printed
    assert statuses.count(Status.OK) == len(statuses) - killed
    assert (tmp_path / "x" / "run.log").read_text().count("perfexp.worker.entry") == 2


def test_a_worker_does_not_outlive_its_parent(tmp_path):
    process = start(tmp_path, *LONG)
    wait_for(lambda: points_in(tmp_path / "x") >= 1)
    worker = worker_of(process)
    process.kill()
    process.wait()
    wait_for(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)
    process.stdout.close()


def test_a_plan_that_was_changed_on_disk_is_not_run(tmp_path):
    from perfexp.worker.entry import main as worker

    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"model": {"_target_": "os.system"}}))
    assert worker([str(tmp_path), "--plan-sha256", "0" * 64]) == 2


def test_the_parent_never_imports_torch(tmp_path):
    code = (
        "import sys; from perfexp.main import main; "
        f"main([{', '.join(map(repr, (*FAKE, 'output_dir=x')))}]); "
        "sys.exit(99 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_scripted_worker_starts_without_torch(tmp_path):
    code = (
        "import sys\n"
        "class Wall:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch': raise ImportError('no torch here')\n"
        "sys.meta_path.insert(0, Wall())\n"
        "from perfexp.worker.entry import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    assert main([*FAKE, f"output_dir={tmp_path / 'x'}"]) == 0
    (tmp_path / "x" / "points.jsonl").unlink()
    digest = hashlib.sha256((tmp_path / "x" / "plan.yaml").read_bytes()).hexdigest()
    command = [sys.executable, "-c", code, str(tmp_path / "x"), "--plan-sha256", digest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_full_disk_is_told_and_loses_no_finished_point(tmp_path):
    """A limit on the size of files stands for the full disk: writing fails in the same way, in the worker too."""
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from perfexp.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = [*FAKE, sizes(20), "output_dir=x"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "repeat the command" in done.stderr
    assert "Traceback" not in done.stderr
    finished = points_in(tmp_path / "x")
    assert finished >= 1
    assert main([*arguments[:-1], f"output_dir={tmp_path / 'x'}"]) == 0
    record = Record.load(tmp_path / "x")
    assert [point.status for point in record.points] == [Status.OK] * 20


@pytest.mark.slow
def test_training_on_photographs_learns_and_reports_its_accuracy(run, photographs):
    code, _, [record] = run(
        "model=resnet18",
        "data=images",
        f"data.root={photographs}",
        "data.workers=1",
        "mode=train",
        "epochs=20",
        "mode.train.optimizer.lr=0.001",
        "execution.threads=1",
        "batch_size=4",
        "input_size=64",
        "stopping=fixed",
        "tracking=none",
        "output_dir=x",
    )
    assert code == 0
    point = record.points[0]
    assert len(point.find_series("epoch").samples) == 20
    assert point.metric("accuracy").value > 0.8  # two pictures that look nothing like each other
    assert 0 < point.metric("data_share").value < 1


def test_what_failed_is_measured_again_and_what_is_known_is_not(run, tmp_path):
    from perfexp.records.record import point_to_line, read_points

    run(*FAKE, "batch_size=[1,2,100]", "model.faults.oom=1000000", "output_dir=x")
    file = tmp_path / "x" / "points.jsonl"
    one, two, oom = read_points(file)
    one.status = Status.FAILED
    file.write_bytes(b"".join(map(point_to_line, (one, two, oom))))
    _, _, [record] = run(*FAKE, "batch_size=[1,2,100]", "model.faults.oom=1000000", "output_dir=x")
    assert [point.status for point in record.points] == [Status.OK, Status.OK, Status.OOM]
    assert record.points[0].started != one.started
    assert record.points[1].started == two.started
    assert record.points[2].started == oom.started


def test_a_repetition_with_nothing_left_says_so_and_keeps_the_times(run):
    _, _, [before] = run(*FAKE, "output_dir=x")
    code, printed, [after] = run(*FAKE, "output_dir=x")
    assert code == 0
    assert "Nothing is left to measure" in printed
    assert (after.started, after.ended) == (before.started, before.ended)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statuss"], "'statuss' is neither a command nor KEY=VALUE. Did you mean status"),
        ([*FAKE, "resnet18"], "'resnet18' is neither a command nor KEY=VALUE. Possible: benchmark, "),
        (["-m", "modle"], "'modle' is neither a command nor KEY=VALUE"),
        (["--config-dir", "mine", "list", "models"], "'list' is a command, and comes first: perfexp list …"),
        (["--config-dir=mine", "status"], "'status' is a command, and comes first"),
        ([*FAKE, "batch_size=1,2"], "Several values are a sweep: add -m; or one list: KEY=[A,B]"),
        ([*FAKE, "percentiles=50"], "percentiles is a list, also of one value: percentiles=[…]."),
        (["model=squeezenet1_1"], "For any other model of torchvision: model=torchvision model.name=NAME."),
        ([*FAKE, "stopping.measure=99999999999"], "more than 100,000,000: every time is kept"),
    ],
)
def test_words_and_values_that_are_none_are_told_with_what_was_meant(run, tmp_path, arguments, said):
    (tmp_path / "mine").mkdir()
    code, printed, records = run(*arguments)
    assert (code, records) == (2, [])
    assert said in printed


def test_a_disk_that_can_not_be_written_is_told_in_one_line(run, monkeypatch):
    from perfexp.orchestration import job

    def refuse(assignment, console):
        raise OSError(errno.EROFS, "Read-only file system", "x/run.log")

    monkeypatch.setattr(job, "run", refuse)
    code, printed, _ = run(*FAKE, "output_dir=x")
    assert code == 1
    assert printed.startswith("error: Read-only file system: x/run.log. ")
    assert len(printed.splitlines()) == 1


def test_a_file_of_configuration_that_is_no_yaml_is_named_with_the_line(run, tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "tiny.yaml").write_text("name: tiny\nbad: [1, 2\nworse: 3\n")
    code, printed, _ = run("--config-dir", str(tmp_path / "mine"), "model=tiny", "gpu=fake")
    assert code == 2
    assert "A configuration file is not YAML: " in printed
    assert "tiny.yaml, line 3: " in printed
    assert "Traceback" not in printed


def test_points_of_another_environment_are_not_mixed_in(run, tmp_path):
    run(*FAKE, "batch_size=[1,2]", "output_dir=x")
    lines = (tmp_path / "x/points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x/points.jsonl").write_bytes(lines[0])
    (tmp_path / "x/record.json").unlink()
    file = tmp_path / "x/environment.json"
    file.write_text(file.read_text().replace('"scripted device"', '"another device"'))
    code, printed, _ = run(*FAKE, "batch_size=[1,2]", "output_dir=x")
    assert code == 2
    assert "another device → scripted device" in printed


@pytest.mark.slow
def test_two_perfexps_do_not_measure_into_one_folder(tmp_path, run):
    process = start(tmp_path, *LONG)
    wait_for(lambda: points_in(tmp_path / "x") >= 1)
    code, printed, _ = run(*LONG)
    assert code == 2
    assert "Another perfexp is measuring" in printed
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.parametrize("setting", ["stopping.measure=0", "stopping.measure=-3", "stopping.warmup=-1"])
def test_a_measurement_of_nothing_is_refused(run, setting):
    code, printed, records = run(*FAKE, setting)
    assert code == 2
    assert "at least" in printed
    assert records == []


def test_a_password_is_not_written_anywhere(run, tmp_path):
    secret = "tracking.uri='http://somebody:s3cr3t:p@ss@127.0.0.1:9'"
    settings = ("model=fake", "gpu=fake", "ttfp=false", "stopping=fixed", "output_dir=x")
    code, printed, records = run(*settings, secret.replace("t:p", "t/p"))  # no URL: a slash ends the name of a server
    assert (code, records) == (2, [])
    assert "s3cr3t" not in printed
    code, printed, [record] = run(*settings, "tracking.request_timeout_seconds=1", secret)
    assert code == 3
    assert "perfexp log" in printed  # the server does not answer; how to send it later
    assert "s3cr3t" not in printed
    for file in (tmp_path / "x").iterdir():
        assert b"s3cr3t" not in file.read_bytes(), file.name
    assert record.status is Status.OK


@pytest.mark.slow
def test_a_batch_larger_than_the_data_costs_its_point_only(run, photographs):
    settings = ("model=alexnet", "data=images", f"data.root={photographs}", "data.workers=0", "input_size=64")
    code, printed, [record] = run(
        *settings, "batch_size=[2,100]", "stopping=fixed", "ttfp=false", "tracking=none", "output_dir=x"
    )
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.UNSUPPORTED]
    assert "fewer than the 100" in printed


@pytest.mark.slow
def test_a_hanging_worker_is_ended_and_another_takes_the_rest(run):
    code, _, [record] = run(
        *FAKE, "batch_size=[1,100,2]", "model.faults.hang=1000000", "timeout_seconds=5", "output_dir=x"
    )
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.TIMEOUT, Status.OK]
    assert "timeout_seconds" in record.points[1].error


def test_a_device_that_is_lost_costs_one_point_and_a_new_worker_takes_the_rest(run, tmp_path):
    code, _, [record] = run(*FAKE, "batch_size=[1,100,2]", "model.faults.lost=1000000", "output_dir=x")
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.FAILED, Status.OK]
    assert (tmp_path / "x" / "run.log").read_text().count("-m perfexp.worker.entry") == 2


@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [("kill", Status.KILLED, "SIGKILL"), ("crash", Status.KILLED, "SIGSEGV"), ("fail", Status.FAILED, "RuntimeError")],
)
def test_what_goes_wrong_in_one_point_is_its_status_and_the_others_are_measured(run, fault, status, told):
    code, _, [record] = run(*FAKE, "batch_size=[1,100,2]", f"model.faults.{fault}=1000000", "output_dir=x")
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, status, Status.OK]
    assert told in record.points[1].error


def test_where_memory_runs_out_the_batch_that_fits_is_told(run):
    _, printed, [record] = run(*FAKE, "batch_size=100", "model.faults.oom=1300000", "output_dir=x")
    assert record.points[0].metric("batch_that_fits").value == 25
    assert "A batch of 25 fits." in printed


def test_where_not_even_one_sample_fits_that_is_told(run):
    _, _, [record] = run(*FAKE, "batch_size=4", "model.faults.oom=100", "output_dir=x")
    assert record.points[0].metric("batch_that_fits").value is None
    assert "No smaller batch fits." in record.points[0].error


def test_what_is_larger_than_what_had_no_memory_is_not_tried(run):
    given = ("batch_size=[1,30,40]", "input_size=[224,256]", "model.faults.oom=1500000")
    _, _, [record] = run(*FAKE, *given, "sweep.skip_larger=true", "output_dir=x")
    statuses = {(point.key.batch_size, point.key.size_label): point.status.value for point in record.points}
    assert statuses == {
        (1, "224"): "ok",
        (30, "224"): "oom",
        (40, "224"): "oom_predicted",
        (1, "256"): "ok",
        (30, "256"): "oom_predicted",
        (40, "256"): "oom_predicted",
    }


def test_a_run_is_resumed_by_its_folder(run, tmp_path):
    run(*FAKE, "batch_size=[1,2,100]", "model.faults.oom=1000000", "output_dir=x")
    lines = (tmp_path / "x" / "points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x" / "points.jsonl").write_bytes(lines[0] + lines[1][:40])  # killed while it wrote
    (tmp_path / "x" / "record.json").unlink()
    code, _, [record] = run("resume=x")
    assert code == 1
    assert (tmp_path / "x" / "points.jsonl").read_bytes().startswith(lines[0])
    assert [point.status for point in record.points] == [Status.OK, Status.OK, Status.OOM]


@pytest.mark.parametrize("content", ['{"schema_version": 99}', "{", '{"photos": []}'])
def test_a_record_that_cannot_be_read_is_not_overwritten(run, tmp_path, content):
    run(*FAKE, "output_dir=x")
    (tmp_path / "x" / "record.json").write_text(content)
    (tmp_path / "x" / "points.jsonl").unlink()
    code = main(["resume=x"])
    assert code == 2
    assert (tmp_path / "x" / "record.json").read_text() == content


def test_results_that_only_the_record_still_has_are_not_measured_again(run, tmp_path):
    _, _, [before] = run(*FAKE, "batch_size=[1,2]", "probes.layers=true", "output_dir=x")
    points = tmp_path / "x" / "points.jsonl"
    points.write_bytes(points.read_bytes().splitlines(keepends=True)[0])
    code, printed, [after] = run("resume=x")
    assert code == 0
    assert "Nothing is left to measure" in printed
    assert after.points == before.points


@pytest.mark.slow
def test_a_sweep_is_resumed_by_its_folder_and_stays_the_same_sweep(run, tmp_path):
    run(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    before = Sweep.load(tmp_path / "s")
    points = (tmp_path / "s" / "1_2" / "points.jsonl").read_bytes()
    for name in ("points.jsonl", "record.json"):
        (tmp_path / "s" / "0_1" / name).unlink()
    code, _, records = run("resume=s")
    after = Sweep.load(tmp_path / "s")
    assert code == 0
    assert (after.uid, len(after.children)) == (before.uid, 2)
    assert {record.sweep.uid for record in records} == {before.uid}
    assert (tmp_path / "s" / "1_2" / "points.jsonl").read_bytes() == points


@pytest.mark.slow
def test_another_sweep_in_the_same_folder_is_refused(run):
    run(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    code, printed, _ = run(*FAKE, "-m", "batch_size=1,4", "output_dir=s")
    assert code == 2
    assert "another sweep" in printed


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["model=fake", "--config-dir=/somewhere"], "--config-dir=/somewhere"),
        (["model=fake", "hydra.searchpath=[/somewhere]"], "hydra.searchpath"),
        (["model=fake", "profiler=nsys", "profiler.tool=sh"], "profiler.tool"),
        (["model=fake", "profiler=nsys", "profiler.options=[-x]"], "profiler.options"),
        (["model=fake", "model._target_=os.system"], "_target_"),
        (["model=fake", "seed=${oc.env:HOME}"], "oc.env"),
        (None, "its plan.yaml has no command"),
    ],
)
def test_a_folder_from_elsewhere_chooses_no_code(run, tmp_path, command, told):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "plan.yaml").write_text(
        yaml.safe_dump({"format": FORMAT} | ({"command": command} if command else {}))
    )
    code, printed, _ = run("resume=x")
    assert code == 2
    assert told in printed


def test_nothing_to_resume_is_told(run):
    code, printed, _ = run("resume=nowhere")
    assert code == 2
    assert "no run (plan.yaml) and no sweep" in printed


@pytest.mark.slow
def test_replicates_of_a_sweep_are_interleaved_in_a_seeded_order(run):
    code, _, records = run(*FAKE, "-m", "batch_size=1,2,4", "replicate=3", "output_dir=s")
    points = sorted((point for record in records for point in record.points), key=lambda point: point.started)
    rounds = [[point.key for point in points[index : index + 3]] for index in (0, 3, 6)]
    assert code == 0
    assert [{key.replicate for key in keys} for keys in rounds] == [{0}, {1}, {2}]
    assert all({key.batch_size for key in keys} == {1, 2, 4} for keys in rounds)
    assert len({tuple(key.batch_size for key in keys) for keys in rounds}) > 1


def test_an_experiment_may_sweep_by_itself_and_the_command_line_wins(run, tmp_path):
    code, printed, records = run("experiment=all", "gpu=fake", "model=fake", "tracking=none", "output_dir=s")
    assert code == 0
    assert sorted(record.plan["mode"]["name"] for record in records) == ["inference", "train"]
    assert "2 of 2 runs ended" in printed


LOCKED = (*FAKE, "+gpu.script.lock_name=perfexp-test", "output_dir=x")


def test_a_device_in_use_is_refused_where_that_is_wanted(run):
    with lock.held("perfexp-test", wait=False, purpose="something else", waiting=print):
        code, printed, records = run(*LOCKED, "device_lock=fail")
    assert code == 2
    assert f"process {os.getpid()} measures something else" in printed
    assert not records


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        ("model=fake", "gpu=h100"),
        ("-m", "model=fake", "gpu=h100", "batch_size=1,2"),
        ("-m", "model=fake", "gpu=h100", "batch_size=1,2", "replicate=2"),
        ("-m", "model=fake", "gpu=fake", "batch_size=0,-1"),
        ("model=resnet18", "gpu=cpu", "model.weights=nope.pth"),
        (*FAKE, "input_size=0"),
    ],
)
def test_what_the_user_has_to_fix_leaves_no_folder_and_promises_no_time(run, tmp_path, arguments, is_there):
    if is_there:
        (tmp_path / "x").mkdir()
    code, printed, _ = run(*arguments, "tracking=none", *(["output_dir=x"] if is_there else []))
    assert code == 2
    assert "measuring takes" not in printed
    assert list(tmp_path.rglob("*")) == ([tmp_path / "x"] if is_there else [])


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("", 0, ["fake · default · inference · fp32 · eager", "  1 point, about 32 s", "  into outputs/"]),
        ("quiet=true input_size=[64,96] gpu=cpu", 0, ["  2 points, about 32 s"]),
        ("-m batch_size=1,2", 0, ["sweep over batch_size", "  2 runs, 2 points, about 64 s", "  batch_size=2-fake-"]),
        ("-m batch_size=1,2 replicate=2 output_dir=s", 0, ["  2 runs, 4 points, about 2 min 08 s", "/s/"]),
        ("-m batch_size=range(1,31)", 0, ["  30 runs, 30 points, about 16 min 00 s"]),
        ("-m experiment=quick model.name=a,b", 0, ["  2 runs, 20 points", "outputs/2_quick/"]),
        ("stopping=fixed", 0, ["  1 point, time unknown"]),
        ("batch_size=0", 2, ["batch_size=0 is not a batch size"]),
        ("epochs=1", 2, ["add mode=train"]),
        ("-m batch_size=1,0", 2, ["batch_size=0 is not a batch size", "  1 run, 1 point"]),
        ("-m model=nope,fake", 2, ["model=nope"]),
    ],
)
def test_a_dry_run_says_what_would_be_measured_and_makes_nothing(run, tmp_path, arguments, code, told):
    ended, printed, _ = run("model=fake", "gpu=fake", "tracking=none", "--dry-run", *arguments.split())
    assert ended == code
    assert all(text in printed for text in told), printed
    assert ("Nothing has been measured." in printed) == any("point" in text for text in told)
    assert len(printed.splitlines()) < 7
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("product", "folder"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A10G", "NVIDIA-A10G"),
        ("cpu", "cpu"),
        (None, "auto"),
    ],
)
def test_the_folder_of_a_stage_names_the_device_that_auto_finds(run, monkeypatch, product, folder):
    monkeypatch.setattr(auto, "foreseen", lambda index: product)
    assert f"outputs/1_sanity/vgg16_default_{folder}/" in run("model=vgg16", "experiment=sanity", "--dry-run")[1]
    assert naming.child_folder(None, Path("s"), 3, {"gpu": "auto"}) == Path(f"s/3_{folder}")


def test_a_dry_run_counts_what_is_missing_and_changes_nothing(run, tmp_path):
    run(*FAKE, "-m", "batch_size=1,2", "output_dir=s")
    for name in ("points.jsonl", "record.json"):
        (tmp_path / "s" / "0_1" / name).unlink()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    code, printed, _ = run("resume=s", "--dry-run")
    assert code == 0
    assert "batch_size=1-fake-default-inference: 1 point" in printed
    assert "batch_size=2-fake-default-inference: nothing is left to measure" in printed
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    assert run(*FAKE, "batch_size=3", "output_dir=s/1_2", "--dry-run")[0] == 2


def test_a_refused_run_leaves_what_was_there_before(run, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "points.jsonl").write_text("")
    assert run("model=fake", "gpu=h100", "tracking=none", "output_dir=x")[0] == 2
    assert (tmp_path / "x" / "points.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tracking.uri=bogus://x", "sqlite:///FILE"),
        ("tracking.uri=''", "sqlite:///FILE"),
        ("tracking.deadline_seconds=nan", "positive"),
        ("tracking.request_timeout_seconds=-1", "positive"),
    ],
)
def test_a_tracking_store_that_cannot_be_is_refused_before_anything_is_measured(setting, message, tmp_path):
    command = [sys.executable, "-m", "perfexp", "model=fake", "gpu=fake", setting, "output_dir=x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_device_in_use_is_waited_for(tmp_path):
    with lock.held("perfexp-test", wait=False, purpose="something else", waiting=print):
        process = start(tmp_path, *LOCKED, "timeout_seconds=2")
        wait_for(lambda: psutil.Process(process.pid).children())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)  # longer than a worker may be silent: waiting is no hanging
        assert points_in(tmp_path / "x") == 0
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert points_in(tmp_path / "x") == 1


def test_a_folder_from_elsewhere_does_not_say_where_results_go(run, tmp_path):
    run(*FAKE, "output_dir=x")
    plan = yaml.safe_load((tmp_path / "x" / "plan.yaml").read_bytes())
    plan["command"] += ["tracking=mlflow", "tracking.uri=http://127.0.0.1:9/", "timeout_seconds=1e-9", "tracking=none"]
    (tmp_path / "x" / "plan.yaml").write_text(yaml.safe_dump(plan))
    code, printed, _ = run("resume=x")
    assert code == 0
    assert "127.0.0.1:9" not in printed


@pytest.mark.slow
def test_a_run_of_a_sweep_that_an_experiment_makes_is_resumed_alone(run, tmp_path):
    run("experiment=all", "gpu=fake", "model=fake", "tracking=none", "output_dir=s")
    sweep = (tmp_path / "s" / "sweep.json").read_bytes()
    folder = tmp_path / "s" / "0_train"
    (folder / "points.jsonl").unlink()
    code, _, records = run(f"resume={folder}")
    assert code == 0
    assert len(records) == 2
    assert (tmp_path / "s" / "sweep.json").read_bytes() == sweep
    assert not (folder / "sweep.json").exists()
    assert Record.load(folder).sweep.uid == Sweep.load(tmp_path / "s").uid


def test_groups_of_ones_own_are_named_again_to_resume_a_run(run, tmp_path):
    (tmp_path / "mine" / "stopping").mkdir(parents=True)
    (tmp_path / "mine" / "stopping" / "quickly.yaml").write_text(
        "_target_: perfexp.stopping.Fixed\nwarmup: 1\nmeasure: 6\n"
    )
    given = ("model=fake", "gpu=fake", "tracking=none", "ttfp=false", "stopping=quickly", "output_dir=x")
    assert run("--config-dir", "mine", *given)[0] == 0
    code, printed, _ = run("resume=x")
    assert code == 2
    assert "--config-dir=mine" in printed
    assert run("--config-dir=mine", "resume=x")[0] == 0
    assert run("resume=x", "--config-dir", "mine")[0] == 0


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
    given = (*FAKE, "--config-dir=mine", "-m", "batch_size=1,2", "hydra/launcher=other", "output_dir=s")
    process = start(tmp_path, *given)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2, printed
    assert "leave hydra/launcher at basic" in printed
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.slow
def test_points_after_a_refusal_say_why_they_were_not_tried(run, photographs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(photographs, broken)
    given = ("model=resnet18", "gpu=cpu", "data=images", f"data.root={broken}", "data.workers=0", "tracking=none")
    next(broken.rglob("*.jpg")).write_bytes(b"no picture")
    code, _, [record] = run(
        *given, "ttfp=false", "stopping=fixed", "input_size=[32,48]", "batch_size=12", "stopping.measure=1",
        "stopping.warmup=0", "output_dir=x",
    )  # fmt: skip
    assert code == 2
    assert [point.status for point in record.points] == [Status.FAILED, Status.INTERRUPTED]
    assert "can't be read" in record.points[0].error
    assert record.points[1].error.startswith("not tried: ")


def test_doubts_of_an_earlier_worker_stay(run, tmp_path):
    run(*FAKE, "batch_size=[1,2]", "output_dir=x")
    environment = json.loads((tmp_path / "x" / "environment.json").read_bytes())
    environment["doubts"].append({"code": "shared_device", "detail": "seen before", "remedy": ""})
    (tmp_path / "x" / "environment.json").write_text(json.dumps(environment))
    lines = (tmp_path / "x" / "points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x" / "points.jsonl").write_bytes(lines[0])
    _, _, [record] = run("resume=x")
    assert [doubt.code for doubt in record.doubts] == ["simulated", "shared_device"]


def test_a_first_prediction_of_another_environment_is_not_mixed_in(run, tmp_path):
    run("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "output_dir=x")
    environment = json.loads((tmp_path / "x" / "environment.json").read_bytes())
    environment["environment"]["device"]["name"] = "another device"
    (tmp_path / "x" / "environment.json").write_text(json.dumps(environment))
    lines = (tmp_path / "x" / "points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x" / "points.jsonl").write_bytes(lines[0])
    (tmp_path / "x" / "record.json").unlink()
    code, printed, _ = run("resume=x")
    assert code == 2
    assert "another environment (device.name: another device" in printed


@pytest.mark.slow
def test_layers_are_looked_into_by_a_process_of_their_own_and_go_on_where_they_stopped(run, tmp_path):
    arguments = (*FAKE, "probes.layers=true", "input_size=[64,96]", "output_dir=x")
    code, _, [record] = run(*arguments)
    assert code == 0
    phases = [point.key.phase for point in record.points]
    assert phases == ["inference", "inference", "inference_layers", "inference_layers"]
    assert [point.metric("layers/closure").reason for point in record.points[:2]] == [
        "the model is scripted: it has no layers"
    ] * 2
    lines = (tmp_path / "x/points.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "x/points.jsonl").write_bytes(b"".join(lines[:-1]))
    code, _, [record] = run(*arguments)
    assert (code, len(record.points)) == (0, 4)
    assert "Nothing is left" in run(*arguments)[1]


@pytest.mark.slow
def test_layers_of_points_that_failed_are_not_tried_and_go_with_them(run, tmp_path):
    arguments = (*FAKE, "probes.layers=true", "batch_size=[1,100]", "output_dir=x")
    _, _, [record] = run(*arguments, "model.faults.oom=1000000")
    assert [point.status for point in record.points] == [Status.OK, Status.OOM, Status.OK, Status.OK]
    assert "not tried" in record.points[3].metric("layers/closure").reason
    lines = (tmp_path / "x/points.jsonl").read_text().splitlines(keepends=True)
    lines[0] = lines[0].replace('"status":"ok"', '"status":"failed"', 1)
    (tmp_path / "x/points.jsonl").write_text("".join(lines))
    before = [line for line in lines if "inference_layers" in line and '"batch_size":1,' in line]
    run(*arguments, "model.faults.oom=1000000")
    after = (tmp_path / "x/points.jsonl").read_text()
    assert len(before) == 1
    assert before[0] not in after


def test_energy_seconds_are_looked_at_before_anything_starts(run, tmp_path):
    code, printed, records = run(*FAKE, "probes.energy_seconds=-1")
    assert (code, records) == (2, [])
    assert "probes.energy_seconds=-1: set a positive time" in printed
