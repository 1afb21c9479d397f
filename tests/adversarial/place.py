"""A place for one hostile folder: what lies around it must be the same afterwards, and nothing of it may have run."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from mlflow import MlflowClient

from perfexp.plan import plan_file
from perfexp.records.paths import SweepPaths
from perfexp.records.sweep_record import Sweep
from tests.support import processes

HERE = Path(__file__).parent
#: Longest time that a command may take with a hostile folder, seconds.
LIMIT_SECONDS = 60
#: Written into what is outside: a secret that no command may print.
SECRET = "hunter2-outside"


def commands(folder, out):
    """Every command that reads a folder, `resume` last.

    Args:
        folder: hostile.
        out: where `export` may write.
    """
    return [
        ["show", str(folder)],
        ["status", str(folder)],
        ["list", "runs", str(folder)],
        ["export", str(folder), "--samples", "--layers", "--force", "--out", str(out / "table")],
        ["compare", str(folder.parent / "run"), str(folder.parent / "sweep")],
        ["sync", str(folder)],
        ["clean", str(folder), "--yes"],
        ["reproduce", str(folder), "--dry-run"],
        [f"resume={folder}"],
    ]


@dataclass
class Answer:
    """What a command did.

    Attributes:
        command: its arguments.
        code: exit code; None where it had to be killed.
        out: its stdout.
        err: its stderr.
    """

    command: list
    code: int | None
    out: str
    err: str


@dataclass
class Place:
    """Folders of one case.

    Attributes:
        root: of everything.
        run: a run's folder, hostile.
        sweep: a sweep's folder, hostile.
        outside: what must stay as it is; `precious.csv`, `bashrc` and `evil/` among it.
        cwd: where the user stands.
        canary: exists once planted code has run.
        answers: of the commands so far.
        originals: commands as they were stored.
        store: an empty database of MLflow's, whose making takes seconds.
        chosen_by: name of the case, which chooses one of the files to replace; None for all.
        is_owner: the user began both runs here, and somebody else changes them; False for runs of somebody else.
    """

    root: Path
    answers: list = field(default_factory=list)
    originals: dict = field(default_factory=dict)
    store: Path | None = None
    chosen_by: str | None = None
    is_owner: bool = True

    def __post_init__(self):
        self.run, self.sweep = self.root / "given" / "run", self.root / "given" / "sweep"
        self.outside, self.cwd = self.root / "outside", self.root / "cwd"
        self.canary, self.out, self.log = (
            self.root / "canary",
            self.root / "out",
            self.root / "violations",
        )
        for folder in (
            self.outside / "evil",
            self.cwd,
            self.out,
            self.root / "tmp",
            self.root / "home",
        ):
            folder.mkdir(parents=True)
        for name in ("bashrc", "precious.csv", "train_gemm_overall.csv", "evil/readme"):
            (self.outside / name).write_text(f"{SECRET}\n")

    @property
    def planted(self):
        """Python code that shows that it ran."""
        return f"import pathlib; pathlib.Path({str(self.canary)!r}).write_text('ran')\n"

    def take(self, base):
        """Put copies of a run and of a sweep there.

        Args:
            base: folder of both.
        """
        shutil.copytree(base, self.root / "given", ignore=shutil.ignore_patterns("store.db"))
        self.store = base / "store.db"
        for file in (self.root / "given").rglob("*"):
            if file.is_file() and file.suffix in (".json", ".yaml", ".jsonl"):
                file.write_bytes(
                    file.read_bytes().replace(os.fsencode(base), os.fsencode(self.root / "given"))
                )
        self.sign()

    @property
    def _state_home(self):
        return {"XDG_STATE_HOME": str(self.root / "home" / "state")}

    def sign(self):
        """Sign the commands as they are now, if the user began both runs."""
        if self.is_owner:
            with chdir(self.cwd), patch.dict(os.environ, self._state_home):
                self._sign()

    def _sign(self):
        for plan in (self.root / "given").rglob("plan.yaml"):
            unsigned = plan.read_bytes().partition(b"# begun in ")[0]
            plan.write_bytes(plan_file.signed(unsigned))
        SweepPaths(self.sweep).sign(Sweep.load(self.sweep))

    def listing(self):
        """Inode, size and time of the last change of what was given, four levels deep."""
        return {
            str(path): (about.st_ino, about.st_size, about.st_mtime_ns)
            for depth in range(1, 5)
            for path in (self.root / "given").glob("/".join("*" * depth))
            for about in [path.lstat()]
        }

    def some(self, files):
        """The files that are to be replaced."""
        if self.chosen_by is None:
            return files
        return [files[zlib.crc32(self.chosen_by.encode()) % len(files)]]

    def make_store(self, file, **experiment):
        """A database of MLflow's with the experiment that records go to."""
        shutil.copyfile(self.store, file)
        client = MlflowClient(tracking_uri=f"sqlite:///{file}", registry_uri=f"sqlite:///{file}")
        client.create_experiment("perfexp", **experiment)

    def state(self):
        """Inode, time of the last change, and content of everything outside."""
        return {
            str(path): (about.st_ino, about.st_mtime_ns, _content(path))
            for path in sorted([self.outside, *self.outside.rglob("*")])
            for about in [path.lstat()]
        }

    def case(self, command):
        """What the driver needs for a command; where it is to make the store of MLflow's, an empty one is there."""
        if command[0] == "sync" and not os.path.lexists(self.cwd / "outputs"):
            (self.cwd / "outputs").mkdir()
            shutil.copyfile(self.store, self.cwd / "outputs" / "mlflow.db")
        watch = {
            "log": str(self.log),
            "allowed": [
                *map(
                    str,
                    (
                        self.root / "given",
                        self.cwd / "outputs",
                        self.out,
                        self.root / "tmp",
                        self.root / "home",
                    ),
                ),
                *("/dev", f"/tmp/perfexp-{os.getuid()}"),
            ],
        }
        (self.root / "watch.json").write_text(json.dumps(watch))
        paths = [str(HERE / "site"), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
        return {
            "command": command,
            "cwd": str(self.cwd),
            "environment": {
                "HOME": str(self.root / "home"),
                "TMPDIR": str(self.root / "tmp"),
                "XDG_CACHE_HOME": str(self.root / "home"),
                **self._state_home,
                "PYTHONPATH": ":".join([*paths, str(HERE.parent.parent)]),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOSTILE_WATCH": str(self.root / "watch.json"),
                "HOSTILE_SECRET": SECRET,
            },
            "out": str(self.out),
            "watch": watch,
            "seconds": LIMIT_SECONDS,
        }

    def problems(self, before):
        """What went wrong, a line each.

        Args:
            before: `state` before the first command.
        """
        found = []
        if self.canary.exists():
            found.append("planted code ran")
        found += (
            [f"touched: {line}" for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )
        after = self.state()
        found += [
            f"changed: {path}"
            for path in before.keys() | after.keys()
            if before.get(path) != after.get(path)
        ]
        for answer in self.answers:
            name = " ".join(answer.command)[:80]
            if answer.code is None:
                found.append(f"{name}: did not end")
            elif answer.code not in (0, 1, 2, 3):
                found.append(f"{name}: exit code {answer.code}: {answer.err[-300:]}")
            if "Traceback" in answer.out + answer.err or "error: unexpected " in answer.err:
                found.append(f"{name}: a traceback: {answer.err[-1500:]}")
            if SECRET in answer.out + answer.err:
                found.append(f"{name}: printed what is outside")
            if any(
                ord(letter) < 32 and letter not in "\n\t\r" for letter in answer.out + answer.err
            ):
                found.append(f"{name}: printed control characters")
            has_outcome = re.search(
                "^(UNDECIDED|NOT COMPARABLE)", answer.out, re.MULTILINE
            )  # of reproduce
            if answer.code == 2 and not answer.err.strip() and not has_outcome:
                found.append(f"{name}: refused without a word")
        return found


def _content(path):
    if path.is_symlink():
        return str(path.readlink())
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


class Driver:
    """The process that runs commands, see driver.py."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PYTHONPATH": str(HERE.parent.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def run(self, place, command):
        """Run a command at a place, and enter its answer there."""
        for name in ("out", "err"):
            (place.out / name).write_text("")
        self._process.stdin.write(json.dumps(place.case(command)) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())["code"]
        texts = [(place.out / name).read_text(errors="replace") for name in ("out", "err")]
        place.answers.append(Answer(command, code, *texts))
        return place.answers[-1]

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextmanager
def driver():
    """A driver, which ends with the block."""
    started = Driver()
    try:
        yield started
    finally:
        started.close()


def make_base(folder):
    """A run and a sweep, measured with the scripted device, and a store: what hostile folders are made of.

    Args:
        folder: to be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{folder / 'store.db'}"
    MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments()
    given = [
        "model=fake",
        "gpu=fake",
        "tracking=none",
        "stopping=fixed",
        "input_size=[32,64]",
        "probes.layers=true",
    ]
    for command in (
        [*given, f"output_dir={folder / 'run'}"],
        ["-m", *given, "batch_size=1,2", f"output_dir={folder / 'sweep'}"],
    ):
        processes.run(*command, cwd=HERE.parent.parent, seconds=300).check_returncode()
    return folder
