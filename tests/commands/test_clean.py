"""`perfexp clean`: what goes, what never does, and whom it asks."""

import fcntl
import json
import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest
import typer

from perfexp import commands
from perfexp.commands import clean
from perfexp.main import main
from perfexp.plots.roofline_files import files
from perfexp.profilers import place_of
from perfexp.profilers.kineto import Torch
from perfexp.profilers.ncu import Ncu
from perfexp.profilers.nsys import Nsys
from perfexp.records.paths import is_artifact
from perfexp.records.record import Key

pytestmark = pytest.mark.usefixtures("quick_commands")


def leave(folder, *names, claimed=None, uid="1f", repeated="1f"):
    """A run's folder with such files, and a manifest that names them; its sweep.json repeats its identity."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 2048)
    manifest = {"perfexp": uid, "files": list(names if claimed is None else claimed)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "plan.yaml").write_text(f"uid: {repeated}\n")
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with everything that the scripted device leaves."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    given = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "probes.layers=true")
    assert main([*given, "input_size=[32,64]", f"output_dir={folder}"]) == 0
    return folder


def left(folder):
    """What is there, but for the plan."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "plan.yaml")
    return sorted(str(path.relative_to(folder)) for path in files)


EVERYTHING = (
    *(
        "record.json",
        "points.jsonl",
        "plan.yaml",
        "run.log",
        "vgg16_gemm_overall.csv",
        "train.nsys-rep",
    ),
    *(
        "train.sqlite",
        "resnet18_cifar10_final_weights.pth",
        "resnet18_cifar10_best.pt",
        "time.png",
        "train.ncu-rep",
        "train.pt.trace.json.gz",
    ),
)


def test_clean_deletes_tables_and_profiles_but_no_measurements(tmp_path, capsys):
    leave(tmp_path / "a/run", *EVERYTHING)
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert left(tmp_path / "a/run") == sorted(
        ["manifest.json", "record.json", "points.jsonl", "run.log", "time.png"]
    )
    out = capsys.readouterr().out
    assert "2.00 KiB  " in out
    assert "Deleted 7 of 7 files, 14.0 KiB." in out


def test_what_no_manifest_names_stays(tmp_path):
    leave(
        tmp_path, "mine_gemm_layers.csv", "theirs_gemm_layers.csv", claimed=["mine_gemm_layers.csv"]
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/other.csv").write_text("1")
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert left(tmp_path) == ["manifest.json", "sub/other.csv", "theirs_gemm_layers.csv"]


def test_clean_deletes_own_checkpoints_and_keeps_other_files(tmp_path):
    names = (
        "checkpoints/net_images_best.pt",
        "checkpoints/net_images_epoch_3.pt",
        "checkpoints/deep/net_x_best.pt",
    )
    others = ("checkpoints/mine.pt", "elsewhere/net_images_best.pt")
    leave(tmp_path, *names, *others, claimed=[*names, *others, "checkpoints/../kept_x_best.pt"])
    (tmp_path / "kept_x_best.pt").write_text("1")
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert left(tmp_path) == sorted([*others, names[2], "kept_x_best.pt", "manifest.json"])


def test_a_folder_of_checkpoints_that_is_a_link_is_left_alone(tmp_path):
    name = "checkpoints/net_images_best.pt"
    (tmp_path / "other").mkdir()
    (tmp_path / "other/net_images_best.pt").write_text("1")
    leave(tmp_path / "run", claimed=[name])
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "other")
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / "other/net_images_best.pt").exists()


def test_a_dry_run_lists_and_deletes_nothing(tmp_path, capsys):
    leave(tmp_path, "a_gemm_overall.csv", "b_gemm_overall.csv")
    assert commands.run(["clean", str(tmp_path), "--dry-run"]) == 0
    assert left(tmp_path) == ["a_gemm_overall.csv", "b_gemm_overall.csv", "manifest.json"]
    assert "2 files, 4.00 KiB would go." in capsys.readouterr().out


@pytest.mark.parametrize("answer", [True, False])
def test_somebody_who_sits_there_is_asked(tmp_path, capsys, monkeypatch, answer):
    leave(tmp_path, "a_gemm_overall.csv")
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda text: asked.append(text) or answer)
    assert commands.run(["clean", str(tmp_path)]) == (0 if answer else 1)
    assert asked == ["Delete 1 file, 2.00 KiB?"]
    assert (tmp_path / "a_gemm_overall.csv").exists() != answer
    assert ("Nothing was deleted." in capsys.readouterr().out) != answer


def test_where_nobody_can_be_asked_nothing_goes(tmp_path, capsys, monkeypatch):
    leave(tmp_path, "a_gemm_overall.csv")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert commands.run(["clean", str(tmp_path)]) == 2
    assert "pass --yes" in capsys.readouterr().err
    assert (tmp_path / "a_gemm_overall.csv").exists()


@pytest.mark.parametrize("kind", ["json", "jsonl,yaml,log", "db", "*.json"])
def test_no_kind_reaches_what_a_run_is_made_of(tmp_path, kind):
    names = (
        "record.json",
        "points.jsonl",
        "environment.json",
        "run.log",
        "sweep.json",
        "mlflow.db",
    )
    leave(tmp_path, *names)
    assert commands.run(["clean", str(tmp_path), "--yes", "--kind", kind]) == 0
    assert left(tmp_path) == sorted([*names, "manifest.json"])


def test_kinds_can_be_chosen(tmp_path):
    leave(tmp_path, "a_gemm_overall.csv", "time.png", "c.JSON", "train.pt.trace.json.gz")
    assert commands.run(["clean", str(tmp_path), "-y", "--kind", "png, .json.gz"]) == 0
    assert left(tmp_path) == ["a_gemm_overall.csv", "c.JSON", "manifest.json"]


def test_only_what_is_old_enough_goes(tmp_path):
    leave(tmp_path, "old_gemm_layers.csv", "new_gemm_layers.csv")
    week_ago = (datetime.now(UTC) - timedelta(days=8)).timestamp()
    os.utime(tmp_path / "old_gemm_layers.csv", (week_ago, week_ago))
    assert commands.run(["clean", str(tmp_path), "--yes", "--older-than", "7d"]) == 0
    assert left(tmp_path) == ["manifest.json", "new_gemm_layers.csv"]


def test_a_manifest_can_not_name_a_way_out(tmp_path):
    """Neither by its path, nor by a link to a file, nor by a link to a folder: not even to what lies beside it."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    leave(outside, "precious_gemm_overall.csv")
    leave(
        inside,
        "link_gemm_overall.csv",
        claimed=[
            "../outside/precious_gemm_overall.csv",
            str(outside / "precious_gemm_overall.csv"),
            "link_gemm_overall.csv",
            "to/precious_gemm_overall.csv",
        ],
    )
    (inside / "link_gemm_overall.csv").unlink()
    (inside / "link_gemm_overall.csv").symlink_to(outside / "precious_gemm_overall.csv")
    (inside / "to").symlink_to(outside)
    (outside / "manifest.json").unlink()
    for folder in (inside, tmp_path):
        assert commands.run(["clean", str(folder), "--yes"]) == 0
    assert (outside / "precious_gemm_overall.csv").exists()
    assert (inside / "link_gemm_overall.csv").is_symlink()


def test_a_run_that_began_while_somebody_was_asked_is_left_alone(tmp_path, capsys, monkeypatch):
    leave(tmp_path, "a_gemm_overall.csv", "run.log")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with (tmp_path / "run.log").open("ab") as log:
        monkeypatch.setattr(typer, "confirm", lambda text: fcntl.flock(log, fcntl.LOCK_EX) is None)
        assert commands.run(["clean", str(tmp_path)]) == 1
    assert (tmp_path / "a_gemm_overall.csv").exists()
    assert "is being measured into" in capsys.readouterr().err


def test_a_run_that_is_being_measured_is_left_alone(tmp_path, capsys):
    leave(tmp_path, "a_gemm_overall.csv", "run.log")
    with (tmp_path / "run.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / "a_gemm_overall.csv").exists()
    assert "is being measured into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kind", ","], "names no file ending"),
        (["--kind", "../x"], "names no file ending"),
        (["--older-than", "a week"], "is not an age"),
        (["--older-than", "-1d"], "is not an age"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, capsys, arguments, told):
    leave(tmp_path, "a_gemm_overall.csv")
    assert commands.run(["clean", str(tmp_path), "--yes", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert (tmp_path / "a_gemm_overall.csv").exists()


def test_where_there_is_nothing_it_says_so(tmp_path, capsys):
    assert commands.run(["clean", str(tmp_path)]) == 0
    assert "Nothing in or below" in capsys.readouterr().out
    assert commands.run(["clean", str(tmp_path / "missing")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{broken", "[", "", "[]", '{"files": 3}'])
def test_a_broken_manifest_names_nothing_and_is_told_of(tmp_path, capsys, content):
    leave(tmp_path / "whole", "b_gemm_overall.csv")
    leave(tmp_path / "broken", "a_gemm_overall.csv")
    (tmp_path / "broken" / "manifest.json").write_text(content)
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 1
    assert left(tmp_path) == [
        "broken/a_gemm_overall.csv",
        "broken/manifest.json",
        "whole/manifest.json",
    ]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: {tmp_path}/broken/manifest.json: does not repeat the identity of the record or the plan beside it: "
        "nothing is deleted"
    )


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("pngs", "Did you mean png?"),
        ("nsysrep", "Did you mean nsys-rep?"),
        ("profiles", "Possible: csv, md, ncu-rep"),
    ],
)
def test_clean_suggests_existing_kinds_for_an_unmatched_kind(tmp_path, capsys, kind, hint):
    leave(tmp_path, "time.png", "report.md", "record.json")
    assert commands.run(["clean", str(tmp_path), "--kind", kind, "--yes"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (
        "is to go: 1 file of the kind md, 1 file of the kind png, 1 file that a record is made of."
        in first
    )
    assert second.startswith(f"Nothing is of the kind {kind}. {hint}")


def test_a_folder_without_a_manifest_is_told_so(tmp_path, capsys):
    (tmp_path / "mine_gemm_layers.csv").write_text("1")
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    out = capsys.readouterr().out
    assert (
        f"Nothing in or below {tmp_path} is to go: no folder has the manifest.json of a run" in out
    )
    assert (tmp_path / "mine_gemm_layers.csv").exists()


def test_what_stays_is_counted_by_its_reasons(tmp_path, capsys):
    for run in ("a", "b"):
        leave(tmp_path / run, "new_gemm_layers.csv", "record.json", "time.png", "mine.csv")
    assert (
        commands.run(["clean", str(tmp_path), "--kind", "csv", "--older-than", "7d", "--dry-run"])
        == 0
    )
    assert capsys.readouterr().out == (
        f"Nothing in or below {tmp_path} is to go: 2 files of the kind png, 2 files that a record is made of, "
        "2 files that are not old enough, 2 files whose names perfexp does not give.\n"
    )


def test_files_that_are_gone_are_not_counted(tmp_path, capsys):
    leave(
        tmp_path, "record.json", "points.jsonl", claimed=["record.json", "points.jsonl", "gone.csv"]
    )
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert capsys.readouterr().out.endswith("is to go: 2 files that a record is made of.\n")


def test_a_run_under_way_is_not_told_to_be_nothing(tmp_path, capsys):
    leave(tmp_path, "a_gemm_overall.csv", "run.log")
    with (tmp_path / "run.log").open("ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    said = capsys.readouterr()
    assert "is being measured into" in said.err
    assert said.out == ""


@pytest.mark.parametrize("repeated", ["2e", ""])
def test_manifest_without_a_repeated_identity_is_not_trusted(tmp_path, capsys, repeated):
    leave(tmp_path, "a_gemm_overall.csv", repeated=repeated)
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 1
    assert (tmp_path / "a_gemm_overall.csv").exists()
    assert "does not repeat the identity" in capsys.readouterr().err


def test_the_manifest_of_a_data_set_is_not_perfexps(tmp_path):
    (tmp_path / "train_gemm_overall.csv").write_text("1")
    (tmp_path / "manifest.json").write_text(json.dumps({"files": ["train_gemm_overall.csv"]}))
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / "train_gemm_overall.csv").exists()


@pytest.mark.parametrize(
    "name", ["train.csv", "thesis.csv", "model.pt", "photos.sqlite", "train/train.nsys-rep"]
)
def test_forged_manifest_deletes_only_names_of_perfexp(tmp_path, name):
    leave(tmp_path, name)
    assert commands.run(["clean", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / name).exists()


def test_every_name_that_perfexp_gives_to_what_can_go_is_known(run_folder, tmp_path):
    endings = (*(f".{kind}" for kind in clean._KINDS.split(",")), ".png", ".md")
    key = Key(phase="inference_profile", input_size=(224, 512), batch_size=64, precision="amp_fp16")
    places = [place_of(key, keys, tmp_path) for keys in ([key], [key, key])]
    profilers = (
        Nsys(name="nsys", reports=["nvtx_gpu_proj_sum:rows=9"]),
        Ncu(name="ncu"),
        Torch(name="torch", memory=True),
    )
    profiles = {
        path.name for profiler in profilers for place in places for path in profiler.outputs(place)
    }
    rooflines = {
        path.name for place in places for path in files(place.file("_ncu_roofline")).values()
    }
    names = (
        profiles
        | rooflines
        | {
            name.rpartition("/")[2]
            for name in json.loads((run_folder / "details" / "manifest.json").read_bytes())["files"]
        }
    )
    can_go = {name for name in names if name.endswith(endings)}
    assert {name for name in can_go if not is_artifact(name)} == set()
    assert {"train.csv", "inference.csv", "record.json"}.isdisjoint(filter(is_artifact, can_go))
    assert len(can_go) > 20


def swapped_folder(folder, outside):
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(outside)


def swapped_file(folder, outside):
    (folder / "a_gemm_overall.csv").unlink()
    os.link(outside / "a_gemm_overall.csv", folder / "a_gemm_overall.csv")


def swapped_folder_above(folder, outside):
    folder.parent.rename(folder.parent.with_name("moved"))
    folder.parent.symlink_to(outside.parent)


@pytest.mark.parametrize("swap", [swapped_folder, swapped_file, swapped_folder_above])
def test_what_is_swapped_while_somebody_is_asked_is_not_deleted(
    tmp_path, capsys, monkeypatch, swap
):
    folder = leave(tmp_path / "below" / "x" / "run", "a_gemm_overall.csv")
    outside = leave(tmp_path / "else" / "run", "a_gemm_overall.csv")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda text: swap(folder, outside) is None)
    assert commands.run(["clean", str(tmp_path / "below")]) == 1
    assert (outside / "a_gemm_overall.csv").exists()
    assert "error: " in capsys.readouterr().err


def test_a_name_moves_no_cursor(tmp_path, capsys):
    leave(tmp_path / "a\x1b[2J\u202erun", "a_gemm_overall.csv")
    assert commands.run(["clean", str(tmp_path), "--dry-run"]) == 0
    assert "a?[2J?run" in capsys.readouterr().out


def test_clean_deletes_tables_and_keeps_the_details_of_a_run(run_folder, tmp_path, capsys):
    shutil.copytree(run_folder, tmp_path / "run")
    before = left(tmp_path)
    assert commands.run(["clean", str(tmp_path), "--kind", "csv,json,jsonl,log", "--yes"]) == 0
    gone = {name for name in before if name.endswith(".csv")}
    assert gone
    assert set(left(tmp_path)) == set(before) - gone
    assert "run/details/points.jsonl" in left(tmp_path)
