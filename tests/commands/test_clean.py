"""`perfexp clean`: what goes, what never does, and whom it asks."""

import fcntl
import json
import os
from datetime import UTC, datetime, timedelta

import pytest
import typer

from perfexp import commands


def leave(folder, *names, claimed=None):
    """A run's folder with such files, and a manifest that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 2048)
    (folder / "manifest.json").write_text(json.dumps({"files": list(names if claimed is None else claimed)}))
    return folder


def left(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


ENDINGS = (
    *(".csv", ".pth", ".pt", ".nsys-rep", ".qdrep", ".qdstrm", ".sqlite", ".ncu-rep"),
    ".pt.trace.json.gz",
)
EVERYTHING = (
    *("record.json", "points.jsonl", "plan.yaml", "run.log", "vgg16_gemm_overall.csv", "train.nsys-rep"),
    *("train.sqlite", "weights.pth", "best.pt", "time.png", "train.ncu-rep", "train.pt.trace.json.gz"),
)


def test_tables_profiles_and_checkpoints_go_and_measurements_stay(tmp_path, capsys):
    leave(tmp_path / "a/run", *EVERYTHING)
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert left(tmp_path / "a/run") == sorted(
        ["manifest.json", "record.json", "points.jsonl", "plan.yaml", "run.log", "time.png"]
    )
    out = capsys.readouterr().out
    assert "2.00 KiB  " in out
    assert "Deleted 7 of 7 files, 14.0 KiB." in out


def test_what_no_manifest_names_stays(tmp_path):
    leave(tmp_path, "mine.csv", "theirs.csv", claimed=["mine.csv"])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/other.csv").write_text("1")
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert left(tmp_path) == ["manifest.json", "sub/other.csv", "theirs.csv"]


def test_a_dry_run_lists_and_deletes_nothing(tmp_path, capsys):
    leave(tmp_path, "a.csv", "b.csv")
    assert commands.run(["clean", str(tmp_path), "--dry-run"]) == 0
    assert left(tmp_path) == ["a.csv", "b.csv", "manifest.json"]
    assert "2 files, 4.00 KiB would go." in capsys.readouterr().out


@pytest.mark.parametrize("answer", [True, False])
def test_somebody_who_sits_there_is_asked(tmp_path, capsys, monkeypatch, answer):
    leave(tmp_path, "a.csv")
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda text: asked.append(text) or answer)
    assert commands.run(["clean", str(tmp_path)]) == (0 if answer else 1)
    assert asked == ["Delete 1 file, 2.00 KiB?"]
    assert (tmp_path / "a.csv").exists() != answer
    assert ("Nothing was deleted." in capsys.readouterr().out) != answer


def test_where_nobody_can_be_asked_nothing_goes(tmp_path, capsys, monkeypatch):
    leave(tmp_path, "a.csv")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert commands.run(["clean", str(tmp_path)]) == 2
    assert "say --yes" in capsys.readouterr().err
    assert (tmp_path / "a.csv").exists()


@pytest.mark.parametrize("kind", ["json", "jsonl,yaml,log", "db", "*.json"])
def test_no_kind_reaches_what_a_run_is_made_of(tmp_path, kind):
    names = ("record.json", "points.jsonl", "plan.yaml", "environment.json", "run.log", "sweep.json", "mlflow.db")
    leave(tmp_path, *names)
    assert commands.run(["clean", str(tmp_path), "--yes", "--kind", kind]) == 0
    assert left(tmp_path) == sorted([*names, "manifest.json"])


def test_kinds_can_be_chosen(tmp_path):
    leave(tmp_path, "a.csv", "b.png", "c.JSON", "trace.json.gz")
    assert commands.run(["clean", str(tmp_path), "-y", "--kind", "png, .json.gz"]) == 0
    assert left(tmp_path) == ["a.csv", "c.JSON", "manifest.json"]


def test_only_what_is_old_enough_goes(tmp_path):
    leave(tmp_path, "old.csv", "new.csv")
    week_ago = (datetime.now(UTC) - timedelta(days=8)).timestamp()
    os.utime(tmp_path / "old.csv", (week_ago, week_ago))
    assert commands.run(["clean", str(tmp_path), "--yes", "--older-than", "7d"]) == 0
    assert left(tmp_path) == ["manifest.json", "new.csv"]


def test_a_manifest_can_not_name_a_way_out(tmp_path):
    """Neither by its path, nor by a link to a file, nor by a link to a folder: not even to what lies beside it."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    leave(outside, "precious.csv")
    leave(
        inside,
        "link.csv",
        claimed=["../outside/precious.csv", str(outside / "precious.csv"), "link.csv", "to/precious.csv"],
    )
    (inside / "link.csv").unlink()
    (inside / "link.csv").symlink_to(outside / "precious.csv")
    (inside / "to").symlink_to(outside)
    (outside / "manifest.json").unlink()
    for folder in (inside, tmp_path):
        assert commands.run(["clean", str(folder), "--yes"]) == 0
    assert (outside / "precious.csv").exists()
    assert (inside / "link.csv").is_symlink()


def test_a_run_that_began_while_somebody_was_asked_is_left_alone(tmp_path, capsys, monkeypatch):
    leave(tmp_path, "a.csv", "run.log")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with (tmp_path / "run.log").open("ab") as log:
        monkeypatch.setattr(typer, "confirm", lambda text: fcntl.flock(log, fcntl.LOCK_EX) is None)
        assert commands.run(["clean", str(tmp_path)]) == 1
    assert (tmp_path / "a.csv").exists()
    assert "is being measured into" in capsys.readouterr().err


def test_a_run_that_is_being_measured_is_left_alone(tmp_path, capsys):
    leave(tmp_path, "a.csv", "run.log")
    with (tmp_path / "run.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / "a.csv").exists()
    assert "is being measured into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kind", ","], "names no ending"),
        (["--kind", "../x"], "names no ending"),
        (["--older-than", "a week"], "is no age"),
        (["--older-than", "-1d"], "is no age"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, capsys, arguments, told):
    leave(tmp_path, "a.csv")
    assert commands.run(["clean", str(tmp_path), "--yes", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert (tmp_path / "a.csv").exists()


def test_where_there_is_nothing_it_says_so(tmp_path, capsys):
    assert commands.run(["clean", str(tmp_path)]) == 0
    assert "Nothing in or below" in capsys.readouterr().out
    assert commands.run(["clean", str(tmp_path / "missing")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{broken", "[", "", "[]", '{"files": 3}'])
def test_a_broken_manifest_names_nothing_and_is_told_of(tmp_path, capsys, content):
    leave(tmp_path / "whole", "b.csv")
    leave(tmp_path / "broken", "a.csv")
    (tmp_path / "broken" / "manifest.json").write_text(content)
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 1
    assert left(tmp_path) == ["broken/a.csv", "broken/manifest.json", "whole/manifest.json"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path}/broken/manifest.json: names no file: it is damaged, and nothing goes"


@pytest.mark.parametrize(
    ("kind", "hint"),
    [("pngs", "Did you mean png?"), ("nsysrep", "Did you mean nsys-rep?"), ("profiles", "Possible: csv, md, ncu-rep")],
)
def test_a_kind_that_nothing_is_of_is_told_with_those_that_there_are(tmp_path, capsys, kind, hint):
    leave(tmp_path, "time.png", "report.md", "record.json")
    assert commands.run(["clean", str(tmp_path), "--kind", kind, "--yes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"  no file ending in .{kind} that is still there"
    assert lines[2].startswith(f"  nothing of the kind {kind}. {hint}")
    assert "2 files with other endings, which --kind chooses: 1 png, 1 md" in lines[3]


def test_a_folder_without_a_manifest_is_told_so(tmp_path, capsys):
    (tmp_path / "mine.csv").write_text("1")
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"Nothing in or below {tmp_path} is to go: no folder there has a manifest.json" in out
    assert (tmp_path / "mine.csv").exists()


def test_what_is_not_old_enough_is_counted_with_the_age_of_the_oldest(tmp_path, capsys):
    for run in ("a", "b"):
        leave(tmp_path / run, "new.csv", "record.json", "time.png", "old.csv")
    two_hours_ago = (datetime.now(UTC) - timedelta(hours=2)).timestamp()
    os.utime(tmp_path / "a" / "old.csv", (two_hours_ago, two_hours_ago))
    assert commands.run(["clean", str(tmp_path), "--kind", "csv", "--older-than", "7d", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"Nothing in or below {tmp_path} is to go. The manifest.json of 2 runs and sweeps names",
        "  4 files ending in .csv, none older than 7d: the oldest was written 2 h 00 min ago",
        "  2 files with other endings, which --kind chooses: 2 png",
        "  2 files that a record is made of: they always stay",
    ]


def test_files_that_always_stay_are_told_as_such(tmp_path, capsys):
    leave(tmp_path, "record.json", "points.jsonl", claimed=["record.json", "points.jsonl", "gone.csv"])
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"  no file ending in {', '.join(ENDINGS)} that is still there",
        "  2 files that a record is made of: they always stay",
    ]


def test_a_run_under_way_is_not_told_to_be_nothing(tmp_path, capsys):
    leave(tmp_path, "a.csv", "run.log")
    with (tmp_path / "run.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    said = capsys.readouterr()
    assert "is being measured into" in said.err
    assert said.out == ""
