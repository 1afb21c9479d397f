"""The command line from end to end, on the scripted device: real processes, real files, simulated time."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perfexp.main import main
from perfexp.records.expected import Expected
from perfexp.records.record import Record, Status, read_points
from perfexp.records.summary import rows
from perfexp.records.wording import median_text

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")
FIRST = ("model=fake", "gpu=fake", "tracking=none", "cold_start=true", "stopping=fixed")


def test_one_command_leaves_record_table_picture_and_report(run, tmp_path):
    run.draws = True
    code, printed, [record] = run(*FAKE, "output_dir=here")
    assert code == 0
    assert record.status is Status.OK
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {"record.json", "fake_default_overall.csv", "report.md", "time.png", "details"}
    details = {path.name for path in (tmp_path / "here" / "details").iterdir()}
    files = ("points.jsonl", "environment.json", "run.log", "manifest.json")
    assert details == {"plan.yaml", "expected.json", *files}
    assert "simulated" in printed


def test_every_file_that_a_run_writes_is_in_its_manifest(run, tmp_path):
    run.shared(*FAKE, "output_dir=x")
    listed = set(json.loads((tmp_path / "x" / "details" / "manifest.json").read_text())["files"])
    files = (path for path in (tmp_path / "x").rglob("*") if path.is_file())
    assert {path.relative_to(tmp_path / "x").as_posix() for path in files} == listed


def test_without_an_output_folder_a_run_gets_one_of_its_own(run, tmp_path):
    run(*FAKE)
    run(*FAKE)
    folders = list((tmp_path / "outputs").glob("*/*-fake-b1*"))
    assert len(folders) == 2


def test_sizes_and_batch_sizes_make_points_in_one_worker(run):
    code, _, [record] = run(
        *FAKE, "input_size=[32,64x96]", "batch_size=[1,4]", "mode=train_inference", "output_dir=x"
    )
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
    assert Path("x/details/run.log").read_text().count("perfexp.worker.entry") == 1


def test_the_scripted_truth_is_what_is_reported(run):
    _, _, [record] = run(
        *FAKE,
        "model.noise=0",
        "model.base_seconds=0.002",
        "model.seconds_per_megapixel=0",
        "output_dir=x",
    )
    point = record.points[0]
    assert point.find_series("device").measured == pytest.approx([2e-3] * 20, rel=1e-6)
    assert point.facts["bound_by"] == "gpu"


def test_a_training_step_is_taken_apart(run):
    _, _, [record] = run(
        *FAKE,
        "mode=train",
        "model.noise=0",
        "data.num_samples=640",
        "batch_size=64",
        "output_dir=x",
    )
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
    _, _, [record] = run(
        *FAKE, "mode=train", "epochs=2", "data.num_samples=640", "batch_size=64", "output_dir=x"
    )
    point = record.points[0]
    assert (
        len(point.find_series("throughput").samples) == 20
    )  # the scripted device waits for no step
    epochs = point.find_series("epoch").samples
    assert point.metric("total_runtime_seconds").value == pytest.approx(sum(epochs))
    assert not point.metric("epoch_seconds").estimated
    assert point.facts["bound_by"] == "gpu"  # the host issues steps faster than they are computed


def test_first_prediction_is_timed_in_its_own_process(run):
    _, _, [record] = run.shared(*FIRST, "output_dir=x")
    point = next(point for point in record.points if point.key.phase == "ttfp")
    parts = {series.name for series in point.series}
    assert {
        "ttfp/imports",
        "ttfp/context",
        "ttfp/weights",
        "ttfp/first_call",
        "ttfp/second_call",
    } <= parts
    assert Path("x/details/run.log").read_text().count("--what=ttfp") == 1


@pytest.mark.slow
def test_unsupported_size_is_unsupported_in_cold_start_too(run):
    small = ("model=torchvision", "model.name=squeezenet1_1", "gpu=cpu")
    code, _, [record] = run(
        *small, "input_size=16", "cold_start=true", "tracking=none", "output_dir=x"
    )
    assert (code, len(record.points)) == (1, 6)
    for point in record.points:
        assert point.status is Status.UNSUPPORTED
        assert "can't take 1 × 3 × 16 × 16" in point.error


def test_replicates_are_fresh_processes(run):
    _, _, [record] = run(*FAKE, "processes=3", "output_dir=x")
    assert [point.key.replicate for point in record.points] == [0, 1, 2]
    assert Path("x/details/run.log").read_text().count("perfexp.worker.entry") == 3


def test_out_of_memory_point_is_recorded_and_the_run_goes_on(run):
    code, printed, [record] = run(
        *FAKE, "batch_size=[1,100,2]", "model.faults.oom=1000000", "output_dir=x"
    )
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.OOM, Status.OK]
    assert "scripted" in printed


def test_unsupported_size_does_not_stop_the_sweep(run):
    code, printed, [record] = run(*FAKE, "input_size=[16,64]", "model.smallest=32", "output_dir=x")
    assert code == 1
    assert [point.status for point in record.points] == [Status.UNSUPPORTED, Status.OK]
    assert "at least 32" in printed


def test_where_output_goes_is_not_part_of_the_plan(run):
    _, _, [one] = run.shared(*FAKE, "output_dir=x")
    _, _, [_, two] = run(*FAKE, "output_dir=b", "quiet=true")
    assert one.plan_hash == two.plan_hash


@pytest.mark.slow
@pytest.mark.always("README: one measurement; the parent imports no torch")
def test_the_parent_never_imports_torch(tmp_path):
    code = (
        "import sys; from perfexp.main import main; "
        f"main([{', '.join(map(repr, (*FAKE, 'output_dir=x')))}]); "
        "sys.exit(99 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
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
    (tmp_path / "x" / "details" / "points.jsonl").unlink()
    digest = hashlib.sha256((tmp_path / "x" / "details" / "plan.yaml").read_bytes()).hexdigest()
    command = [sys.executable, "-c", code, str(tmp_path / "x"), "--plan-sha256", digest]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.slow
def test_a_batch_larger_than_the_data_costs_its_point_only(run, photographs):
    small = ("model=torchvision", "model.name=squeezenet1_1")
    settings = (
        *small,
        "data=images",
        f"data.root={photographs}",
        "data.workers=0",
        "input_size=64",
    )
    code, printed, [record] = run(
        *settings, "batch_size=[2,100]", "stopping=fixed", "tracking=none", "output_dir=x"
    )
    assert code == 1
    assert [point.status for point in record.points] == [Status.OK, Status.UNSUPPORTED]
    assert "fewer than the 100" in printed


def test_where_memory_runs_out_the_batch_that_fits_is_told(run):
    _, printed, [record] = run(*FAKE, "batch_size=100", "model.faults.oom=1300000", "output_dir=x")
    assert record.points[0].metric("batch_that_fits").value == 25
    assert "A batch of 25 fits." in printed


def test_the_batch_that_fits_is_measured_if_that_is_set(run):
    settings = (
        *FAKE,
        "batch_size=[100,120,2]",
        "model.faults.oom=1300000",
        "sweep.oom=shrink",
        "output_dir=x",
    )
    code, _, [record] = run(*settings)
    inference = [point for point in record.points if point.key.phase == "inference"]
    assert [(point.key.batch_size, point.status.value) for point in inference[:3]] == [
        (100, "oom"),
        (120, "oom"),
        (2, "ok"),
    ]
    assert {
        point.key.batch_size: (point.status.value, point.facts["shrunk_from"])
        for point in inference[3:]
    } == {
        25: ("ok", 100),
        15: ("ok", 120),
    }
    assert run(*settings)[0] == code  # nothing is left to measure
    assert [point.key for point in Record.load(Path("x")).points] == [
        point.key for point in record.points
    ]

    lines = Path("x/details/points.jsonl").read_bytes().splitlines(keepends=True)
    last = [line for line in lines if b"shrunk_from" not in line]
    assert len(lines) - len(last) >= 2
    Path("x/details/points.jsonl").write_bytes(
        b"".join(last)
    )  # as if it had been interrupted before them
    Path("x/record.json").unlink()
    _, _, [again] = run(*settings)
    assert {point.key for point in again.points} == {point.key for point in record.points}
    assert [point.facts["shrunk_from"] for point in again.points if "shrunk_from" in point.facts]
    assert {point.key for point in again.points} <= set(
        Expected.load(Path("x/details/expected.json")).keys
    )


def test_where_not_even_one_sample_fits_that_is_told(run):
    _, _, [record] = run(*FAKE, "batch_size=4", "model.faults.oom=100", "output_dir=x")
    assert record.points[0].metric("batch_that_fits").value is None
    assert "No smaller batch fits." in record.points[0].error


def test_what_is_larger_than_what_had_no_memory_is_not_tried(run):
    given = ("batch_size=[1,30,40]", "input_size=[224,256]", "model.faults.oom=1500000")
    _, _, [record] = run(*FAKE, *given, "sweep.skip_larger=true", "output_dir=x")
    assert [point.status.value for point in record.points if point.key.batch_size == 1] == [
        "ok",
        "ok",
    ]
    failed = [
        point for point in read_points(Path("x/details/points.jsonl")) if point.key.batch_size > 1
    ]  # as measured
    for place, point in enumerate(failed):
        smaller = [
            other
            for other in failed[:place]
            if other.key.pixels <= point.key.pixels and other.key.batch_size <= point.key.batch_size
        ]
        assert point.status.value == ("oom_predicted" if smaller else "oom")
    assert {point.status.value for point in failed} == {"oom", "oom_predicted"}


@pytest.mark.slow
def test_points_after_a_refusal_say_why_they_were_not_tried(run, photographs, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(photographs, broken)
    given = (
        "model=resnet18",
        "gpu=cpu",
        "data=images",
        f"data.root={broken}",
        "data.workers=0",
        "tracking=none",
    )
    next(broken.rglob("*.jpg")).write_bytes(b"no picture")
    code, _, [record] = run(
        *given, "stopping=fixed", "input_size=[32,48]", "batch_size=12", "stopping.measure=1",
        "stopping.warmup=0", "output_dir=x",
    )  # fmt: skip
    assert code == 2
    assert [point.status for point in record.points] == [Status.FAILED, Status.INTERRUPTED]
    assert "can't be read" in record.points[0].error
    assert record.points[1].error.startswith("not tried: ")


def test_model_rejecting_its_inputs_gets_no_cold_start(run):
    code, printed, [record] = run(
        "model=fake",
        "model.smallest=64",
        "gpu=fake",
        "tracking=none",
        "input_size=32",
        "processes=1",
        "cold_start=true",
    )
    assert code == 1
    timed, cold = record.points
    assert [point.status for point in (timed, cold)] == [Status.UNSUPPORTED] * 2
    assert cold.error == f"not tried: {timed.error}"
    assert not cold.series
    progress, _, results = printed.partition("not measured")
    assert (progress.count("at least 64"), results.count("at least 64")) == (0, 1)
    assert "batch 1: unsupported\n" in progress


def test_the_last_progress_line_has_the_interval_of_the_result(run):
    _, printed, [record] = run(*FAKE, "processes=2", "output_dir=x")
    [row] = rows(record)
    [last] = [line for line in printed.splitlines() if line.startswith("[2/2]")]
    assert last.endswith(f"so far {median_text(row)}")
