"""The user's key: made once, for this user alone, and never needed."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from perfexp.host import signature


@pytest.fixture
def key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "perfexp" / "key"


def test_a_key_is_made_once_and_for_its_user_alone(key):
    with ThreadPoolExecutor(8) as pool:
        [mark] = set(pool.map(signature.of, [b"content"] * 8))
    assert (len(key.read_bytes()), stat.S_IMODE(key.stat().st_mode)) == (32, 0o600)
    assert os.listdir(key.parent) == ["key"]  # noqa: PTH208
    assert signature.is_of(mark, b"content")
    assert not signature.is_of(mark, b"Content")


def test_two_first_runs_at_once_have_one_key(key):
    code = "from perfexp.host import signature; print(signature.of(b'x'))"
    command = [sys.executable, "-c", code]
    first = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    assert len({process.communicate(timeout=60)[0] for process in first}) == 1
    assert signature.is_of(signature.of(b"x"), b"x")


@pytest.mark.parametrize("mark", [None, "", 5, "\ud800", "0" * 64, ["x"]])
def test_what_is_no_signature_signs_nothing(key, mark):
    assert not signature.is_of(mark, b"content")


def _readable(key):
    key.chmod(0o640)


def _short(key):
    key.write_bytes(b"x")


def _linked(key):
    key.rename(key.with_name("other"))
    key.symlink_to("other")


def _of_another_user(key):
    if os.getuid():
        pytest.skip("only root can give files away")
    os.chown(key, 12345, -1)


@pytest.mark.parametrize("change", [_readable, _short, _linked, _of_another_user])
def test_a_key_that_may_be_somebody_elses_signs_nothing(key, change):
    mark = signature.of(b"content")
    change(key)
    assert signature.of(b"content") is None
    assert not signature.is_of(mark, b"content")


def test_where_no_key_can_be_kept_nothing_is_signed(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert signature.of(b"content") is None
