"""`perfexp speed`: what it reads, what it writes and where, and its exit codes."""

import json

import pytest

from perfexp import commands
from perfexp.records.record import Status
from tests.speed import writing

GIVEN = ["--model", "fastscnn", "--batch-size", "2", "--gpus", "1", "--precision", "fp32"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory of its own: that is where the files go."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_log_becomes_a_file_where_the_user_stands_and_a_line(tmp_path, here, capsys):
    log = tmp_path / "20240501_100000.log"
    log.write_text(
        writing.mmengine_head(cards=8) + writing.mmengine_iter([1.0, *[0.249, 0.251] * 10])
    )
    assert commands.run(["speed", str(log)]) == 0
    assert left(here) == ["fast_scnn_mp_bs2_fp32_8_speed.json"]
    assert json.loads((here / "fast_scnn_mp_bs2_fp32_8_speed.json").read_bytes()) == {
        "log_file": str(log),
        "model_name": "fast_scnn",
        "mission_name": "图像分割",
        "direction_id": 0,
        "run_mode": "mp",
        "index": 1,
        "gpu_num": 8,
        "FINAL_RESULT": 64.0,
        "JOB_FAIL_FLAG": 0,
        "UNIT": "images/s",
    }
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "fast_scnn_mp_bs2_fp32_8_speed.json: 64 images/s (mean of 20 lines, 0.25 s for a step of 2 × 8"
    )


def test_facts_missing_from_a_log_are_requested_as_options(tmp_path, here, capsys):
    log = tmp_path / "train.log"
    log.write_text(writing.mmcv_iter([0.5] * 10))
    assert commands.run(["speed", str(log)]) == 2
    assert "add --model NAME --batch-size N --gpus N --precision P." in capsys.readouterr().err
    assert left(here) == []
    assert (
        commands.run(
            ["speed", str(log), *GIVEN, "--run-mode", "mp", "--skip", "2", "--out", str(tmp_path)]
        )
        == 0
    )
    assert (
        json.loads((tmp_path / "fastscnn_mp_bs2_fp32_1_speed.json").read_bytes())["FINAL_RESULT"]
        == 4.0
    )


def test_output_folder_is_created_only_with_something_to_write(tmp_path, here):
    log = tmp_path / "log"
    log.write_text(writing.mmcv_iter([1.0] * 10))
    assert commands.run(["speed", str(log), "--out", "a/results"]) == 2
    assert left(here) == []
    assert commands.run(["speed", str(log), *GIVEN, "--out", "a/results"]) == 0
    assert left(here / "a" / "results") == ["fastscnn_sp_bs2_fp32_1_speed.json"]


def test_several_logs_have_a_file_each_even_of_one_name(tmp_path, here):
    for name, seconds in (("a", 0.5), ("b", 0.25), ("c", 1.0)):
        (tmp_path / name).write_text(writing.mmcv_iter([seconds] * 10))
    assert commands.run(["speed", *(str(tmp_path / name) for name in "abc"), *GIVEN]) == 0
    names = [
        "fastscnn_2_sp_bs2_fp32_1_speed.json",
        "fastscnn_3_sp_bs2_fp32_1_speed.json",
        "fastscnn_sp_bs2_fp32_1_speed.json",
    ]
    assert left(here) == names
    assert [json.loads((here / name).read_bytes())["FINAL_RESULT"] for name in names] == [
        8.0,
        2.0,
        4.0,
    ]
    assert {json.loads((here / name).read_bytes())["model_name"] for name in names} == {"fastscnn"}


def test_a_training_that_failed_is_written_down_and_ends_with_1(tmp_path, here, capsys):
    log = tmp_path / "train.log"
    log.write_text(
        writing.mmcv_iter([0.5] * 10) + "\x1b[31mRuntimeError: CUDA out of memory.\x1b[0m\n"
    )
    assert commands.run(["speed", str(log), *GIVEN]) == 1
    document = json.loads((here / "fastscnn_sp_bs2_fp32_1_speed.json").read_bytes())
    assert (document["FINAL_RESULT"], document["JOB_FAIL_FLAG"]) == (0.0, 1)
    assert "failed (out of memory: RuntimeError: CUDA out of memory.)" in capsys.readouterr().out


def test_unreadable_log_does_not_stop_the_other_logs(tmp_path, here, capsys):
    log = tmp_path / "train.log"
    log.write_text(writing.mmcv_iter([0.5] * 10))
    assert commands.run(["speed", str(tmp_path / "none"), str(log), *GIVEN]) == 2
    assert "none does not exist." in capsys.readouterr().err
    assert left(here) == ["fastscnn_sp_bs2_fp32_1_speed.json"]


def test_a_run_becomes_a_file_for_each_of_its_trainings(make_record, leave_run, tmp_path, here):
    folder = leave_run(
        make_record(phases=("train", "inference"), batches=(1, 4)), tmp_path / "runs" / "a"
    )
    for place in (folder, folder / "record.json", tmp_path / "runs"):
        assert commands.run(["speed", str(place)]) == 0
        assert left(here) == [
            "resnet50_sp_bs1_fp32_1_speed.json",
            "resnet50_sp_bs4_fp32_1_speed.json",
        ]
        document = json.loads((here / "resnet50_sp_bs4_fp32_1_speed.json").read_bytes())
        assert document["log_file"] == str(folder / "details" / "run.log")
        assert document["FINAL_RESULT"] == pytest.approx(4 / 0.12, rel=0.01)


def test_a_run_that_ran_out_of_memory_ends_with_1(make_record, leave_run, tmp_path, here):
    record = make_record(phases=("train",), sizes=(224, 512), failing={512: Status.OOM})
    assert commands.run(["speed", str(leave_run(record, tmp_path / "run"))]) == 1
    documents = [json.loads((here / name).read_bytes()) for name in left(here)]
    assert [document["JOB_FAIL_FLAG"] for document in documents] == [0, 1]
    assert left(here) == [
        "resnet50_224_sp_bs1_fp32_1_speed.json",
        "resnet50_512_sp_bs1_fp32_1_speed.json",
    ]


def test_in_a_runs_own_folder_the_manifest_knows_the_file(make_record, leave_run, tmp_path):
    folder = leave_run(make_record(phases=("train",)), tmp_path / "run")
    (folder / "details" / "manifest.json").write_text(json.dumps({"files": ["record.json"]}))
    assert commands.run(["speed", str(folder), "--out", str(folder)]) == 0
    files = json.loads((folder / "details" / "manifest.json").read_text())["files"]
    assert files == ["record.json", "resnet50_sp_bs1_fp32_1_speed.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "There is no record.json in or below empty"),
        (["inference"], "inference holds no training"),
        (["inference", "--gpus", "2"], "options are for logs"),
        (["log", "--run-mode", "dp"], "'dp' is not one of 'sp', 'mp'"),
        (["log", "--out", "log"], "log is not a folder"),
        (["log", "--model", " "], "--model is empty"),
        (["fastscnn_sp_bs2_fp32_1_speed.json", *GIVEN], "is an input file"),
        (["note", *GIVEN], "note is not a training log"),
        (["log", *GIVEN, "--skip", "100"], "--skip 100 leaves no usable line of 10."),
        (["log", *GIVEN[:-1], "fp23"], "precision 'fp23' not found. Did you mean fp32"),
        (["log", *GIVEN, "--out", "/proc"], "The folder /proc can't be written"),
        (["log", *GIVEN, "--out", "taken"], "can't be written"),
    ],
)
def test_what_can_not_be_done_is_told_before_anything_is_written(
    arguments, message, make_record, leave_run, here, capsys
):
    (here / "empty").mkdir()
    (here / "taken" / "fastscnn_sp_bs2_fp32_1_speed.json").mkdir(parents=True)
    (here / "log").write_text(writing.mmcv_iter([0.5] * 10))
    (here / "note").write_text("mine")
    mine = writing.mmcv_iter([1.0] * 10)
    (here / "fastscnn_sp_bs2_fp32_1_speed.json").write_text(mine)
    leave_run(make_record(), here / "inference")
    before = left(here)
    assert commands.run(["speed", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert (left(here), (here / "fastscnn_sp_bs2_fp32_1_speed.json").read_text()) == (before, mine)


def test_what_is_refused_leaves_an_earlier_result_as_it_is(tmp_path, here):
    log = tmp_path / "train.log"
    log.write_text(writing.mmcv_iter([0.5] * 10))
    assert commands.run(["speed", str(log), *GIVEN]) == 0
    good = (here / "fastscnn_sp_bs2_fp32_1_speed.json").read_bytes()
    (tmp_path / "empty").write_text("")
    for wrong in ([str(tmp_path / "empty")], [str(log), "--skip", "100"]):
        assert commands.run(["speed", *wrong, *GIVEN]) == 2
        assert (here / "fastscnn_sp_bs2_fp32_1_speed.json").read_bytes() == good


@pytest.mark.parametrize(
    "arguments", [["--gpus", "0"], ["--batch-size", "-1"], ["--skip", "-1"], ["--gpus", "9" * 30]]
)
def test_numbers_that_can_not_be_are_refused(arguments, here):
    (here / "log").write_text(writing.mmcv_iter([0.5] * 10))
    assert commands.run(["speed", "log", *arguments]) == 2
    assert left(here) == ["log"]
