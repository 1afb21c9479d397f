"""clean: deletes what runs have written and can do without, after asking; measurements stay."""

from __future__ import annotations

import errno
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from perfexp import units
from perfexp.errors import UserError, did_you_mean
from perfexp.paths import RunPaths
from perfexp.sinks.folders import below

_MANIFEST = "manifest.json"
_KINDS = "csv,pth,pt,nsys-rep,qdrep,qdstrm,sqlite,ncu-rep,pt.trace.json.gz"
#: What a run is made of; everything else can be made again from it, or measured.
_KEPT = {
    *("record.json", "points.jsonl", "plan.yaml", "environment.json", "run.log"),
    *("sweep.json", "multirun.yaml", _MANIFEST, "mlflow.db"),
}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class _File(NamedTuple):
    """A file that goes.

    Attributes:
        path: below the folder that is cleaned.
        size_bytes: of it.
        run: folder of its run.
    """

    path: Path
    size_bytes: int
    run: Path


@dataclass(kw_only=True)
class _Seen:
    """What was looked at and stays.

    Attributes:
        folders: of runs and sweeps, with a manifest; those that are being measured into are not among them.
        busy: how many are.
        kept: files that a run or a sweep is made of.
        others: how many files end otherwise, by ending.
        young: when files of the wanted endings were last written that are not old enough, seconds since the epoch.
        away: files that are links, or lie outside of the folder.
    """

    folders: int = 0
    busy: int = 0
    kept: int = 0
    others: Counter[str] = field(default_factory=Counter)
    young: list[float] = field(default_factory=list)
    away: int = 0


def clean(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or any folder above some.")] = Path(
        "outputs"
    ),
    kind: Annotated[str, typer.Option(help="Endings of the files that go, with commas between them.")] = _KINDS,
    older_than: Annotated[str | None, typer.Option(help="Only what was last written so long ago: 12h, 7d, 2w.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete tables, checkpoints and profiles that perfexp wrote; never a record, a plan or a tracking store.

    Only files that the manifest of a run or a sweep names go, and only those in its folder.
    """
    endings = _endings(kind)
    age_seconds = _age_seconds(older_than)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder.")
    refused: list[OSError] = []
    seen = _Seen()
    found = sorted(_found(folder, endings, age_seconds, refused, seen))
    for error in refused:
        typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
    if not found:
        for line in _why_nothing(folder, endings, older_than, seen):
            typer.echo(line)
        raise typer.Exit(1 if refused else 0)
    for file in found:
        typer.echo(f"{units.format_bytes(file.size_bytes):>10}  {file.path}")
    size = units.format_bytes(sum(file.size_bytes for file in found))
    total = f"{len(found)} file{'s' if len(found) > 1 else ''}, {size}"
    if dry_run:
        typer.echo(f"{total} would go.")
        raise typer.Exit(1 if refused else 0)
    if not yes and not _agreed(total):
        typer.echo("Nothing was deleted.")
        raise typer.Exit(1)
    failed = _delete(found)
    typer.echo(f"Deleted {len(found) - failed} of {total}.")
    raise typer.Exit(1 if failed or refused else 0)


def _endings(kind: str) -> list[str]:
    """Endings with their dots, each once.

    Raises:
        UserError: there are none, or one is none.
    """
    endings = list(dict.fromkeys("." + text.strip().lstrip("*.").lower() for text in kind.split(",") if text.strip()))
    if not endings or any(not re.fullmatch(r"\.[a-z0-9][a-z0-9._-]*", ending) for ending in endings):
        raise UserError(f"--kind {kind!r} names no ending of a file: say --kind csv,sqlite.")
    return endings


def _age_seconds(text: str | None) -> float:
    """An age in seconds; 0 for none.

    Raises:
        UserError: it is no age.
    """
    if text is None:
        return 0.0
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise UserError(f"--older-than {text!r} is no age: say 90m, 12h, 7d or 2w.")
    return float(match[1]) * _SECONDS[match[2]]


def _found(
    folder: Path, endings: Collection[str], age_seconds: float, refused: list[OSError], seen: _Seen
) -> Iterator[_File]:
    """What may go: named by a manifest, a plain file in its folder, of such an ending, and old enough."""
    latest = datetime.now(UTC).timestamp() - age_seconds
    for manifest in below(folder, _MANIFEST, refused=refused.append):
        run, home = RunPaths(manifest.parent), manifest.parent.resolve()
        if run.in_use():
            typer.echo(f"left alone: {manifest.parent} is being measured into", err=True)
            seen.busy += 1
            continue
        seen.folders += 1
        if not (names := run.claimed()):  # perfexp writes none that does not name itself
            refused.append(OSError(errno.EBADMSG, "names no file: it is damaged, and nothing goes", str(manifest)))
        for name in names:
            path = manifest.parent / name
            if path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(home):
                seen.away += path.is_symlink() or path.is_file()
            elif path.name in _KEPT:
                seen.kept += 1
            elif not name.lower().endswith(tuple(endings)):
                seen.others[path.suffix.lower().removeprefix(".") or "no ending"] += 1
            elif (about := path.stat()).st_mtime > latest:
                seen.young.append(about.st_mtime)
            else:
                yield _File(path, about.st_size, manifest.parent)


def _why_nothing(folder: Path, endings: Collection[str], older_than: str | None, seen: _Seen) -> Iterator[str]:
    """What was looked at, and why nothing of it goes, a line each."""
    if not seen.folders:
        if not seen.busy:  # otherwise it has been told
            yield (
                f"Nothing in or below {folder} is to go: no folder there has a {_MANIFEST}, which every run and sweep "
                "has; what none names perfexp did not write."
            )
        return
    folders = _counted(seen.folders, "run or sweep", "runs and sweeps")
    yield f"Nothing in or below {folder} is to go. The {_MANIFEST} of {folders} names"
    if seen.young:
        age = units.format_seconds(datetime.now(UTC).timestamp() - min(seen.young), 2)
        found = f"{_counted(len(seen.young), 'file', 'files')} ending in {', '.join(endings)}"
        yield f"  {found}, none older than {older_than or '0s'}: the oldest was written {age} ago"
    else:
        yield f"  no file ending in {', '.join(endings)} that is still there"
        known = {*seen.others, *_KINDS.split(",")}
        for kind in (ending.removeprefix(".") for ending in endings):
            if kind not in known:
                yield f"  nothing of the kind {kind}. {did_you_mean(kind, known)}".rstrip()
    if seen.others:
        kinds = ", ".join(f"{count} {ending}" for ending, count in seen.others.most_common())
        yield f"  {_counted(seen.others.total(), 'file', 'files')} with other endings, which --kind chooses: {kinds}"
    if seen.kept:
        yield f"  {_counted(seen.kept, 'file', 'files')} that a record is made of: they always stay"
    if seen.away:
        yield f"  {_counted(seen.away, 'file', 'files')} that are links or lie elsewhere: they always stay"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _agreed(total: str) -> bool:
    """Whether whoever sits there says yes.

    Raises:
        UserError: nobody sits there.
    """
    if not sys.stdin.isatty():
        raise UserError("Nobody can be asked here: say --yes, or --dry-run to see what would go.")
    return typer.confirm(f"Delete {total}?")


def _delete(files: Collection[_File]) -> int:
    """Delete files; returns how many could not be."""
    failed = 0
    for file in files:
        try:
            if RunPaths(file.run).in_use():  # since it was listed
                raise OSError(errno.EBUSY, "is being measured into")
            file.path.unlink(missing_ok=True)
        except OSError as error:
            typer.echo(f"error: {file.path}: {error.strerror}", err=True)
            failed += 1
    return failed
