"""perfexp clean: delete optional files of runs, after a confirmation; measurements stay."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from perfexp.commands.app import Json, app, echo, emit
from perfexp.errors import UserError, did_you_mean
from perfexp.orchestration.preparation import is_of_perfexp
from perfexp.records import units
from perfexp.records.folders import below
from perfexp.records.paths import CHECKPOINTS, RunPaths, SweepPaths, is_artifact

_MANIFEST, _DEFAULT = "manifest.json", Path("outputs")
_KINDS = "csv,pth,pt,nsys-rep,qdrep,qdstrm,sqlite,ncu-rep,pt.trace.json.gz"
#: Files that a run is made of; everything else can be made from them, or measured again.
_KEPT = {
    *("record.json", "points.jsonl", "plan.yaml", "expected.json", "environment.json", "run.log"),
    *("sweep.json", "multirun.yaml", "jobs.jsonl", _MANIFEST, "mlflow.db"),
}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class _File(NamedTuple):
    """A file to delete, as it and its folder were when it was listed."""

    path: Path
    about: os.stat_result
    home: os.stat_result


@dataclass(kw_only=True)
class _Seen:
    """Numbers of folders with a manifest, and of files that stay, by the reason; `others` by their endings.

    `young` has the modification times of files that are not old enough, in seconds since the epoch.
    """

    folders: int = 0
    busy: int = 0
    others: Counter[str] = field(default_factory=Counter)
    young: list[float] = field(default_factory=list)
    stays: Counter[str] = field(default_factory=Counter)


@app.command()
def clean(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or any folder above runs.")] = _DEFAULT,
    kind: Annotated[str, typer.Option(help="Endings of the files to delete, separated by commas.")] = _KINDS,
    older_than: Annotated[
        str | None, typer.Option(help="Only files last written at least this long ago: 12h, 7d, 2w.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Delete tables, checkpoints and profiles that perfexp wrote; never a record, a plan or a tracking store.

    Deletes only regular files in the folder of a run or a sweep that are named by its manifest and by perfexp's rules.

    Example: perfexp clean outputs --kind nsys-rep,sqlite --older-than 7d
    """
    endings = _endings(kind)
    age_seconds = _age_seconds(older_than)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder.")
    # the user did not type the default, and a link could lead anywhere
    if folder == _DEFAULT and folder.is_symlink():
        raise UserError(f"{folder} is a link: name the folder to clean.")
    refused: list[OSError] = []
    seen = _Seen()
    files = sorted(_found(folder, endings, age_seconds, refused, seen))
    for error in refused:
        echo(f"error: {error.filename}: {error.strerror}", err=True)
    total = f"{units.counted(len(files), 'file')}, {units.format_bytes(sum(file.about.st_size for file in files))}"
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
    deleted = [] if dry_run else [file for file in files if _is_deleted(file)]
    done = f"{total} would go." if dry_run else f"Deleted {len(deleted)} of {total}."
    listed = [{"file": file.path, "bytes": file.about.st_size, "deleted": file in deleted} for file in files]
    emit({"files": listed}, [done] if files else _why_nothing(folder, endings, older_than, seen), as_json=as_json)
    raise typer.Exit(1 if refused or (not dry_run and len(deleted) < len(files)) else 0)


def _endings(kind: str) -> list[str]:
    endings = list(dict.fromkeys("." + text.strip().lstrip("*.").lower() for text in kind.split(",") if text.strip()))
    if not endings or any(not re.fullmatch(r"\.[a-z0-9][a-z0-9._-]*", ending) for ending in endings):
        raise UserError(f"--kind {kind!r} names no file ending; give for example --kind csv,sqlite.")
    return endings


def _age_seconds(text: str | None) -> float:
    if text is None:
        return 0.0
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise UserError(f"--older-than {text!r} is not an age; give for example 90m, 12h, 7d or 2w.")
    return float(match[1]) * _SECONDS[match[2]]


def _found(
    folder: Path, endings: Collection[str], age_seconds: float, refused: list[OSError], seen: _Seen
) -> Iterator[_File]:
    """Deletable files: named by a manifest, plain files in its folder, with such an ending, and old enough."""
    latest = datetime.now(UTC).timestamp() - age_seconds
    for manifest in below(folder, _MANIFEST, refused=refused.append):
        run = RunPaths(manifest.parent)
        if not is_of_perfexp(run):
            # a manifest beside a plan or a record must carry their identity
            if run.plan.exists() or run.record.exists():
                why = "does not repeat the identity of the record or the plan beside it: nothing is deleted"
                refused.append(OSError(errno.EBADMSG, why, str(manifest)))
        elif _is_in_use(run):
            echo(f"left alone: {manifest.parent} is being measured into", err=True)
            seen.busy += 1
        else:
            seen.folders += 1
            for claimed in run.claimed():
                name = claimed.removeprefix(f"{CHECKPOINTS}/")
                home = manifest.parent if name == claimed else manifest.parent / CHECKPOINTS
                if (file := _file(home, name, endings, latest, seen)) is not None:
                    yield file


def _is_in_use(run: RunPaths) -> bool:
    return run.in_use() or SweepPaths(run.root).in_use()


def _file(home: Path, name: str, endings: Collection[str], latest: float, seen: _Seen) -> _File | None:
    """A deletable file, or None with the reason counted in `seen`."""
    path = home / name
    try:
        about, place = path.lstat(), home.lstat()
    except (OSError, ValueError):
        return None
    if Path(name).name != name or not stat.S_ISREG(about.st_mode) or not stat.S_ISDIR(place.st_mode):
        seen.stays["that are links or lie elsewhere"] += 1
    elif name in _KEPT:
        seen.stays["that a record is made of"] += 1
    elif not name.lower().endswith(tuple(endings)):
        seen.others[path.suffix.lower().removeprefix(".") or "no ending"] += 1
    elif not is_artifact(name):
        seen.stays["whose names perfexp does not give"] += 1
    elif about.st_mtime > latest:
        seen.young.append(about.st_mtime)
    else:
        return _File(path, about, place)
    return None


def _why_nothing(folder: Path, endings: Collection[str], older_than: str | None, seen: _Seen) -> Iterator[str]:
    if seen.busy and not seen.folders:  # already reported
        return
    if not seen.folders:
        needed = f"the {_MANIFEST} of a run or a sweep, with the identity that its record or plan repeats"
        yield f"Nothing in or below {folder} is to go: no folder there has {needed}."
        return
    folders = f"{seen.folders} {'run or sweep' if seen.folders == 1 else 'runs and sweeps'}"
    yield f"Nothing in or below {folder} is to go. The {_MANIFEST} of {folders} names"
    if seen.young:
        age = units.format_seconds(datetime.now(UTC).timestamp() - min(seen.young), 2)
        description = f"{units.counted(len(seen.young), 'file')} ending in {', '.join(endings)}"
        yield f"  {description}, none older than {older_than or '0s'}: the oldest was written {age} ago"
    else:
        yield f"  no file ending in {', '.join(endings)} that is still there"
        known = {*seen.others, *_KINDS.split(",")}
        for kind in {ending.removeprefix(".") for ending in endings} - known:
            yield f"  nothing of the kind {kind}. {did_you_mean(kind, known)}".rstrip()
    if seen.others:
        kinds = ", ".join(f"{count} {ending}" for ending, count in seen.others.most_common())
        yield f"  {units.counted(seen.others.total(), 'file')} with other endings, which --kind chooses: {kinds}"
    for reason, count in sorted(seen.stays.items()):
        yield f"  {units.counted(count, 'file')} {reason}: they always stay"


def _is_deleted(file: _File) -> bool:
    """Delete a listed file unless it or its folder was replaced, is in use, or refuses; prints why not."""
    try:
        # an open folder cannot be replaced by a link before the file is deleted
        home = os.open(file.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            about = os.stat(file.path.name, dir_fd=home, follow_symlinks=False)
            if not (os.path.samestat(os.fstat(home), file.home) and os.path.samestat(about, file.about)):
                raise OSError(errno.ESTALE, "is not what was listed")
            folder = file.path.parent
            if _is_in_use(RunPaths(folder.parent if folder.name == CHECKPOINTS else folder)):
                raise OSError(errno.EBUSY, "is being measured into")
            os.unlink(file.path.name, dir_fd=home)
        finally:
            os.close(home)
    except OSError as error:
        echo(f"error: {file.path}: {error.strerror}", err=True)
        return False
    return True
