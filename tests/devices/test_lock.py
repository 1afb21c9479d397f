"""The lock of a device: one holder, and a place that nobody else can have prepared."""

import os

import pytest

from perfexp.devices import lock
from perfexp.errors import UserError
from perfexp.host import locks


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    monkeypatch.setattr(locks, "TEMPORARY", tmp_path)
    return lock.lock_path("device").parent


def hold(wait=False):
    return lock.held("device", wait=wait, purpose="outputs/x", waiting=print)


def test_the_holder_is_named_as_long_as_it_holds():
    assert lock.holder("device") is None
    with hold():
        assert lock.holder("device") == f"process {os.getpid()} measures outputs/x"
        assert lock.holder("another") is None
    assert lock.holder("device") is None


def test_a_device_in_use_is_refused():
    with (
        hold(),
        pytest.raises(UserError, match=f"in use: process {os.getpid()} measures outputs/x"),
        hold(),
    ):
        pass


def test_the_place_does_not_follow_the_environment(monkeypatch, tmp_path):
    before = lock.lock_path("device")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    assert lock.lock_path("device") == before


def test_a_folder_that_others_can_write_is_not_trusted(temporary):
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(UserError, match="not a folder of yours alone"), hold():
        pass


def test_a_link_in_the_place_of_the_folder_is_not_followed(temporary, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    temporary.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not a folder of yours alone"), hold():
        pass


def test_a_link_in_the_place_of_the_file_is_not_followed(temporary, tmp_path):
    temporary.mkdir(mode=0o700)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    lock.lock_path("device").symlink_to(precious)
    with pytest.raises(UserError, match="can't be kept"), hold():
        pass
    assert precious.read_text() == "precious"


def test_a_pipe_in_the_place_of_the_file_makes_nobody_wait(temporary):
    temporary.mkdir(mode=0o700)
    os.mkfifo(lock.lock_path("device"), 0o600)
    with pytest.raises(UserError, match="not a file"):
        lock.holder("device")


def test_what_another_process_wrote_can_not_move_the_cursor(temporary):
    with lock.held("device", wait=False, purpose="x\x1b[2J", waiting=print):
        assert lock.holder("device").endswith("measures x?[2J")
