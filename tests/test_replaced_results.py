"""Results that `--overwrite` replaces: they are back, or gone, after a process that was killed at any step."""

import shutil
from pathlib import Path

import pytest

from perfexp.errors import UserError
from perfexp.records.paths import RunPaths

FILES = {"points.jsonl": b"1\n", "record.json": b"{}", "checkpoints/net_images_best.pt": b"w"}


class Killed(BaseException):
    """A kill, after which nothing of the process runs."""


@pytest.fixture
def folder(tmp_path):
    paths = RunPaths(tmp_path / "x")
    paths.create()
    (paths.root / "checkpoints").mkdir()
    paths.claim(*(paths.root / name for name in FILES))
    for name, content in FILES.items():
        (paths.root / name).write_bytes(content)
    (paths.root / "mine.txt").write_text("a foreign file")
    return paths.root


def found(folder):
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def killed_at(step, monkeypatch, act):
    """Call a function in which the nth change of the file system does not happen; returns whether it came so far."""
    left = [step]

    def counted(change):
        def changed(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return change(*arguments, **options)

        return changed

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink", "mkdir"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        patch.setattr("os.replace", counted(shutil.os.replace))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("step", range(1, 25))
@pytest.mark.parametrize("is_refused", [False, True])
def test_nothing_measured_means_that_earlier_results_come_back(folder, monkeypatch, step, is_refused):
    uid = RunPaths(folder).uid

    def act():
        paths = RunPaths(folder)
        paths.move_results(None)
        assert not found(folder)
        if is_refused:
            (folder / "points.jsonl").write_bytes(b"")  # of the run that would have replaced them
            paths.restore_results()

    was_killed = killed_at(step, monkeypatch, act)
    for _ in range(2):  # the second time there is nothing to do
        RunPaths(folder).recover_results()
        assert found(folder) == FILES
        assert RunPaths(folder).uid == uid
        assert set(RunPaths(folder).claimed()) >= {*FILES}
    left = {path.name for path in folder.iterdir() if path.is_dir() or path.suffix == ".txt"}
    assert left == {"checkpoints", "mine.txt"}
    assert was_killed or step > 8


@pytest.mark.parametrize("step", range(1, 6))
def test_replaced_results_are_gone_or_whole(folder, monkeypatch, step):
    paths = RunPaths(folder)
    paths.move_results(None)
    was_killed = killed_at(step, monkeypatch, paths.delete_moved_results)
    RunPaths(folder).recover_results()
    assert found(folder) == (FILES if step == 1 else {})
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert was_killed or step > 3


@pytest.mark.parametrize("name", ["../y", ".replaced-xyz", "", 3, ".replaced-0123456"])
def test_a_manifest_names_no_other_folder(folder, name):
    other = folder / str(name) if name else folder
    other.mkdir(parents=True, exist_ok=True)
    paths = RunPaths(folder)
    paths._write({**paths._manifest(), "replaced": name})
    paths.recover_results()
    assert other.is_dir()
    assert found(folder) == FILES


def test_only_results_come_back_and_not_through_a_link(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "home").symlink_to(tmp_path / "elsewhere")
    aside = folder / ".replaced-01234567"
    (aside / "home").mkdir(parents=True)
    (aside / "home" / "net_images_best.pt").write_text("evil")
    (aside / "mine.txt").write_text("evil")
    paths = RunPaths(folder)
    paths._write({**paths._manifest(), "replaced": aside.name})
    paths.recover_results()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (folder / "mine.txt").read_text() == "a foreign file"
    assert not aside.exists()


def test_checkpoints_that_are_a_link_are_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(UserError, match="checkpoints is a link"):
        RunPaths(tmp_path / "x").create()


def test_a_link_is_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "record.json").write_text("not ours")
    for kind in ("replaced", "discarded"):
        (folder / f".{kind}-01234567").symlink_to(tmp_path / "elsewhere")
    paths = RunPaths(folder)
    paths._write({**paths._manifest(), "replaced": ".replaced-01234567"})
    with pytest.raises(UserError, match=r"replaced-01234567 is a link"):
        paths.recover_results()
    assert found(folder) == FILES
    assert (tmp_path / "elsewhere" / "record.json").read_text() == "not ours"
