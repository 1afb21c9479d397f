"""Lists of commands within a limit of time, as `tools/sequence.py` runs them."""

from contextlib import suppress

import psutil
import pytest

from tools import sequence

LISTS = sorted((sequence.ROOT / "tools" / "sequences").glob("*.txt"))


def ran(tmp_path, text, capsys, **options):
    path = tmp_path / "list.txt"
    path.write_text(text)
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    code = sequence.main([str(path), "--out", str(tmp_path / "out"), *flags])
    told = [
        line.rpartition(",")[0] for line in capsys.readouterr().out.splitlines() if ": " in line
    ]
    return code, told, tmp_path / "out"


def runs(file):
    """Whether the process whose number stands in a file has not ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(file.read_text())).status() != psutil.STATUS_ZOMBIE
    return False


def test_each_step_has_a_folder_and_tells_its_exit_code(tmp_path, capsys):
    text = "# a comment\n\ngood 1 echo $((40 +\\\n 2)); pwd\nbad 30 ls missing\n"
    code, told, out = ran(tmp_path, text, capsys)
    assert (code, told) == (1, ["good: code 0", "bad: code 2"])
    assert (out / "good" / "printed.txt").read_text().splitlines()[1:] == ["42", str(out / "good")]


def test_step_that_does_not_fit_is_skipped_later_ones_run(tmp_path, capsys):
    code, told, out = ran(tmp_path, "long 1000 touch here\nshort 30 true\n", capsys, seconds=100)
    assert (code, told) == (1, ["long: left out", "short: code 0"])
    assert not (out / "long").exists()


@pytest.mark.parametrize(
    ("limit", "after"), [({"seconds": 20}, "next: left out"), ({}, "next: code 0")]
)
def test_overlong_step_is_ended_with_all_its_processes(tmp_path, capsys, monkeypatch, limit, after):
    monkeypatch.setattr(sequence, "GRACE_SECONDS", 0.3)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1000)"
    text = f"endless 1 $PYTHON -c '{stubborn}' & echo $! > child; sleep 1000\nnext 30 true\n"
    code, told, out = ran(tmp_path, text, capsys, **limit)
    assert (code, told) == (1, ["endless: out of time", after])
    assert not runs(out / "endless" / "child")


def test_what_a_step_leaves_running_is_ended_before_the_next_one(tmp_path, capsys):
    code, _, out = ran(tmp_path, "left 30 sleep 1000 & echo $! > child\n", capsys)
    assert code == 0
    assert not runs(out / "left" / "child")


def test_some_of_the_steps(tmp_path, capsys):
    code, told, _ = ran(tmp_path, "one 30 false\ntwo 30 true\n", capsys, only="two")
    assert (code, told) == (0, ["two: code 0"])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("name command\n", {}, "no name, seconds and command: name command"),
        ("name soon command\n", {}, "no name, seconds and command"),
        ("name 1 true\nname 1 true\n", {}, "there twice: name"),
        ("name 1 true\n", {"only": "other"}, "has no other"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path, capsys, text, options, message):
    with pytest.raises(SystemExit):
        ran(tmp_path, text, capsys, **options)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_the_lists_are_lists(path):
    steps = sequence.read(path)
    assert steps and all(step.seconds <= 600 for step in steps)
    for step in steps:
        assert "$PERFEXP" in step.command or "$PYTHON" in step.command
