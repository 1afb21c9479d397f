"""Uploads: which files of a run's folder go to the tracking store, and under which names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perfexp.host.files import safe_name
from perfexp.records.paths import SweepPaths
from perfexp.records.record import Artifact, Record

#: The folders of a run's artifacts; a file of any other kind lies beside them.
FOLDERS = ("config", "data", "plots", "tables", "profiles", "logs")
#: A larger file stays on disk: a copy of a sparse one could fill the store.
_MOST_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file to be sent.

    Attributes:
        source: where it is.
        folder: one of `FOLDERS`, or nothing.
        name: in letters, digits and `._-`.
    """

    source: Path
    folder: str
    name: str

    @property
    def target(self) -> str:
        """Folder and name among the run's artifacts."""
        return f"{self.folder}/{self.name}" if self.folder else self.name


def sendable(artifacts: Iterable[Artifact], folder: Path) -> tuple[list[Upload], dict[str, str]]:
    """The files that can be sent.

    Args:
        artifacts: as the record names them; a record is data, and can name anything.
        folder: of the run or the sweep.

    Returns:
        Those that can be sent, and why others can't, by their names in the record.
    """
    found: dict[str, Upload] = {}
    skipped: dict[str, str] = {}
    for artifact in artifacts:
        upload = _upload(artifact, folder)
        reason = _refusal(artifact.path, folder)
        if reason is None and upload.target in found:
            reason = f"{upload.target} is there already"
        if reason is None and any(upload.source == other.source for other in found.values()):
            reason = "it is named twice"
        if reason is None:
            found[upload.target] = upload
        else:
            skipped[artifact.path] = reason
    return list(found.values()), skipped


def of_record(record: Record) -> list[Artifact]:
    """The files that a record names, and its own: that one is written last and need not name itself."""
    own = Artifact(path="record.json", kind="data")
    return [*record.artifacts, *([own] if all(known.path != own.path for known in record.artifacts) else [])]


def of_sweep(folder: Path) -> list[Artifact]:
    """The files that a sweep has left so far.

    Args:
        folder: of the sweep.
    """
    paths = SweepPaths(folder)
    kinds = {paths.summary: "data", paths.table: "tables", paths.picture: "plots"}
    return [Artifact(path=path.name, kind=kind) for path, kind in kinds.items() if path.exists()]


def _upload(artifact: Artifact, folder: Path) -> Upload:
    """`plots/a b.png` of the kind `plots` becomes `plots/a-b.png`; deeper folders become part of the name."""
    kind = artifact.kind if artifact.kind in FOLDERS else ""
    parts = [part for part in PurePosixPath(artifact.path).parts if part != kind]
    return Upload(source=folder / artifact.path, folder=kind, name=safe_name("-".join(parts)))


def _refusal(path: str, folder: Path) -> str | None:
    """Why a file is not sent, or None: nothing from outside of the run's folder may be, by a link neither."""
    root = folder.resolve()
    source = root / path
    try:
        inside = source.is_relative_to(root) and source.resolve() == source
        if inside and source.is_file():
            return f"larger than {_MOST_BYTES >> 30} GiB" if source.stat().st_size > _MOST_BYTES else None
    except (OSError, ValueError) as error:
        return str(error)
    if not inside:
        return "a link, or outside of the run's folder"
    return "not a file" if source.exists() else "missing"
