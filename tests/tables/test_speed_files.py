"""The speed files that a run leaves: which points have one, and where they go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from perfexp.records.paths import RunPaths
from perfexp.records.record import Point, Record, Status, SweepMembership
from perfexp.records.sweep_record import Sweep
from perfexp.reports import run_files
from perfexp.summaries.analysis import Analysis
from perfexp.tables import speed_files
from tests.support.builders import Builder

pytestmark = pytest.mark.usefixtures("quick_commands")

NAME = "resnet50_sp_bs1_fp32_1_speed.json"


@dataclass
class Place:
    """A run's folder, and one for speed files."""

    paths: RunPaths
    speeds: Path

    def write(self, record: Record) -> dict[str, str]:
        return {
            artifact.path: artifact.kind
            for artifact in run_files.write(Analysis.of(record), self.paths)
        }

    def logged(self, name: str = NAME) -> str:
        return str(json.loads((self.speeds / name).read_bytes())["log_file"])


def place_of(folder: Path) -> Place:
    (folder / "speeds").mkdir(parents=True, exist_ok=True)
    paths = RunPaths(folder / "run")
    paths.create()
    return Place(paths, folder / "speeds")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_of(tmp_path)


def run(build: Builder, *points: Point, speed_dir: Path | None = None, **fields: object) -> Record:
    plan = {"speed_dir": None if speed_dir is None else str(speed_dir)}
    return build.record(*(points or (build.training(),)), plan=plan, **fields)


def test_training_leaves_speed_file_in_folder_and_manifest(build: Builder, place: Place) -> None:
    artifacts = place.write(run(build))
    assert artifacts[NAME] == "data"
    assert NAME in place.paths.claimed()
    document = json.loads((place.paths.root / NAME).read_bytes())
    assert document["FINAL_RESULT"] == pytest.approx(1 / 0.2, rel=0.01)
    assert document["log_file"] == str(place.paths.log.resolve())
    assert list(place.speeds.iterdir()) == []


def test_inference_and_first_predictions_leave_none(build: Builder, place: Place) -> None:
    record = run(build, build.point(), build.first_prediction())
    assert not any("speed" in name for name in place.write(record))


def test_each_training_has_its_own_speed_file_even_if_it_failed(
    build: Builder, place: Place
) -> None:
    failed = build.failed(phase="train", batch=4)
    record = run(build, build.training(), build.training(size=(512, 512)), build.point(), failed)
    names = [name for name in place.write(record) if name.endswith("_speed.json")]
    assert names == [
        "resnet50_224_sp_bs1_fp32_1_speed.json",
        "resnet50_512_sp_bs1_fp32_1_speed.json",
        "resnet50_sp_bs4_fp32_1_speed.json",
    ]
    flags = [json.loads((place.paths.root / name).read_bytes())["JOB_FAIL_FLAG"] for name in names]
    assert flags == [0, 0, 1]


def test_earlier_speed_file_is_replaced_and_foreign_files_stay(
    build: Builder, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.write(run(build))
    place.write(run(build, build.training(0.4)))
    assert json.loads((place.paths.root / NAME).read_bytes())["FINAL_RESULT"] == pytest.approx(
        2.5, rel=0.01
    )
    assert capsys.readouterr().err == ""
    (place.paths.root / NAME).write_text("mine")
    assert NAME not in place.write(run(build))
    assert (place.paths.root / NAME).read_text() == "mine"
    assert (
        "the file there is not a speed file. Move it away and repeat the command"
        in capsys.readouterr().err
    )


def test_what_is_not_perfexps_is_never_entered_in_the_manifest(
    build: Builder, place: Place
) -> None:
    (place.paths.root / NAME).write_text("mine")
    assert "report.md" in place.write(run(build))
    assert NAME not in place.paths.claimed()


def test_speed_dir_gets_the_same_file(
    build: Builder, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write(run(build, speed_dir=place.speeds))
    assert (place.speeds / NAME).read_bytes() == (place.paths.root / NAME).read_bytes()
    monkeypatch.chdir(place.speeds)
    (place.speeds / NAME).unlink()
    place.write(run(build, speed_dir=Path()))
    assert (place.speeds / NAME).is_file()
    assert [
        path for _, path in speed_files.where(run(build, speed_dir=Path()), place.paths.root)
    ] == [Path(NAME)]


def test_speed_dir_may_be_the_runs_own_folder(
    build: Builder, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.write(run(build, speed_dir=place.paths.root))
    assert [path.name for path in place.paths.root.glob("*_speed.json")] == [NAME]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["missing", "file"])
def test_invalid_speed_dir_costs_only_the_copy_there(
    name: str, build: Builder, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.speeds / "file").write_text("")
    record = run(build, speed_dir=place.speeds / name)
    assert {NAME, "report.md", "time.png"} <= place.write(record).keys()
    (line,) = capsys.readouterr().err.splitlines()
    assert "folder" in line
    assert "the run's own folder has the file" in line
    assert [path for _, path in speed_files.where(record, place.paths.root)] == [
        place.paths.root / NAME
    ]


def test_a_foreign_file_in_speed_dir_stays_and_is_told(
    build: Builder, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.speeds / NAME).write_text("mine")
    assert NAME in place.write(run(build, speed_dir=place.speeds))
    assert (place.speeds / NAME).read_text() == "mine"
    assert "choose another speed_dir=DIR. The measurements are kept" in capsys.readouterr().err


def test_a_speed_dir_that_can_not_be_written_is_told(
    build: Builder, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert NAME in place.write(run(build, speed_dir=Path("/proc")))  # not even by root
    (line,) = capsys.readouterr().err.splitlines()
    assert "The folder /proc can't be written" in line
    assert "The measurements are kept, and the run's own folder has the file." in line


def test_sweep_runs_keep_separate_speed_files_on_repeat(build: Builder, tmp_path: Path) -> None:
    axes = [{"algorithm": "default"}, {"algorithm": "gemm"}]
    sweep, _ = build.sweep(axes, [[build.training()], [build.training()]])
    speeds = tmp_path / "speeds"
    for _ in range(2):
        for job in range(2):
            place = place_of(tmp_path / str(job))
            sweep.children[job].directory = f"{job}/run"
            done = Sweep(uid="s1", name="x", started=sweep.started, children=sweep.children[:job])
            (tmp_path / "sweep.json").write_bytes((done if job == 0 else sweep).to_json())
            speeds.mkdir(exist_ok=True)
            membership = SweepMembership(uid="s1", job=job, axes=axes[job], directory="../..")
            record = run(build, speed_dir=speeds, sweep=membership)
            place.write(record)
            ((_, path),) = speed_files.where(record, place.paths.root)
            assert path == speeds / (NAME if job == 0 else "resnet50_2_sp_bs1_fp32_1_speed.json")
            assert json.loads(path.read_bytes())["log_file"] == str(place.paths.log.resolve())
    assert len(list(speeds.iterdir())) == 2


def test_a_run_without_a_sweep_replaces_the_file_of_another_run(
    build: Builder, tmp_path: Path
) -> None:
    speeds = tmp_path / "speeds"
    for name in "ab":
        place = place_of(tmp_path / name)
        speeds.mkdir(exist_ok=True)
        place.write(run(build, speed_dir=speeds))
    assert [path.name for path in speeds.iterdir()] == [NAME]
    assert json.loads((speeds / NAME).read_bytes())["log_file"] == str(
        tmp_path / "b" / "run" / "details" / "run.log"
    )


def test_a_run_that_was_interrupted_before_its_training_says_so(
    build: Builder, place: Place
) -> None:
    place.write(run(build, build.failed(Status.INTERRUPTED, phase="train")))
    assert json.loads((place.paths.root / NAME).read_bytes())["JOB_FAIL_FLAG"] == 1
