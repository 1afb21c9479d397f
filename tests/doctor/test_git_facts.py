"""Git facts: right for a clean and a changed checkout, and nothing that a repository brings along is run for them."""

import os
import subprocess

import pytest

from perfexp.doctor.environment import git_facts

IDENTITY = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")


def git(folder, *arguments):
    done = subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A clean repository of two files, in which the test stands."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "one.txt").write_text("one\n")
    (folder / "two.txt").write_text("two\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    return folder


def touch(file):
    """Make a file look changed, so that git has to read it."""
    os.utime(file, ns=(10**18, 10**18))


def test_a_clean_checkout_is_not_dirty_and_a_changed_one_is(checkout):
    assert git_facts() == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    touch(checkout / "one.txt")
    (checkout / "untracked").write_text("")
    assert git_facts()["dirty"] is False
    (checkout / "one.txt").write_text("another\n")
    assert git_facts()["dirty"] is True


def test_a_staged_change_is_dirty_also_from_a_folder_below(checkout, monkeypatch):
    (checkout / "below").mkdir()
    monkeypatch.chdir(checkout / "below")
    assert git_facts()["dirty"] is False
    (checkout / "two.txt").write_text("another\n")
    git(checkout, "add", "two.txt")
    assert git_facts()["dirty"] is True


def test_a_work_tree_has_its_own_commit_and_changes(checkout, tmp_path, monkeypatch):
    git(checkout, "worktree", "add", "-q", str(tmp_path / "other"))
    (tmp_path / "other" / "one.txt").write_text("another\n")
    assert git_facts()["dirty"] is False
    monkeypatch.chdir(tmp_path / "other")
    assert git_facts() == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": True}
    git(tmp_path / "other", "commit", "-qam", "second")
    assert git_facts() == {
        "commit": git(tmp_path / "other", "rev-parse", "HEAD"),
        "dirty": False,
    }


@pytest.mark.parametrize("setting", ["core.autocrlf=true", "core.fileMode=false"])
def test_files_are_compared_as_the_repository_says(checkout, setting):
    git(checkout, "config", *setting.split("="))
    (checkout / "one.txt").unlink()
    git(checkout, "checkout", "one.txt")  # with the line ends that the setting asks for
    touch(checkout / "one.txt")
    (checkout / "two.txt").chmod(0o755 if "fileMode" in setting else 0o644)
    assert git_facts()["dirty"] is False


def test_a_split_index_and_sha256_are_read(checkout, tmp_path, monkeypatch):
    git(checkout, "update-index", "--split-index")
    assert git_facts()["dirty"] is False
    folder = tmp_path / "sha256"
    folder.mkdir()
    git(folder, "init", "-q", "--object-format=sha256")
    (folder / "file").write_text("")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    monkeypatch.chdir(folder)
    assert git_facts()["dirty"] is False
    (folder / "file").write_text("changed")
    assert git_facts()["dirty"] is True


def test_outside_of_git_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert git_facts() is None


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("filters", [False, True])
def test_nothing_that_a_repository_configures_is_run(checkout, tmp_path, change, filters):
    """Its monitor, filter, aliases, hooks and remotes would each leave a file behind; git needs filters to compare."""
    canaries = tmp_path / "canaries"
    canaries.mkdir()

    def program(name):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\ntouch {canaries}/{name}\ncat\n")
        file.chmod(0o755)
        return str(file)

    (checkout / ".gitattributes").write_text("*.txt filter=own diff=own\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "attributes")
    for hook in ("post-index-change", "pre-auto-gc", "fsmonitor-watchman", "reference-transaction"):
        (checkout / ".git" / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {canaries}/{hook}\n")
        (checkout / ".git" / "hooks" / hook).chmod(0o755)
    settings = {
        "core.fsmonitor": program("monitor"),
        "diff.own.textconv": program("textconv"),
        "diff.external": program("external"),
        "core.sshCommand": program("ssh"),
        "core.pager": program("pager"),
        "core.editor": program("editor"),
        "alias.status": f"!{program('alias')}",
        "alias.rev-parse": f"!{program('alias')}",
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{program('remote')}",
        "protocol.ext.allow": "always",
    }
    if filters:
        included = tmp_path / "included"
        for key in ("clean", "process"):
            git(checkout, "config", "-f", str(included), f"filter.own.{key}", program(key))
        settings["include.path"] = str(included)
    for key, value in settings.items():
        git(checkout, "config", key, value)
    touch(checkout / "one.txt")
    if change:
        (checkout / "two.txt").write_text("another\n")
    index = checkout / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    assert git_facts()["dirty"] is (None if filters else change)
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before
    assert list(canaries.iterdir()) == []
