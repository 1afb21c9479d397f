"""`perfexp list runs`: what it lists, in which order, and what it leaves out."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from perfexp import commands
from perfexp.commands import list_runs
from perfexp.main import main
from perfexp.records.grid import Grid
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, SweepMembership
from perfexp.records.sweep_record import Sweep

pytestmark = pytest.mark.usefixtures("quick_commands")

FAKE = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed")
PLAN = {"model": {"name": "resnet18"}, "mode": {"name": "inference"}, "batch_size": 1}


def listed(capsys, *words):
    assert commands.run(["list", "runs", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def ago(**age):
    return (datetime.now(UTC) - timedelta(**age)).isoformat(timespec="milliseconds")


@pytest.fixture
def three(make_record, leave_run, tmp_path):
    """Three runs that ended some time ago, in another order than their names."""
    for name, model, batch, days in (
        ("a", "resnet18", 1, 1),
        ("b", "vgg16", [1, 8], 9),
        ("c", "resnet50", 8, 3),
    ):
        plan = PLAN | {"model": {"name": model}, "batch_size": batch}
        leave_run(
            make_record(name=name, uid=name, ended=ago(days=days), plan=plan), tmp_path / name
        )
    return tmp_path


def test_the_last_run_is_at_the_end(three, capsys):
    assert [one["folder"] for one in listed(capsys, three)] == [str(three / name) for name in "bca"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--since", "7d"], "ca"),
        (["--since", "1w", "model=resnet18"], "a"),
        (["model=resnet*"], "ca"),
        (["model=VGG16,resnet50"], "bc"),
        (["batch_size=8"], "bc"),
        (["model=resnet18", "batch_size=8"], ""),
    ],
)
def test_runs_are_chosen_by_age_and_by_the_values_of_their_plans(three, capsys, words, names):
    assert [one["folder"][-1] for one in listed(capsys, three, *words)] == list(names)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--since", "soon"], "--since 'soon' is not an age"),
        (["--since", ""], "--since '' is not an age"),
        (["modle=vgg16"], "No plan has the key 'modle'. Did you mean mode or model?"),
        (["other"], "list runs reads one folder: leave out other"),
    ],
)
def test_wrong_words_are_named(three, capsys, words, told):
    assert commands.run(["list", "runs", str(three), *words]) == 2
    assert told in capsys.readouterr().err


def test_since_is_for_runs(capsys):
    assert commands.run(["list", "models", "--since", "7d"]) == 2
    assert "perfexp list runs --since 7d" in capsys.readouterr().err


def test_listed_figure_is_the_median_that_show_prints(tmp_path, capsys):
    assert main([*FAKE, "processes=3", f"output_dir={tmp_path / 'run'}"]) == 0
    shown = Record.load(tmp_path / "run")
    capsys.readouterr()
    [one] = listed(capsys, tmp_path)
    assert commands.run(["show", str(tmp_path / "run"), "--json"]) == 0
    point = json.loads(capsys.readouterr().out)["runs"][0]["points"][0]
    assert one["time_kind"] == "GPU time"
    assert one["least_seconds"] == one["most_seconds"]
    assert one["least_seconds"] == pytest.approx(point["median_ms"] / 1e3, rel=1e-6)
    assert one["status"] == shown.status.value == "ok"
    assert commands.run(["list", "runs", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["ended", "folder", "measured", "median", "time", "status"]
    assert "fake · inference" in line
    assert "GPU time" in line


def test_sweep_is_one_line_with_the_range_and_states_of_its_runs(
    make_record, leave_run, tmp_path, capsys
):
    for job, size in enumerate((64, 128, 256)):
        membership = SweepMembership(uid="s", job=job, jobs=4)
        record = make_record(
            sizes=(size,),
            uid=f"{job}",
            ended=ago(hours=9 - job),
            sweep=membership,
            plan={"batch_size": job + 1},
        )
        record.status = record.points[0].status if job < 2 else "oom"
        leave_run(record, tmp_path / "s" / str(job))
    sweep = Sweep(uid="s", name="input_size", started=ago(hours=10), jobs=4)
    (tmp_path / "s" / "sweep.json").write_bytes(sweep.to_json())
    [one] = listed(capsys, tmp_path)
    assert (one["folder"], one["measured"]) == (str(tmp_path / "s"), "sweep over input_size")
    assert one["status"] == "2 of 4 ok, 1 oom"
    [chosen] = listed(capsys, tmp_path, "batch_size=1")
    assert chosen["status"] == "1 of 1 ok", "the others were not looked for"
    assert one["least_seconds"] < one["most_seconds"]
    assert datetime.fromisoformat(one["ended"]) > datetime.now(UTC) - timedelta(hours=7, minutes=1)


def test_a_run_without_a_record_is_interrupted_or_running(tmp_path, capsys):
    assert main([*FAKE, f"output_dir={tmp_path / 'run'}"]) == 0
    (tmp_path / "run" / "record.json").unlink()
    capsys.readouterr()
    [one] = listed(capsys, tmp_path)
    assert (one["status"], one["least_seconds"]) == ("interrupted", None)
    with RunPaths(tmp_path / "run").locked():
        assert listed(capsys, tmp_path)[0]["status"] == "running"


@pytest.mark.parametrize(
    "damage",
    [
        {"points": 3},
        {"points": [{"key": {}}]},
        {"ended": "2026-11-28T10:00:00"},
        {"ended": None},
        {"plan": []},
        {"points": [{"key": None, "series": [{"name": "latency", "samples": ["x"]}]}]},
    ],
)
def test_what_is_not_a_record_is_named_and_the_others_are_listed(three, capsys, damage):
    file = three / "a" / "record.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | damage))
    assert commands.run(["list", "runs", str(three)]) == 0
    printed = capsys.readouterr()
    assert "unreadable " in printed.err
    assert "resnet50" in printed.out


def test_nothing_is_listed_of_a_folder_without_runs(tmp_path, capsys):
    assert commands.run(["list", "runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert commands.run(["list", "runs", str(tmp_path / "gone")]) == 2


def test_narrow_terminal_lists_two_lines_per_run():
    row = {
        "ended": "2026-01-05 10:30",
        "folder": "outputs/a",
        "measured": "vgg16 · train",
        "time": "",
        "status": "ok",
    }
    table = list_runs.content([row], 80)
    assert isinstance(table, Grid)
    assert [column.title for column in table.columns] == list(row)
    assert list_runs.content([row], 40) == ["outputs/a", "  2026-01-05 10:30  vgg16 · train  ok"]
