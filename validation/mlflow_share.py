"""What MLflow costs: a run of 60 s that is sent afterwards, and a training whose epochs are sent while it runs.

    python validation/mlflow_share.py [sent|live] [--repeats 3] [--seconds 240] [--block 20]

* `sent`: measuring without MLflow, then sending the record to an existing store. The claim: at most 5 % of the whole,
  the import of mlflow included. Sending is `perfexp sync` in a fresh process, which also pays for starting Python: an
  upper bound.
* `live`: one training on the CPU per repetition, whose epochs go to an MLflow server on this machine in every other
  block of `--block` seconds, in the order with, without, without, with. The claim: at most 1 %. The first block, which
  creates the run, does not count. The training, the process that sends and the server share one core, so that the
  training lacks each second that the others compute: an upper bound. Printed, as means over all pairs of adjacent
  blocks with 95 % intervals by Student's t: the share of the core that perfexp's own process, the sending process and
  the server take with sending minus without, and the time of an epoch with over without, which any other load on the
  machine disturbs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.main import main as command
from perfexp.records.record import Point, Record
from perfexp.report.tracking import mlflow_sink
from perfexp.report.tracking.mlflow_sink import MlflowSink
from perfexp.statistics.distributions import student95

RUN = (
    "model=resnet18",
    "input_size=96",
    "stopping.target=0.000001",
    "stopping.max_seconds=52",
    "output_dir=run",
)
#: A training with short epochs of a small network; its epochs are more than it makes in the time.
TRAINING = (
    *(
        "experiment=cifar10",
        "model=shufflenet_v2_x0_5",
        "data.root=shapes",
        "batch_size=32",
        "epochs=100000",
    ),
    *(
        "mode.train.checkpoints=false",
        "mode.train.eval_every=100000",
        "probes.work=false",
        "quiet=true",
    ),
    "execution.threads=1",
)
IMAGES = 256


def perfexp(folder: Path, *arguments: str) -> float:
    """Seconds of one command."""
    start = time.perf_counter_ns()
    subprocess.run(
        [sys.executable, "-m", "perfexp", *arguments],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return (time.perf_counter_ns() - start) * 1e-9


def sent() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        perfexp(
            folder, "model=fake", "gpu=fake", "stopping=fixed", "output_dir=first"
        )  # makes the store
        measured = perfexp(folder, *RUN, "tracking=none")
        seconds = perfexp(folder, "sync", "run")
    print(f"measuring        {measured:.1f} s")
    print(f"sending          {seconds:.2f} s")
    print(f"share            {seconds / (measured + seconds):.2%}")


@dataclass
class Block:
    """Part of a training; `computing` is the CPU time of all processes but the training's, in seconds."""

    is_live: bool
    seconds: float = 0.0
    epochs: int = 0
    computing: float = 0.0


class Finished(KeyboardInterrupt):
    """The time of a repetition is over; the command ends as by Ctrl-C."""


class Alternating:
    """Passes epochs on in every other block only, and stops the sending process in the others.

    The last blocks remain in `blocks` of the class.
    """

    length, limit = 20.0, 240.0
    blocks: ClassVar[list[Block]] = []
    server = 0

    def __init__(self, follow: Callable[[Point], None]) -> None:
        self._follow = follow
        self._begin = self._last_epoch = time.monotonic()
        type(self).blocks = [Block(is_live=True)]
        self._computed = self._cpu_seconds()

    def __call__(self, point: Point) -> None:
        now, block = time.monotonic(), self.blocks[-1]
        block.seconds += now - self._last_epoch
        block.epochs += 1
        self._last_epoch = now
        if block.seconds >= self.length:
            number = len(self.blocks)  # the first block, live as well, does not count
            computed, self._computed = self._computed, self._cpu_seconds()
            block.computing = self._computed - computed
            self.blocks.append(Block(is_live=number % 4 in (1, 0)))
            self._let_send(self.blocks[-1].is_live)
        if self.blocks[-1].is_live:
            self._follow(point)
        if now - self._begin >= self.limit:
            self._let_send(True)
            raise Finished

    def _let_send(self, is_live: bool) -> None:
        """Let the sending process go on, or stop it: what waits in it would be sent in the next block."""
        if sender := mlflow_sink._sender:
            process = psutil.Process(sender.process.pid)
            process.resume() if is_live else process.suspend()

    def _cpu_seconds(self) -> float:
        """CPU time of this process, the sending process, and the server with its workers."""
        server = psutil.Process(self.server)
        processes = [psutil.Process(), server, *server.children(recursive=True)]
        processes += [psutil.Process(sender.process.pid)] if (sender := mlflow_sink._sender) else []
        return sum(
            times.user + times.system for times in (process.cpu_times() for process in processes)
        )


_FOLLOWING = MlflowSink.following


@contextlib.contextmanager
def alternating(
    sink: MlflowSink, record: Callable[[], Record]
) -> Iterator[Callable[[Point], None]]:
    """Follow a training as the sink does, in every other block."""
    with _FOLLOWING(sink, record) as follow:
        yield Alternating(follow)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """Run an MLflow server with a new sqlite store; gives its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (
        "--workers",
        "1",
        "--port",
        str(port),
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
    )
    environment = os.environ | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *arguments],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{address}/health", timeout=5),
            ):
                break
            time.sleep(0.1)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(30)


def live(repeats: int, seconds: float, length: float) -> None:
    Alternating.length, Alternating.limit = length, seconds
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of the processes that it starts, too
    shares, ratios = [], []
    with (
        tempfile.TemporaryDirectory() as name,
        server(Path(name)) as (address, process),
        contextlib.chdir(name),
    ):
        Alternating.server = process
        perfexp(
            Path(name), "make-data", "cifar10", "shapes", "--train", str(IMAGES), "--test", "32"
        )
        for repeat in range(repeats):
            with patch.object(MlflowSink, "following", alternating):
                command([*TRAINING, f"tracking.uri={address}", f"output_dir=run{repeat}"])
            blocks = Alternating.blocks[1:-1]
            for one, other in zip(blocks[::2], blocks[1::2], strict=False):
                on, off = (one, other) if one.is_live else (other, one)
                shares.append(100 * (on.computing / on.seconds - off.computing / off.seconds))
                ratios.append(math.log(on.seconds / on.epochs / (off.seconds / off.epochs)))
            epoch = statistics.median(block.seconds / block.epochs for block in blocks)
            print(
                f"repetition {repeat + 1}: {len(blocks)} blocks, epochs of {epoch:.2f} s",
                flush=True,
            )
    print(f"pairs of blocks  {len(shares)}")
    print("share of a core  {:.2f} % ({:.2f} … {:.2f} %)".format(*interval(shares)))
    print(
        "time of epochs   {:+.2f} % ({:+.2f} … {:+.2f} %)".format(
            *(100 * math.expm1(one) for one in interval(ratios))
        )
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean with both ends of its 95 % interval."""
    mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = student95(len(values) - 1) * error
    return mean, mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", nargs="?", choices=("sent", "live"), help="what to measure; both by default"
    )
    parser.add_argument("--repeats", type=int, default=3, help="trainings")
    parser.add_argument("--seconds", type=float, default=240.0, help="length of a training")
    parser.add_argument("--block", type=float, default=20.0, help="seconds of a block")
    options = parser.parse_args()
    if options.what != "live":
        sent()
    if options.what != "sent":
        live(options.repeats, options.seconds, options.block)


if __name__ == "__main__":
    main()
