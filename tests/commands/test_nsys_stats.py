"""`perfexp nsys-stats`: reports of a profile that is there, without a run."""

import importlib.util
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from perfexp import commands
from perfexp.measuring.profilers.nsys import project

_PROFILERS = Path(__file__).parent.parent / "measuring" / "profilers"


def _module(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


scripted = _module("scripted", _PROFILERS / "scripted.py")


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    folder = tmp_path / "tools"
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def install(**script):
        default = {"version": scripted.VERSION, "reports": scripted.REPORTS, "no_export": True}
        return scripted.Scripted(folder, "nsys", scripted.NSYS, default | script)

    return install


@pytest.fixture
def profile(tmp_path):
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    file = folder / "train.nsys-rep"
    file.write_bytes(b"profile")
    return file


def test_reports_of_a_file_lie_beside_it(nsys, profile, capsys):
    nsys()
    assert (
        commands.run(
            ["nsys-stats", str(profile), "-r", "cuda_gpu_kern_sum", "-r", "nvtx_gpu_proj_sum"]
        )
        == 0
    )
    written = {file.name for file in profile.parent.glob("*.csv")}
    assert written == {"train_cuda_gpu_kern_sum.csv", "train_nvtx_gpu_proj_sum.csv"}
    printed = capsys.readouterr().out
    assert "2 rows: train_cuda_gpu_kern_sum.csv" in printed
    assert "dgrad2d" in printed


def test_json_has_the_files_and_the_kernels(nsys, profile, capsys):
    nsys()
    assert commands.run(["nsys-stats", str(profile), "-r", "cuda_gpu_kern_sum", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["profiles"]
    assert made["reports"]["cuda_gpu_kern_sum"]["file"] == "train_cuda_gpu_kern_sum.csv"
    assert any("dgrad2d" in kernel["name"] for kernel in made["kernels"])


def test_all_profiles_below_a_folder_get_the_usual_reports(nsys, profile):
    nsys()
    (profile.parent.parent / "two").mkdir()
    (profile.parent.parent / "two" / "inference.nsys-rep").write_bytes(b"profile")
    assert commands.run(["nsys-stats", str(profile.parent.parent)]) == 0
    assert len(list(profile.parent.parent.rglob("*_cuda_gpu_kern_sum.csv"))) == 2


def test_a_database_that_nsys_exported_will_do(nsys, profile, capsys):
    nsys()
    database = profile.with_suffix(".sqlite")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE StringIds (id, value)")
        connection.commit()
    profile.unlink()
    before = database.read_bytes()
    assert commands.run(["nsys-stats", str(database), "-r", "cuda_gpu_kern_sum"]) == 0
    assert {file.name for file in profile.parent.iterdir()} == {
        "train.sqlite",
        "train_cuda_gpu_kern_sum.csv",
    }
    assert database.read_bytes() == before
    assert commands.run(["nsys-stats", str(database), "-r", "cuda_gpu_kern_sum"]) == 1
    assert "train_cuda_gpu_kern_sum.csv" in capsys.readouterr().err


def test_in_a_runs_folder_what_is_written_enters_the_manifest(nsys, profile):
    nsys()
    manifest = profile.parent / "details" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text('{"files": ["train.nsys-rep"]}')
    commands.run(["nsys-stats", str(profile), "-r", "cuda_api_sum"])
    assert "train_cuda_api_sum.csv" in manifest.read_text()
    manifest.unlink()
    commands.run(["nsys-stats", str(profile), "-r", "nvtx_gpu_proj_sum"])
    assert not manifest.exists()


def test_a_report_without_rows_is_told_and_the_others_are_made(nsys, profile, capsys):
    nsys(reports={"cuda_api_sum": scripted.NO_KERNELS, "cuda_gpu_kern_sum": scripted.KERN_SUM})
    assert commands.run(["nsys-stats", str(profile), "-r", "cuda_api_sum,cuda_gpu_kern_sum"]) == 1
    assert "does not contain CUDA kernel data" in capsys.readouterr().out
    assert (profile.parent / "train_cuda_gpu_kern_sum.csv").exists()


def test_unimported_profile_is_imported_by_the_nsys_importer(nsys, profile, capsys):
    tool = nsys()
    stream = profile.rename(profile.with_suffix(".qdstrm"))
    assert commands.run(["nsys-stats", str(stream)]) == 1
    assert "no QdstrmImporter beside" in capsys.readouterr().err
    importer = tool.path.parent / "QdstrmImporter"
    importer.write_text('#!/bin/sh\nout="${2#--output-file=}"\necho imported > "$out"\n')
    importer.chmod(0o755)
    assert commands.run(["nsys-stats", str(stream.parent)]) == 0
    assert profile.read_text() == "imported\n"


def test_profile_and_tool_may_be_relative_paths(nsys, profile, monkeypatch):
    nsys()
    monkeypatch.chdir(profile.parent)
    assert (
        commands.run(
            ["nsys-stats", profile.name, "--tool", "../../tools/nsys", "-r", "cuda_gpu_kern_sum"]
        )
        == 0
    )
    assert (profile.parent / "train_cuda_gpu_kern_sum.csv").exists()


def test_a_folder_that_is_named_like_an_option_is_none(nsys, profile, monkeypatch):
    """Below the current folder, `--output=/elsewhere/train.nsys-rep` is a relative path."""
    tool = nsys()
    folder = profile.parent / "--output=" / "elsewhere"
    folder.mkdir(parents=True)
    profile.rename(folder / profile.name)
    monkeypatch.chdir(profile.parent)
    assert commands.run(["nsys-stats", ".", "-r", "cuda_gpu_kern_sum"]) == 0
    words = [word for call in tool.calls for word in call]
    assert [word for word in words if word.endswith(profile.name)]
    assert not [word for word in words if word.startswith("--output=/elsewhere")]


@pytest.mark.parametrize("name", ["train.sqlite", "train_cuda_api_sum.csv", "train_ranges.csv"])
def test_what_no_run_left_is_replaced_only_by_force(nsys, profile, capsys, name):
    tool = nsys()
    mine = profile.parent / name
    mine.write_text("mine")
    assert commands.run(["nsys-stats", str(profile), "-r", "cuda_api_sum"]) == 1
    said = capsys.readouterr().err
    assert f"{name} would be overwritten" in said
    assert "--force" in said
    assert [
        path for path in profile.parent.iterdir() if path.suffix == ".csv" and path != mine
    ] == []
    assert mine.read_text() == "mine"
    assert commands.run(["nsys-stats", str(profile), "-r", "cuda_api_sum", "--force"]) == 0
    assert (profile.parent / "train_cuda_api_sum.csv").read_text() != "mine"
    assert [call for call in tool.calls if call[0] == "export"]


def test_what_the_run_left_is_made_again(nsys, profile):
    nsys()
    (profile.parent / "details").mkdir()
    (profile.parent / "details" / "manifest.json").write_text('{"files": ["train.nsys-rep"]}')
    for _ in range(2):
        assert commands.run(["nsys-stats", str(profile), "-r", "cuda_api_sum"]) == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "no such file or folder"),
        (["{folder}"], "no profile of nsys"),
        (["{file}"], "is not a profile of nsys"),
        (["{folder}", "-r", "/tmp/script.py"], "is not a report"),
    ],
)
def test_bad_input_is_told(nsys, tmp_path, capsys, arguments, told):
    nsys()
    folder = tmp_path / "empty"
    folder.mkdir()
    file = folder / "points.jsonl"
    file.touch()
    assert (
        commands.run(["nsys-stats", *(text.format(folder=folder, file=file) for text in arguments)])
        == 2
    )
    assert told in capsys.readouterr().err


def test_no_nsys_at_all_is_told_with_where_to_get_it(profile, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("perfexp.doctor.environment._TOOLS", {"nsys": ()})
    assert commands.run(["nsys-stats", str(profile)]) == 1
    assert "https://developer.nvidia.com/nsight-systems" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "code"), [("cuda_gpu_mem_time_sum", 0), ("cuda_gpu_mem_tyme_sum", 1)]
)
def test_empty_copy_report_is_valid_and_a_misspelled_one_is_not(
    nsys, profile, capsys, report, code
):
    """By the database of a real step without its copies and fills."""
    database = profile.parent / "copied.sqlite"
    database.write_bytes((_PROFILERS / "h200" / "train.sqlite").read_bytes())
    with closing(sqlite3.connect(database)) as connection, connection:
        for table in ("MEMCPY", "MEMSET"):
            connection.execute(f"DROP TABLE IF EXISTS CUPTI_ACTIVITY_KIND_{table}")
    reports = {**scripted.REPORTS, "cuda_gpu_mem_time_sum": scripted.NO_COPIES}
    nsys(no_export=False, database=str(database), reports=reports)
    assert commands.run(["nsys-stats", str(profile), "-r", report]) == code
    assert ("nothing was copied or filled" in capsys.readouterr().out) is (code == 0)


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE StringIds; CREATE VIEW StringIds AS WITH RECURSIVE r(id, value) AS "
        "(SELECT 2, 'x' UNION ALL SELECT id + 1, 'x' FROM r) SELECT * FROM r",
        "UPDATE NVTX_EVENTS SET start = 'soon'",
    ],
)
def test_a_database_of_somebody_else_has_no_ranges_and_ends(damage, tmp_path):
    database = tmp_path / "given.sqlite"
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(
            "CREATE TABLE StringIds (id, value); CREATE TABLE NVTX_EVENTS (text, start, end, eventType);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, correlationId);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, correlationId, demangledName);"
            "INSERT INTO NVTX_EVENTS VALUES ('forward', 1, 9, 60);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (2, 7);"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (3, 4, 7, 2);"
        )
        assert [each["name"] for each in project(database)[0]] == ["forward"]
        connection.executescript(damage)
    with pytest.raises(sqlite3.Error):
        project(database)
