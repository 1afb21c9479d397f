"""perfexp clean: delete optional run files after a confirmation; measurements stay."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from perfexp.commands.app import Json, app, echo, emit, oldest
from perfexp.errors import UserError, did_you_mean
from perfexp.records import units
from perfexp.records.folders import below
from perfexp.records.paths import (
    CHECKPOINTS,
    DETAILS,
    MANIFEST,
    RunPaths,
    SweepPaths,
    home_of,
    is_artifact,
    is_own_place,
)
from perfexp.run.preparation import is_of_perfexp

_DEFAULT = Path("outputs")
_KINDS = "csv,pth,pt,nsys-rep,qdrep,qdstrm,sqlite,ncu-rep,pt.trace.json.gz"
#: Essential run files; everything else can be made from them, or measured again.
_KEPT = {
    *("record.json", "points.jsonl", "plan.yaml", "expected.json", "environment.json", "run.log"),
    *("sweep.json", "multirun.yaml", "jobs.jsonl", MANIFEST, "mlflow.db"),
}
#: Reasons why files stay: a run in progress; another kind, followed by its ending.
_BUSY, _OTHER = "being measured", "of the kind "


class _ListedFile(NamedTuple):
    """A file to delete, with the status of the file and its folder at listing time.

    Deleting compares them again, so that a replaced file stays.
    """

    path: Path
    about: os.stat_result
    home: os.stat_result


@app.command()
def clean(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or any folder above runs.")
    ] = _DEFAULT,
    kind: Annotated[
        str, typer.Option(help="Endings of the files to delete, separated by commas.")
    ] = _KINDS,
    older_than: Annotated[
        str | None,
        typer.Option(help="Only files last written at least this long ago: 12h, 7d, 2w."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Delete tables, checkpoints and profiles that perfexp wrote.

    Records, plans and tracking stores are never deleted. Only regular files in run and sweep
    folders are deleted, and only if the folder's manifest and perfexp's naming rules name them.

    Example: perfexp clean outputs --kind nsys-rep,sqlite --older-than 7d
    """
    endings = _endings(kind)
    latest = oldest("--older-than", older_than)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder.")
    # the user did not type the default, and a link could lead anywhere
    if folder == _DEFAULT and folder.is_symlink():
        raise UserError(f"{folder} is a link: name the folder to clean.")
    refused: list[OSError] = []
    stays: Counter[str] = Counter()
    files = sorted(_found(folder, endings, latest, refused, stays))
    for error in refused:
        echo(f"error: {error.filename}: {error.strerror}", err=True)
    size = units.format_bytes(sum(file.about.st_size for file in files))
    total = f"{units.counted(len(files), 'file')}, {size}"
    if not as_json:
        for file in files:
            echo(f"{units.format_bytes(file.about.st_size):>10}  {file.path}")
    if files and not (yes or dry_run):
        if as_json or not sys.stdin.isatty():
            why = "--json asks nothing" if as_json else "stdin is not a terminal"
            raise UserError(f"{why}; pass --yes, or --dry-run to preview.")
        if not typer.confirm(f"Delete {total}?"):
            echo("Nothing was deleted.")
            raise typer.Exit(1)
    listed = []
    num_deleted = 0
    for file in files:
        is_deleted = not dry_run and _is_deleted(file)
        num_deleted += is_deleted
        listed.append({"file": file.path, "bytes": file.about.st_size, "deleted": is_deleted})
    done = f"{total} would go." if dry_run else f"Deleted {num_deleted} of {total}."
    emit(
        {"files": listed},
        [done] if files else _why_nothing(folder, endings, stays),
        as_json=as_json,
    )
    raise typer.Exit(int(bool(refused) or (not dry_run and num_deleted < len(files))))


def _endings(kind: str) -> list[str]:
    """Return file endings, such as `.csv`, from a list with commas.

    Raises:
        UserError: a word cannot be an ending.
    """
    texts = filter(None, map(str.strip, kind.split(",")))
    endings = dict.fromkeys("." + text.lstrip("*.").lower() for text in texts)
    if not endings or not all(
        re.fullmatch(r"\.[a-z0-9][a-z0-9._-]*", ending) for ending in endings
    ):
        raise UserError(
            f"--kind {kind!r} names no file ending; give for example --kind csv,sqlite."
        )
    return list(endings)


def _found(
    folder: Path,
    endings: Collection[str],
    latest: float,
    refused: list[OSError],
    stays: Counter[str],
) -> Iterator[_ListedFile]:
    """Yield the deletable files below a folder.

    A manifest lists them, they are regular files in its folder, their ending matches, and they are
    old enough.

    Args:
        endings: file name endings, such as `.csv`.
        latest: newest modification time to delete, in seconds since the epoch.
        refused: collects errors.
        stays: counts the other files by the reason why they stay.
    """
    for manifest in below(folder, MANIFEST, refused=refused.append):
        run = RunPaths(home_of(manifest))
        if not is_of_perfexp(run):
            # a manifest beside a plan or a record must carry their identity
            if run.plan.exists() or run.record.exists():
                why = (
                    "does not repeat the identity of the record or the plan beside it: "
                    "nothing is deleted"
                )
                refused.append(OSError(errno.EBADMSG, why, str(manifest)))
        elif _is_in_use(run):
            echo(f"left alone: {run.root} is being measured into", err=True)
            stays[_BUSY] += 1
        else:
            for claimed in run.claimed():
                path = run.root / claimed
                try:
                    file = _ListedFile(path, path.lstat(), path.parent.lstat())
                except (OSError, ValueError):
                    continue
                if why := _why_it_stays(file, claimed, endings, latest):
                    stays[why] += 1
                else:
                    yield file


def _is_in_use(run: RunPaths) -> bool:
    """Return whether a run or sweep is being measured into its folder."""
    return run.in_use() or SweepPaths(run.root).in_use()


def _why_it_stays(file: _ListedFile, claimed: str, endings: Collection[str], latest: float) -> str:
    """Return why a file in a manifest is not deleted; empty if it is."""
    is_plain = stat.S_ISREG(file.about.st_mode) and stat.S_ISDIR(file.home.st_mode)
    name = file.path.name
    if not is_own_place(claimed) or not is_plain:
        return "that are links or lie elsewhere"
    if name in _KEPT:
        return "that a record is made of"
    if not name.lower().endswith(tuple(endings)):
        return f"{_OTHER}{file.path.suffix.lower().removeprefix('.') or 'none'}"
    if not is_artifact(name):
        return "whose names perfexp does not give"
    if file.about.st_mtime > latest:
        return "that are not old enough"
    return ""


def _why_nothing(folder: Path, endings: Collection[str], stays: Mapping[str, int]) -> Iterator[str]:
    """Yield why nothing is deleted: file counts by reason.

    For a kind without files, also suggest the nearest kind.
    """
    if set(stays) == {_BUSY}:  # already reported
        return
    reasons = []
    known_kinds = set(_KINDS.split(","))
    for why, count in sorted(stays.items()):
        if why != _BUSY:
            reasons.append(f"{units.counted(count, 'file')} {why}")
        if why.startswith(_OTHER):
            known_kinds.add(why.removeprefix(_OTHER))
    reason = ", ".join(reasons) or f"no folder has the {MANIFEST} of a run or a sweep"
    yield f"Nothing in or below {folder} is to go: {reason}."
    for kind in {ending.removeprefix(".") for ending in endings} - known_kinds:
        yield f"Nothing is of the kind {kind}. {did_you_mean(kind, known_kinds)}".rstrip()


def _is_deleted(file: _ListedFile) -> bool:
    """Delete a listed file and return whether that worked; otherwise print why not.

    The file stays if it or its folder was replaced, or if its run is being measured.
    """
    try:
        # an open folder cannot be replaced by a link before the file is deleted
        home = os.open(
            file.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            current = os.stat(file.path.name, dir_fd=home, follow_symlinks=False)
            if not (
                os.path.samestat(os.fstat(home), file.home)
                and os.path.samestat(current, file.about)
            ):
                raise OSError(errno.ESTALE, "is not what was listed")
            folder = file.path.parent
            is_inner = folder.name in (CHECKPOINTS, DETAILS)
            if _is_in_use(RunPaths(folder.parent if is_inner else folder)):
                raise OSError(errno.EBUSY, "is being measured into")
            os.unlink(file.path.name, dir_fd=home)
        finally:
            os.close(home)
    except OSError as error:
        echo(f"error: {file.path}: {error.strerror}", err=True)
        return False
    return True
