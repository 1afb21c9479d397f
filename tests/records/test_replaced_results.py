"""Results that `--overwrite` replaces: old or new ones are whole after a process that was killed at any step."""

import shutil
from pathlib import Path

import pytest

from perfexp.errors import UserError
from perfexp.records.folders import below
from perfexp.records.paths import RunPaths

OLD = {
    "details/points.jsonl": b"1\n",
    "record.json": b"{}",
    "time.png": b"p",
    "checkpoints/net_images_best.pt": b"w",
}
NEW = {
    "details/points.jsonl": b"2\n",
    "record.json": b"[]",
    "checkpoints/other_images_best.pt": b"v",
}


class Killed(BaseException):
    """A kill, after which nothing of the process runs."""


def write(paths, files):
    paths.create()
    (paths.root / "checkpoints").mkdir(exist_ok=True)
    paths.claim(*(paths.root / name for name in files))
    for name, content in files.items():
        (paths.root / name).write_bytes(content)


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that has a foreign file as well."""
    write(RunPaths(tmp_path / "x"), OLD)
    (tmp_path / "x" / "mine.txt").write_text("a foreign file")
    return tmp_path / "x"


@pytest.fixture
def replacement(folder):
    """The complete replacement of the run."""
    paths = RunPaths(folder).replacement()
    write(paths, NEW)
    return paths


def found(folder):
    return {
        name: (folder / name).read_bytes() for name in {**OLD, **NEW} if (folder / name).exists()
    }


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
        for name in ("rename", "replace", "unlink", "mkdir", "rmdir"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("step", range(1, 25))
def test_complete_replacement_survives_a_kill_at_any_step(folder, replacement, monkeypatch, step):
    uid = replacement.uid
    was_killed = killed_at(step, monkeypatch, RunPaths(folder).put_in_place)
    assert (folder / "record.json").read_bytes() in (OLD["record.json"], NEW["record.json"])
    for _ in range(2):  # the second time there is nothing to do
        RunPaths(folder).put_in_place()
        assert found(folder) == NEW
        assert RunPaths(folder).uid == uid
        assert set(RunPaths(folder).claimed()) >= {*NEW}
    assert (folder / "mine.txt").read_text() == "a foreign file"
    assert not [
        path
        for path in folder.rglob("*")
        if path.name in NEW and path.parent.name == ".replacement"
    ]
    assert was_killed or step > 8


def test_what_is_not_complete_changes_nothing_and_is_not_a_run(folder, replacement):
    replacement.record.unlink()
    replacement.plan.write_text("{}")
    RunPaths(folder).plan.write_text("{}")
    RunPaths(folder).put_in_place()
    assert found(folder) == OLD
    assert list(below(folder, "plan.yaml", refused=pytest.fail)) == [
        folder / "details" / "plan.yaml"
    ]
    replacement.remove()
    assert not replacement.root.exists()


def test_a_foreign_file_with_the_name_of_a_new_one_stays(folder, replacement):
    (folder / "memory.png").write_text("mine")
    replacement.claim(replacement.root / "memory.png")
    (replacement.root / "memory.png").write_text("new")
    RunPaths(folder).put_in_place()
    assert (folder / "memory.png").read_text() == "mine"
    assert found(folder) == NEW


def test_both_have_one_lock(folder, replacement):
    with replacement.locked(), pytest.raises(UserError, match="Another perfexp is measuring"):
        RunPaths(folder).locked().__enter__()


def test_only_results_are_taken_and_not_through_a_link(folder, replacement, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "home").symlink_to(tmp_path / "elsewhere")
    (replacement.root / "home").mkdir()
    names = ("home/net_images_best.pt", "mine.txt", "../y.png")
    for name in names:
        (replacement.root / name).write_text("evil")
    replacement._write({**replacement._manifest(), "files": [*replacement.claimed(), *names]})
    RunPaths(folder).put_in_place()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (folder / "mine.txt").read_text() == "a foreign file"
    assert found(folder) == NEW


def test_checkpoints_that_are_a_link_are_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(UserError, match="checkpoints is a link"):
        RunPaths(tmp_path / "x").create()


@pytest.mark.parametrize("linked", [".", "checkpoints"])
def test_a_link_is_not_followed(folder, replacement, tmp_path, linked):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "record.json").write_text("not ours")
    (tmp_path / "elsewhere" / "other_images_best.pt").write_text("not ours")
    place = replacement.root / linked
    shutil.rmtree(place)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{place.name} is a link"):
        RunPaths(folder).put_in_place()
    assert found(folder) == OLD
    assert {path.read_text() for path in (tmp_path / "elsewhere").iterdir()} == {"not ours"}
