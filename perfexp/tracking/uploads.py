"""Uploads: the files of a run or a sweep that are sent, and why others are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perfexp.host.files import safe_name
from perfexp.records.record import Artifact

#: Artifact folders of a run; files of any other kind lie next to them.
FOLDERS = ("config", "data", "plots", "tables", "profiles", "logs")
#: Larger files stay on disk: a copy of a sparse file could fill the store.
_MAX_FILE_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file to send, to one of `FOLDERS` or to none, under a name of letters, digits and `._-`.

    Attributes:
        source: path of the file; None for a file that is made of `content`.
    """

    source: Path | None
    folder: str
    name: str
    content: str = ""


def sendable(artifacts: Iterable[Artifact], folder: Path) -> tuple[list[Upload], dict[str, str]]:
    """Files of a run or a sweep to send, and why others are skipped, by their names in the record.

    The record is data and can name anything. `plots/a b.png` of the kind `plots` becomes `plots/a-b.png`; deeper
    folders become part of the name.
    """
    uploads: dict[tuple[str, str], Upload] = {}
    skipped: dict[str, str] = {}
    for artifact in artifacts:
        kind = artifact.kind if artifact.kind in FOLDERS else ""
        name = safe_name("-".join(part for part in PurePosixPath(artifact.path).parts if part != kind))
        source = folder / artifact.path
        if reason := _refusal(artifact.path, folder):
            skipped[artifact.path] = reason
        elif (kind, name) in uploads:
            skipped[artifact.path] = f"{f'{kind}/' if kind else ''}{name} is there already"
        elif any(source == other.source for other in uploads.values()):
            skipped[artifact.path] = "it is named twice"
        else:
            uploads[kind, name] = Upload(source=source, folder=kind, name=name)
    return list(uploads.values()), skipped


def _refusal(path: str, folder: Path) -> str | None:
    """Why a file is not sent, or None. Nothing outside the run's folder is sent, and no link to it."""
    root = folder.resolve()
    source = root / path
    try:
        is_inside = source.is_relative_to(root) and source.resolve() == source
        if is_inside and source.is_file():
            return f"larger than {_MAX_FILE_BYTES >> 30} GiB" if source.stat().st_size > _MAX_FILE_BYTES else None
    except (OSError, ValueError) as error:
        return str(error)
    if not is_inside:
        return "a link, or outside of the run's folder"
    return "not a file" if source.exists() else "missing"
