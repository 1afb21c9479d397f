"""Campaigns on a private SLURM with two nodes of two fake GPUs: faults, and many runs.

    python validation/cluster.py faults [--faults 40] [--seed 0] [--accounting]
    python validation/cluster.py scale [--runs 2000] [--accounting]
    python validation/cluster.py mlflow [--writers 16]

`faults` injects faults at random moments into sweeps of 60 points, submits again what did not finish, and compares the
lines of points.jsonl: no finished point may be lost, none measured twice. `scale` submits many runs to nodes that start
nothing, gives half of them a record, and times `perfexp status`; it counts the calls of squeue. `mlflow` has jobs send
their records to one server at the same time, then measures the same without sending and sends them with `perfexp sync`.
A line of JSON each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.main import main as measure
from perfexp.records.paths import SweepPaths
from perfexp.records.record import Status, read_points
from perfexp.records.sweep_record import Sweep
from perfexp.run.cluster import job_states
from tests.run.cluster.conftest import write_site
from tests.run.cluster.private_slurm import PrivateSlurm
from tests.support import composing

RUN = ("model=fake", "gpu=fake", "cluster=test", "stopping=coarse", "tracking=none")
LAUNCH = ("-m", "--config-dir=mine", "hydra/launcher=slurm", "hydra.launcher.wait=false")
#: Six runs of ten sizes.
SWEEP = ("sweep=sizes", "sweep.num_sizes=10", "batch_size=1,2,3,4,5,6", "output_dir=sweep")
#: Scratch of the sweeps of `faults`: a file system that is small enough to fill.
SCRATCH_MIB = 64


def perfexp(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perfexp", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)


def main() -> int:
    arguments = _parser().parse_args()
    root = Path(__file__).parent.parent
    os.environ["PYTHONPATH"] = str(root)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        settings = () if arguments.what == "scale" else ("SlurmdTimeout=10",)
        size = {"gpus": 8, "cpus": 16} if arguments.what == "mlflow" else {}
        with PrivateSlurm(
            folder / "slurm", accounting=arguments.accounting, settings=settings, **size
        ) as cluster:
            work = folder / "work"
            work.mkdir()
            if arguments.what == "mlflow":
                return mlflow(work, arguments.writers)
            if arguments.what == "scale":
                return scale(cluster, work, arguments.runs)
            return faults(cluster, work, arguments.faults, random.Random(arguments.seed))


# Faults


class Sweeps:
    """Sweeps one after the other, what is known of their points, and the faults that they met."""

    def __init__(self, cluster: PrivateSlurm, folder: Path, chance: random.Random) -> None:
        self.cluster, self.folder, self.chance = cluster, folder, chance
        self.finished: set[bytes] = set()
        self.lost: set[bytes] = set()
        self.twice = 0
        self.met: Counter[str] = Counter()

    @property
    def sweep(self) -> Path:
        return self.folder / "sweep"

    def submit(self) -> None:
        done = perfexp(*RUN, *LAUNCH, *SWEEP, folder=self.folder)
        if done.returncode not in (0, 1):
            print(f"submission: {done.stderr.strip()}", file=sys.stderr)

    def states(self) -> list[job_states.RunState]:
        return job_states.states(Sweep.load(self.sweep), self.sweep)

    def look(self) -> None:
        """Compare the finished points with those of the last look."""
        lines: list[bytes] = []
        for file in sorted(self.sweep.glob("*/points.jsonl")):
            for line in file.read_bytes().splitlines(keepends=True):
                with contextlib.suppress(ValueError):  # the last line may be torn
                    if json.loads(line)["status"] == "ok":
                        lines.append(file.parent.name.encode() + b" " + line.rstrip(b"\n"))
        keys = [
            (line.partition(b" ")[0], json.dumps(json.loads(line.partition(b" ")[2])["key"]))
            for line in lines
        ]
        self.twice += len(keys) - len(set(keys))
        self.lost |= self.finished - set(lines)
        self.finished |= set(lines)

    def inject(self) -> None:
        kind = self.chance.choice(
            ["slurmd killed", "controller restarted", "scratch full", "node down", "cancelled"]
        )
        number = self.chance.choice([1, 2])
        if kind == "slurmd killed":
            self.cluster.end(f"slurmd{number}", signal.SIGKILL)
            time.sleep(self.chance.uniform(1, 15))  # longer than SlurmdTimeout, sometimes
            self.cluster.start_node(number)
        elif kind == "controller restarted":
            self.cluster.end("slurmctld", self.chance.choice([signal.SIGTERM, signal.SIGKILL]))
            time.sleep(self.chance.uniform(0, 5))
            self.cluster.start_controller()
        elif kind == "scratch full":
            with contextlib.suppress(OSError), (self.folder / "filler").open("wb") as filler:
                for _ in range(2 * SCRATCH_MIB):
                    filler.write(bytes(1 << 20))
                    filler.flush()
            time.sleep(self.chance.uniform(1, 5))
            (self.folder / "filler").unlink(missing_ok=True)
        elif kind == "node down":
            name = self.cluster.name(number)
            self._control("update", f"NodeName={name}", "State=DOWN", "Reason=fault")
            time.sleep(self.chance.uniform(1, 5))
            self._control("update", f"NodeName={name}", "State=RESUME")
        else:
            jobs = [state.job for state in self.states() if state.job and not state.is_over]
            if jobs:
                subprocess.run(
                    ["scancel", self.chance.choice(jobs)], capture_output=True, timeout=60
                )
        self.met[kind] += 1
        print(f"{kind}: {len(self.finished)} points finished", file=sys.stderr, flush=True)

    def release(self) -> None:
        """Start jobs that SLURM holds back for two minutes after it has queued them again."""
        listed = subprocess.run(
            ["squeue", "-h", "--array", "-t", "PD", "-o", "%A"], capture_output=True, text=True
        )
        for job in listed.stdout.split():
            self._control("release", job)
            self._control("update", f"JobId={job}", "StartTime=now")
        for number in (1, 2):
            self._control("update", f"NodeName={self.cluster.name(number)}", "State=RESUME")

    def _control(self, *words: str) -> None:
        subprocess.run(["scontrol", *words], capture_output=True, timeout=60)


def faults(cluster: PrivateSlurm, folder: Path, count: int, chance: random.Random) -> int:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SCRATCH_MIB}m", "tmpfs", str(folder)], check=True
    )
    problems, sweeps, points = [], 0, 0
    met: Counter[str] = Counter()
    lost = twice = 0
    try:
        while sum(met.values()) < count:
            for path in folder.iterdir():
                shutil.rmtree(path)
            write_site(folder / "mine")
            one = Sweeps(cluster, folder, chance)
            problems += _one_sweep(one, count - sum(met.values()))
            met += one.met
            lost, twice, sweeps = lost + len(one.lost), twice + one.twice, sweeps + 1
            points += len(one.finished)
            print(
                f"sweep {sweeps}: {dict(one.met)}, {len(one.finished)} points",
                file=sys.stderr,
                flush=True,
            )
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
    figures = {"faults_count": sum(met.values()), "sweeps_count": sweeps, "points_count": points}
    figures |= {"lost_count": lost, "twice_count": twice, "unaccounted_count": len(problems)}
    print(
        json.dumps(
            {"figures": figures, "outcome": {kind: str(number) for kind, number in met.items()}}
        )
    )
    print("\n".join(problems), file=sys.stderr)
    return int(bool(lost or twice or problems))


def _one_sweep(one: Sweeps, most: int) -> list[str]:
    """Measure a sweep while faults happen; return what is not as it should be at the end."""
    one.submit()
    end = time.monotonic() + 1500
    while time.monotonic() < end:
        one.look()
        states = one.states()
        if all(state.state is job_states.JobState.done for state in states) and len(states) == 6:
            break
        if sum(one.met.values()) < most and one.finished:
            one.inject()
            one.look()
        one.release()
        if any(
            state.is_over and state.state is not job_states.JobState.done for state in one.states()
        ):
            one.submit()
        time.sleep(one.chance.uniform(0, 3))
    one.look()
    problems = [
        f"{state.name}: {state.state} {state.why}"
        for state in one.states()
        if state.state != "done"
    ]
    for number in range(6):
        points = read_points(one.sweep / f"{number}_{number + 1}" / "points.jsonl")
        done = {point.key for point in points if point.status is Status.OK}
        if len(done) != 10 or len(points) != 10:
            problems.append(f"run {number}: {len(done)} points of 10, {len(points)} lines")
    return problems


# Scale


def scale(cluster: PrivateSlurm, folder: Path, runs: int) -> int:
    counted = folder / "squeue.calls"
    _count_calls(folder / "bin" / "squeue", counted)
    run = [text for text in RUN if not text.startswith("cluster=")]
    first = perfexp(*run, "batch_size=1", "output_dir=one", folder=folder)
    assert first.returncode == 0, first.stderr
    for number in (1, 2):
        cluster.call(
            "scontrol", "update", f"NodeName={cluster.name(number)}", "State=DRAIN", "Reason=scale"
        )
    seeds = f"seed=range(0,{runs})"
    launch = [text for text in LAUNCH if not text.startswith("--config-dir")]
    with (
        contextlib.chdir(folder),
        composing.remembered(),
    ):  # Hydra needs half a second of CPU time for each run
        assert (
            measure(
                [*run, *launch, seeds, "batch_size=1", f"--max-jobs={runs}", "output_dir=sweep"]
            )
            == 0
        )
    arrays = len(
        {
            entry.job.partition("_")[0]
            for entry in job_states.load(SweepPaths(folder / "sweep")).values()
        }
    )
    pending = _timed_status(folder)
    _leave_records(folder, runs // 2)
    half = _timed_status(folder)
    calls, start = counted.stat().st_size if counted.exists() else 0, time.perf_counter()
    num_status = 0
    while time.perf_counter() - start < 40:
        perfexp("status", "sweep", folder=folder)
        num_status += 1
    seconds = time.perf_counter() - start
    figures = {
        "runs_count": runs,
        "arrays_count": arrays,
        "status_pending_seconds": round(pending[0], 2),
        "status_pending_cpu_seconds": round(pending[1], 2),
        "status_half_done_seconds": round(half[0], 2),
        "status_half_done_cpu_seconds": round(half[1], 2),
        "status_calls_count": num_status,
        "squeue_calls_count": counted.stat().st_size - calls,
        "within_seconds": round(seconds, 1),
    }
    print(json.dumps({"figures": figures}))
    return 0


def _timed_status(folder: Path) -> tuple[float, float]:
    """Wall time and CPU time of a status."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = perfexp("status", "sweep", folder=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "jobs" in done.stdout, done.stderr
    print(done.stdout[-600:], file=sys.stderr)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


def _count_calls(wrapper: Path, counted: Path) -> None:
    """Have each call of squeue leave a byte in a file."""
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nprintf x >> {counted}\nexec {shutil.which("squeue")} "$@"\n')
    wrapper.chmod(0o755)
    os.environ["PATH"] = f"{wrapper.parent}:{os.environ['PATH']}"


def _leave_records(folder: Path, count: int) -> None:
    """Give runs of the sweep what a finished run leaves; only its identity differs."""
    sweep = Sweep.load(folder / "sweep")
    for child in sweep.children[:count]:
        place = folder / "sweep" / child.directory
        shutil.copytree(folder / "one", place)
        record = json.loads((place / "record.json").read_bytes())
        record["sweep"] = {
            "uid": sweep.uid,
            "job": child.job,
            "jobs": sweep.jobs,
            "axes": child.axes,
            "directory": "..",
        }
        (place / "record.json").write_text(json.dumps(record))


# MLflow


def mlflow(folder: Path, writers: int) -> int:
    write_site(folder / "mine")
    run = [text for text in RUN if not text.startswith("tracking=")]
    launch = [text for text in LAUNCH if text != "hydra.launcher.wait=false"]
    seeds = f"seed=range(0,{writers})"
    with _server(folder) as uri:
        sent = perfexp(
            *run, *launch, seeds, f"tracking.uri={uri}", "output_dir=sent", folder=folder
        )
        assert sent.returncode == 0, sent.stderr
        in_server = _names(uri)
    kept = perfexp(*run, "tracking=none", *launch, seeds, "output_dir=kept", folder=folder)
    assert kept.returncode == 0, kept.stderr
    store = f"sqlite:///{folder / 'later.db'}"
    assert perfexp("sync", "kept", "--uri", store, folder=folder).returncode == 0
    in_store = _names(store)
    figures = {
        "writers_count": writers,
        "runs_in_server_count": sum(in_server.values()),
        "runs_logged_later_count": sum(in_store.values()),
        "different_names_count": len(set(in_server) ^ set(in_store)),
    }
    print(json.dumps({"figures": figures}))
    return int(in_server != in_store or sum(in_server.values()) != writers)


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """While entered, an MLflow server runs; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [
        f"--backend-store-uri=sqlite:///{folder / 'server.db'}",
        f"--artifacts-destination={folder / 'artifacts'}",
    ]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",
        *places,
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health"),
            ):
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _names(uri: str) -> Counter[str]:
    """Names of the runs in a store that have a parent, the sweep."""
    code = (
        f"import mlflow; client = mlflow.MlflowClient({uri!r}); "
        "ids = [experiment.experiment_id for experiment in client.search_experiments()]; "
        "runs = client.search_runs(ids, max_results=1000); "
        "print(*(run.info.run_name for run in runs if 'mlflow.parentRunId' in run.data.tags), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Counter(done.stdout.split())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("faults", "scale", "mlflow"))
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--accounting", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
