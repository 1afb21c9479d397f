"""Paths: the only module that knows the file names of runs and sweeps and how they are written.

A run or sweep has a folder with its results and a `details` folder for files that only perfexp
reads. There manifest.json lists all files that perfexp wrote. Files that it does not list belong to
the user: perfexp neither replaces nor removes them. In older folders details lie beside results.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.host import foreign, signature
from perfexp.host.files import safe_name, write_atomically
from perfexp.records.sweep_record import Sweep

#: Limit on a manifest.json, which only holds file names.
_MOST_MANIFEST_BYTES = 8 << 20
#: Names that perfexp gives to files a record does not need.
_ARTIFACT = re.compile(
    r"[\w.+-]+_(overall|layers|convolutions|attention|epochs|predicted)\.csv|predicted\.jsonl"
    r"|[\w.+-]+_speed(\.json)?|(time|memory|layers)\.png|sweep\.(csv|png)|report\.md"
    r"|benchmark_[\w.-]+\.json"
    r"|(train|inference)[\w.-]*(\.(nsys-rep|qdrep|qdstrm|sqlite|ncu-rep|pt\.trace\.json\.gz)"
    r"|_[\w.-]+\.(csv|png|html))"
    r"|[\w.+-]+_(best|final_weights|epoch_?\d+)\.pth?"
)
#: Folder in a run's folder for `--overwrite`, which measures there until everything is measured.
REPLACEMENT = ".replacement"
#: Checkpoint folder in a run's folder.
CHECKPOINTS = "checkpoints"
#: Folder in a run's or sweep's folder for files that only perfexp reads.
DETAILS = "details"
#: In the details folder: the list of files that perfexp wrote, and the folder for a sweep's job
#: output.
MANIFEST = "manifest.json"
_JOB_LOGS = "jobs"
PLAN, POINTS = "plan.yaml", "points.jsonl"
#: File name for the weights at the end of a training, among its checkpoints.
FINAL_WEIGHTS = "final_weights"


def append_line(path: Path, line: bytes) -> None:
    """Append one line of JSON, newline included, and sync it to disk before returning.

    points.jsonl is written this way, so a crash loses at most the line in progress. Such a torn
    line is cut off by the next append. A line that only lacks its newline is complete and stays,
    because readers have already accepted it.

    Raises:
        OSError: the path is not a regular file, or cannot be written.
    """
    with foreign.open_append(path) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                content = file.read()
                start = content.rfind(b"\n") + 1
                if _is_json(content[start:]):
                    line = b"\n" + line
                else:
                    file.truncate(start)
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _is_json(text: bytes) -> bool:
    """Return whether a line is complete JSON."""
    try:
        foreign.json_data(text)
    except ValueError:
        return False
    return True


def is_artifact(name: str) -> bool:
    """Return whether perfexp gives tables, plots, reports, profiles or checkpoints this name.

    `perfexp clean` deletes such files only.
    """
    return _ARTIFACT.fullmatch(name) is not None


def folder_of(path: Path) -> Path:
    """Return a folder itself, or a file's folder; commands accept either for a run."""
    if path.is_dir():
        return path
    return path.parent


def home_of(file: Path) -> Path:
    """Return the run or sweep folder that a file belongs to; the file may lie in its `details`.

    Searches for runs find files, such as record.json or details/plan.yaml.
    """
    if file.parent.name == DETAILS:
        return file.parent.parent
    return file.parent


def is_own_place(name: str) -> bool:
    """Return whether a manifest may name this file.

    It may lie in the run's folder, its details or its checkpoints. A manifest is a file that
    anybody may have written, so it could name anything. Other names in it are ignored.
    """
    file = Path(name).name
    in_checkpoints = name == f"{CHECKPOINTS}/{file}" and is_artifact(file)
    return name in (file, f"{DETAILS}/{file}") or in_checkpoints


def refuse_link(folder: Path) -> None:
    """Raise `UserError` if a folder that the user did not name is a link: it may lead anywhere."""
    if folder.is_symlink():
        raise UserError(f"{folder} is a link: results are in real folders only. Remove it.")


class _Folder:
    """Folder of a run or sweep, possibly not created yet, with a manifest of perfexp's files there.

    Attributes:
        root: the folder.
        details: folder for files that only perfexp reads; `root` in folders of older versions.
        manifest: manifest.json.
        usual: files that are claimed from the start.
        lock: file that is locked while a process measures here.
        in_words: words before the folder in the message that it is in use.
    """

    usual: tuple[Path, ...]
    lock: Path
    in_words: str

    def __init__(self, root: Path, *, is_older: bool = False) -> None:
        self.root = root.absolute()
        self.details = self.root / DETAILS
        is_older |= any((self.root / name).exists() for name in (MANIFEST, PLAN, POINTS))
        if is_older or self.details.is_symlink():  # a link may lead anywhere
            self.details = self.root
        self.manifest = self.details / MANIFEST
        #: Whether the folder was missing or empty before `create`.
        self._is_new = False
        #: Folders that `create` made, innermost first; `withdraw` removes them.
        self._made: list[Path] = []

    def create(self, *, uid: str | None = None, sweep: str | None = None) -> None:
        """Create the folder and its manifest, before a run or sweep measures into it.

        A folder that has a manifest keeps its identity, so a run can be resumed in it.

        Args:
            uid: identity for a new manifest; by default a random identity.
            sweep: identity of the sweep that starts this run, if any.

        Raises:
            UserError: the folder cannot be written, or a manifest there is not perfexp's.
        """
        for name in (CHECKPOINTS, DETAILS):
            refuse_link(self.root / name)
        self._is_new = not self.root.exists() or (
            self.root.is_dir() and not any(self.root.iterdir())
        )
        places = (self.details, *self.details.parents)
        self._made = [folder for folder in places if not folder.exists()]
        try:
            self.details.mkdir(parents=True, exist_ok=True)
            if self.uid is None and self.manifest.exists():
                raise UserError(
                    f"{self.manifest} is none of perfexp's: choose another folder with "
                    "output_dir=DIR."
                )
            if self.uid is None:
                owner = {"sweep": sweep} if sweep else {}
                self._write({"perfexp": uid or uuid.uuid4().hex, **owner, "files": []})
            self.claim(self.manifest, *self.usual)
        except OSError as error:
            raise UserError(
                f"The output folder {self.root} can't be written: {error.strerror}. Choose another "
                "with output_dir=DIR."
            ) from error

    def withdraw(self) -> bool:
        """Remove the files and folders that this process created, if a run ends without results.

        Returns:
            whether the folder was new. Otherwise nothing is removed.
        """
        if not self._is_new:
            return False
        for name in filter(is_own_place, self.claimed()):
            (self.root / name).unlink(missing_ok=True)
        self.manifest.unlink(missing_ok=True)
        with suppress(OSError):  # somebody else has a file there
            inner = (self.root / CHECKPOINTS, self.details / _JOB_LOGS)
            for folder in (*filter(Path.is_dir, inner), *self._made):
                folder.rmdir()
        return True

    @property
    def uid(self) -> str | None:
        """Return the identity in the manifest, a random number; None if there is no manifest.

        record.json, plan.yaml or sweep.json repeats it. A folder is perfexp's only if they agree.
        """
        return self._identity("perfexp")

    @property
    def sweep(self) -> str | None:
        """Return the identity of the sweep that started the run, or None.

        Resuming and listing find by it which runs belong together.
        """
        return self._identity("sweep")

    def _identity(self, name: str) -> str | None:
        """Return a text entry of the manifest; None without one."""
        uid = self._manifest().get(name)
        if not isinstance(uid, str):
            return None
        return uid

    def claim(self, *paths: Path) -> None:
        """Add files to the manifest before they are written.

        perfexp treats a file that is not in the manifest as somebody else's.
        """
        earlier = self.claimed()
        names = [path.relative_to(self.root).as_posix() for path in paths]
        new = [name for name in names if name not in earlier]
        if new:
            self._write({**self._manifest(), "files": [*earlier, *new]})

    def remove_leftovers(self) -> None:
        """Remove temporary files left by a crash; nobody else may be writing here.

        `write_atomically` names a temporary file after its target: `.NAME.` and eight characters. A
        run that begins calls it under the folder's lock.
        """
        claimed_names = {self.manifest.name, *(Path(name).name for name in self.claimed())}
        for folder in {self.root, self.details, self.root / CHECKPOINTS}:
            if folder.is_symlink() or not folder.is_dir():
                continue
            for path in list(folder.iterdir()):
                leftover = re.fullmatch(r"\.(.+)\.[a-z0-9_]{8}", path.name)
                if (
                    leftover
                    and leftover[1] in claimed_names
                    and (path.is_symlink() or not path.is_dir())
                ):
                    path.unlink(missing_ok=True)

    def claimed(self) -> list[str]:
        """Return the names of perfexp's files in the manifest, relative to the folder.

        `perfexp clean` and `--overwrite` touch no other files.
        """
        names = self._manifest().get("files")
        if not isinstance(names, list):
            return []
        return list(map(str, names))

    def _manifest(self) -> dict[str, Any]:
        """Return the manifest's content; empty if it is missing or broken."""
        try:
            content = foreign.json_data(foreign.read_bytes(self.manifest, _MOST_MANIFEST_BYTES))
        except (OSError, ValueError):
            return {}
        if not isinstance(content, dict):
            return {}
        return content

    def _write(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, so that a crash leaves either the earlier or the new one."""
        self.details.mkdir(exist_ok=True)
        write_atomically(self.manifest, json.dumps(manifest, indent=1).encode() + b"\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock this folder against other perfexp processes while entered.

        The lock ends with the process.

        Raises:
            UserError: another process holds the lock, or the lock file cannot be written.
        """
        try:
            opened = foreign.open_append(self.lock)
        except OSError as error:
            raise UserError(
                f"{self.lock} can't be written ({error}): remove it, or choose another folder."
            ) from error
        with opened as file:
            for patience_seconds in (0.1, 0.0):  # `in_use` holds the lock for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if not patience_seconds:
                        busy = f"Another perfexp is measuring {self.in_words} {self.root}."
                        raise UserError(
                            f"{busy} Wait for it, or choose another output_dir."
                        ) from error
                    time.sleep(patience_seconds)
            try:
                yield
            finally:
                # a process forked in between has the file open, too
                fcntl.flock(file, fcntl.LOCK_UN)

    def in_use(self) -> bool:
        """Return whether a process is measuring here (see `locked`), without changing anything.

        `perfexp list`, `status` and `clean` call it.
        """
        try:
            with os.fdopen(foreign.open_regular(self.lock, os.O_RDONLY), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no such file, or not ours to read
            return False
        return False


class RunPaths(_Folder):
    """Files in a run's folder, whether they exist or not; the log is also the lock file.

    Args:
        root: the run's folder.
        is_older: whether details lie beside the results, as in folders of older versions.
    """

    in_words = "into"

    def __init__(self, root: Path, *, is_older: bool = False) -> None:
        super().__init__(root, is_older=is_older)
        self.record = self.root / "record.json"
        self.report = self.root / "report.md"
        self.plan = self.details / PLAN
        self.expected = self.details / "expected.json"
        self.points = self.details / POINTS
        self.environment = self.details / "environment.json"
        self.log = self.details / "run.log"
        self.predicted = self.details / "predicted.jsonl"
        self.refusal = self.details / "refused.txt"
        self.profile = self.root / ".profile"
        self.lock = self.log
        self.usual = (
            self.plan,
            self.expected,
            self.points,
            self.record,
            self.environment,
            self.log,
        )

    def replacement(self) -> RunPaths:
        """Return the inner folder that `--overwrite` measures into; it shares log and lock.

        The results move to the run's folder once all points are measured (`put_in_place`).
        """
        inner = RunPaths(self.root / REPLACEMENT, is_older=self.details == self.root)
        refuse_link(inner.root)
        inner.log = inner.lock = self.log
        return inner

    def put_in_place(self) -> None:
        """Replace the results here by a complete replacement, which has a record.

        Foreign files stay. The record moves last, so a second call completes the move after a
        crash.
        """
        inner = self.replacement()
        if not foreign.is_regular(inner.record):
            return
        for name in (CHECKPOINTS, DETAILS):
            refuse_link(inner.root / name)
        earlier, names = self.claimed(), inner.claimed()
        for path in self.results():
            if path.relative_to(self.root).as_posix() not in names:
                path.unlink()
        self._write(inner._manifest())
        for path in sorted(inner.results(), key=inner.record.__eq__):
            name = path.relative_to(inner.root).as_posix()
            if name in earlier or not os.path.lexists(self.root / name):
                (self.root / name).parent.mkdir(exist_ok=True)
                path.replace(self.root / name)
        inner.remove()

    def remove(self) -> None:
        """Remove the results here, and the folder unless it has foreign files.

        `--overwrite` calls it for its inner folder.
        """
        for path in [*self.results(), self.manifest]:
            path.unlink(missing_ok=True)
        for folder in (self.root / CHECKPOINTS, self.details, self.root):
            with suppress(OSError):
                folder.rmdir()

    def results(self) -> list[Path]:
        """Return the result files here: regular files in the manifest, without the log."""
        names = filter(self._is_result, self.claimed())
        return [self.root / name for name in names if foreign.is_regular(self.root / name)]

    def _is_result(self, name: str) -> bool:
        """Return whether this names a result file of a run.

        The log is not a result: it is the lock and stays in place.
        """
        result_names = {
            path.name for path in (*self.usual, self.refusal) if path.name != self.log.name
        }
        file = Path(name).name
        return is_own_place(name) and (file in result_names or is_artifact(file))

    def table(self, model: str, algorithm: str, part: str) -> Path:
        """Return the path of a result table, for example `MODEL_ALGORITHM_overall.csv`."""
        return self.root / f"{safe_name(model)}_{safe_name(algorithm)}_{part}.csv"

    def checkpoint(self, model: str, data: str, part: str) -> Path:
        """Return a checkpoint path, for example `checkpoints/MODEL_DATA_best.pt`."""
        return self.root / CHECKPOINTS / f"{safe_name(model)}_{safe_name(data)}_{part}.pt"

    def plot(self, title: str) -> Path:
        """Return a PNG path in the run's folder, for example for `time` or `memory`."""
        return self.root / f"{safe_name(title)}.png"


class SweepPaths(_Folder):
    """Files in a sweep's folder, including Hydra's own, whether they exist or not."""

    in_words = "the sweep in"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.summary = self.root / "sweep.json"
        self.table = self.root / "sweep.csv"
        self.plot = self.root / "sweep.png"
        self.multirun = self.details / "multirun.yaml"  # Hydra's
        self.lock = self.details / "sweep.lock"
        self.jobs = self.details / "jobs.jsonl"  # jobs on a cluster
        self.job_logs = self.details / _JOB_LOGS
        self.usual = (self.summary, self.table, self.plot, self.lock, self.multirun)

    def sign(self, sweep: Sweep) -> None:
        """Enter in the manifest that this user gave the sweep's command, in the current folder.

        The entry is signed with the user's key, so that resuming runs no one else's command.
        """
        begun_in = str(Path.cwd())
        mark = signature.of(_signed(sweep, begun_in))
        self._write({**self._manifest(), "begun_in": begun_in, "signature": mark})

    def begun_in(self, sweep: Sweep) -> str | None:
        """Return the folder where this user gave the sweep's command; None if somebody else did."""
        manifest = self._manifest()
        folder, mark = manifest.get("begun_in"), manifest.get("signature")
        is_own = isinstance(folder, str) and signature.is_of(mark, _signed(sweep, folder))
        if not is_own:
            return None
        return folder

    def make_job_logs(self) -> None:
        """Create the folder for the output of cluster jobs.

        Raises:
            UserError: it is a link, which may lead anywhere.
        """
        refuse_link(self.job_logs)
        self.job_logs.mkdir(parents=True, exist_ok=True)


def _signed(sweep: Sweep, folder: str) -> bytes:
    """Return the content that a sweep's signature covers: identity, folder and command."""
    return json.dumps(["sweep", sweep.uid, folder, *sweep.command]).encode()
