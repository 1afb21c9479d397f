"""Records made by hand, with everything that a record can hold, and runs that have ended, for tests anywhere."""

from __future__ import annotations

import atexit
import gc
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as many processes as cores run tests; torch reads it when imported
if (
    "PYTEST_XDIST_WORKER" not in os.environ
):  # all processes of a session have one user, with a key of its own
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="perfexp-tests-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

import pytest
from filelock import FileLock
from PIL import Image

from perfexp.main import main
from perfexp.orchestration import machine_priors
from perfexp.records.record import (
    Artifact,
    Diagnostic,
    Key,
    Metric,
    Point,
    Record,
    Series,
    Status,
    Stop,
    overall_status,
)
from tests.support import composing, selection, undrawn
from tests.support.builders import ALIKE, Builder

MakeRecord = Callable[..., Record]
LeaveRun = Callable[[Record, Path], Path]
SharedFolder = Callable[[str, Callable[[Path], object]], Path]
Finished = Callable[..., "FinishedRun"]

PHASES = {"data": 0.05, "forward": 0.3, "loss": 0.02, "backward": 0.55, "optimizer": 0.08}
TTFP = {"imports": 2.5, "context": 0.01, "weights": 0.4, "first_call": 0.29, "second_call": 0.06}


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.deselect(config, items)


@pytest.fixture(autouse=True, scope="module")
def collected() -> None:
    """Each timed block collects garbage first; as in a worker, what was there before is not looked at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests send to stores of their own, whatever the environment says."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def own_history(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of this process know those of the same test only."""
    folder = tmp_path_factory.getbasetemp() / "histories" / uuid.uuid4().hex
    monkeypatch.setattr(machine_priors, "cache_folder", lambda name: folder / name)


@pytest.fixture
def quick_commands() -> Iterator[None]:
    """Commands of this process compose from memory and draw stand-ins; `run` and `finished` do so anyway."""
    with composing.remembered(), undrawn.stand_ins():
        yield


#: Changes the scripted device; `{factors}` by the number of the replicate make it slower.
_SLOWER = """
import sys
from perfexp.devices.fake import FakeDevice

launch, facts = FakeDevice.launch, FakeDevice.facts

def slower(device, work_seconds, host_seconds=None):
    number = next((word for word in sys.orig_argv if word.startswith("--replicate=")), "--replicate=0")
    factors = {factors}
    return launch(device, work_seconds * factors[int(number.partition("=")[2]) % len(factors)], host_seconds)

FakeDevice.launch = slower
FakeDevice.facts = lambda device: {{**facts(device), **{further}}}
"""


@pytest.fixture
def slower_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., None]:
    """A function that has the scripted device of workers take longer, by a factor for each replicate in turn."""
    before = os.environ.get("PYTHONPATH")

    def slow(*factors: float, **further: str) -> None:
        folder = tmp_path_factory.mktemp("site")
        (folder / "sitecustomize.py").write_text(_SLOWER.format(factors=factors, further=further))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), before])))

    return slow


@dataclass(frozen=True)
class FinishedRun:
    """A run or a sweep that has ended, the same for all tests that ask for its command: nobody changes its files.

    Attributes:
        code: the command's exit code.
        printed: its stdout and stderr.
        root: the folder where it was started.
    """

    code: int
    printed: str
    root: Path

    @property
    def records(self) -> list[Record]:
        """What it left, in the order of the folders."""
        return [Record.load(file) for file in sorted(self.root.rglob("record.json"))]

    @property
    def record(self) -> Record:
        """Of a single run."""
        [record] = self.records
        return record

    def copied(self, folder: Path) -> FinishedRun:
        """The same, with a copy of its files that a test may change.

        Args:
            folder: gets what lies in `root`.
        """
        shutil.copytree(self.root, folder, dirs_exist_ok=True)
        return FinishedRun(self.code, self.printed, folder)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> SharedFolder:
    """A function that gives a folder, made once for all tests of the session; nobody changes what is in it.

    The processes of pytest-xdist share it: the first that asks for its name has it made by the function that it gives,
    while the others wait for a lock.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
                folder.mkdir(parents=True)
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def finished(shared_folder: SharedFolder) -> Finished:
    """A function that gives the run of a command (see `FinishedRun`), which is started once for all tests.

    `output_dir`, where a command has one, is relative.
    """

    def get(*command: str) -> FinishedRun:
        def measure(folder: Path) -> None:
            (folder / "root").mkdir()
            printed = io.StringIO()
            with ExitStack() as stack:
                stack.enter_context(chdir(folder / "root"))
                stack.enter_context(redirect_stdout(printed))
                stack.enter_context(redirect_stderr(printed))
                stack.enter_context(composing.remembered())
                stack.enter_context(undrawn.stand_ins())
                code = main(command)
            (folder / "ended.json").write_text(
                json.dumps({"code": code, "printed": printed.getvalue()})
            )

        digest = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]
        folder = shared_folder(f"finished-{digest}", measure)
        return FinishedRun(**json.loads((folder / "ended.json").read_bytes()), root=folder / "root")

    return get


class Command:
    """Runs perfexp in a folder of its own: exit code, printed text, and the records that are there afterwards.

    Compositions are remembered, and plots are stand-ins unless `draws` is set.

    Args:
        folder: the current one.
        capsys: of the test.
        finished: see the fixture.
    """

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], finished: Finished
    ) -> None:
        self.folder, self._capsys, self._finished = folder, capsys, finished
        self.draws = False

    def __call__(self, *arguments: str) -> tuple[int, str, list[Record]]:
        plots = nullcontext() if self.draws else undrawn.stand_ins()
        with composing.remembered(), plots:
            code = main(arguments)
        printed = self._capsys.readouterr()
        return code, printed.out + printed.err, FinishedRun(code, "", self.folder).records

    def shared(self, *arguments: str) -> tuple[int, str, list[Record]]:
        """The same of a command that other tests begin with as well, in the folder that is still empty."""
        copied = self._finished(*arguments).copied(self.folder)
        return copied.code, copied.printed, copied.records


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    finished: Finished,
) -> Command:
    """See `Command`."""
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path, capsys, finished)


def timed_point(
    size: int, batch: int, phase: str, calls: int = 80, metrics: Sequence[Metric] = ()
) -> Point:
    """A point whose calls wave by one percent around a median that grows with pixels and batch size."""
    seconds = 0.01 * batch * (size / 224) ** 2 * (3 if phase == "train" else 1)
    samples = [
        seconds * (1 + 0.01 * math.sin(7 * index) + (0.5 if index < 5 else 0))
        for index in range(calls + 5)
    ]
    series = [
        Series(
            name="latency",
            samples=samples,
            warmup=5,
            stop=Stop(reason="precision", target=0.05, achieved=0.004),
        )
    ]
    if phase == "train":
        series += [
            Series(name=f"phase/{name}", samples=[seconds * share] * 20)
            for name, share in PHASES.items()
        ]
    return Point(
        key=Key(phase=phase, input_size=(size, size), batch_size=batch, precision="fp32"),
        status=Status.OK,
        series=series,
        metrics=[
            Metric(name="memory/peak_bytes", value=(500 + batch) * 2**20, unit="bytes"),
            *metrics,
        ],
        started=f"2026-03-01T10:{size % 60:02d}:{batch % 60:02d}+00:00",
        wall_seconds=4.5,
    )


def failed_point(size: int, batch: int, phase: str, status: Status = Status.OOM) -> Point:
    key = Key(phase=phase, input_size=(size, size), batch_size=batch, precision="fp32")
    return Point(key=key, status=status, error="CUDA out of memory. Tried to allocate 2.00 GiB")


def first_prediction_point() -> Point:
    key = Key(phase="ttfp", input_size=(224, 224), batch_size=1, precision="fp32")
    series = [Series(name=f"ttfp/{name}", samples=[seconds]) for name, seconds in TTFP.items()]
    return Point(key=key, status=Status.OK, series=series)


@pytest.fixture
def build() -> Builder:
    """Make records of a run part by part."""
    return Builder()


@pytest.fixture
def make_record() -> MakeRecord:
    """A function that makes a record: sizes × batches × phases, the time to first prediction, what else is named."""

    def make(
        *,
        uid: str = "5f1d0c6e8b3a4f7c9d2e1a0b4c6d8e0f",
        sizes: Sequence[int] = (224,),
        batches: Sequence[int] = (1,),
        phases: Sequence[str] = ("inference",),
        failing: dict[int, Status] | None = None,
        metrics: Sequence[Metric] = (),
        calls: int = 80,
        plan: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Record:
        points = [
            failed_point(size, batch, phase, failing[size])
            if failing and size in failing
            else timed_point(size, batch, phase, calls, metrics)
            for size in sizes
            for batch in batches
            for phase in phases
        ]
        defaults: dict[str, Any] = {
            "name": "resnet50-default-inference",
            "priors": ALIKE,
            "perfexp_version": "0.1.0",
            "status": overall_status(points),
            "started": "2026-03-01T10:00:00+00:00",
            "ended": "2026-03-01T10:05:30+00:00",
            "command": ["model=resnet50", "mode=inference"],
            "plan_hash": "a" * 64,
            "environment": {
                "host": "node7",
                "python": "3.11.7",
                "packages": {"torch": "2.11.0", "numpy": "2.3.0"},
                "git": {"commit": "0123abcd", "dirty": False},
                "device": {
                    "kind": "cuda",
                    "name": "NVIDIA H200",
                    "driver": "580.65",
                    "cuda": "13.0",
                    "cudnn": "9.19",
                },
            },
            "points": [*points, first_prediction_point()],
            "doubts": [
                Diagnostic(
                    code="busy_host", message="load average 3.1 on 2 cores", help="end other work"
                )
            ],
        }
        everything = {
            "model": {"_target_": "perfexp.models.torchvision.Torchvision", "name": "resnet50"},
            "algorithm": {"name": "default"},
            "mode": {"name": "_".join(reversed(phases))},
            "precision": {"name": "fp32"},
            "percentiles": [50, 95, 99],
            "stage": None,
            "tracking": {"uri": None},
        }
        return Record(uid=uid, plan=everything | (plan or {}), **(defaults | fields))

    return make


@pytest.fixture
def leave_run() -> LeaveRun:
    """A function that writes what a run leaves in its folder: plan, table and log, named in the record, and that."""

    def leave(record: Record, folder: Path) -> Path:
        files = {
            "details/plan.yaml": "config",
            "resnet50_default_overall.csv": "tables",
            "details/run.log": "logs",
        }
        (folder / "details").mkdir(parents=True, exist_ok=True)
        for name, kind in files.items():
            (folder / name).write_text(f"{name} of {record.uid}\n")
            record.artifacts.append(Artifact(path=name, kind=kind))
        (folder / "record.json").write_bytes(record.to_json())
        return folder

    return leave


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One sqlite store for all tests, since making its schema takes seconds; each test has experiments of its own."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real photographs, a temple and a flower, cut into six pictures each: two classes."""
    from sklearn.datasets import load_sample_images  # with SciPy, which few tests need

    root = tmp_path_factory.mktemp("photographs")
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (root / name).mkdir()
        photograph = Image.fromarray(pixels)
        for number in range(6):
            left, top = 200 * (number % 3), 200 * (number // 3)
            photograph.crop((left, top, left + 200, top + 200)).save(root / name / f"{number}.jpg")
    return root
