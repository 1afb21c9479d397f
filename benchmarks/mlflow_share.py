"""What MLflow costs: a run of 60 s that is sent afterwards, and a training whose epochs are sent while it runs.

    python benchmarks/mlflow_share.py [sent|live] [--repeats 3] [--seconds 240] [--block 20]

* `sent`: measuring without MLflow, then sending the record to an existing store. The claim: at most 5 % of the whole,
  the import of mlflow included. Sending is `perfexp log` in a fresh process, which also pays for starting Python: an
  upper bound.
* `live`: one training on the CPU per repetition, whose epochs go to an MLflow server on this machine in every other
  block of `--block` seconds, in the order with, without, without, with. The claim: at most 1 %. The first block, which
  creates the run, does not count. Printed: the time of an epoch with over without, the geometric mean over all pairs of
  adjacent blocks with its 95 % interval by Student's t, and the share of the time with a delivery in progress. The
  training, the process that sends and the server share one core: an upper bound.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.main import main as command
from perfexp.records.record import Point
from perfexp.statistics.distributions import student95
from perfexp.tracking.live import Follower
from perfexp.tracking.payload import Payload

RUN = ("model=resnet18", "input_size=96", "stopping.epsilon=0.000001", "stopping.max_seconds=52", "output_dir=run")
#: A training with short epochs of a small network; its epochs are more than it makes in the time.
TRAINING = (
    *("experiment=cifar10", "model=shufflenet_v2_x0_5", "data.root=shapes", "batch_size=32", "epochs=100000"),
    *("mode.train.checkpoints=false", "mode.train.eval_every=100000", "probes.work=false", "quiet=true"),
    "execution.threads=1",
)
IMAGES = 64


def perfexp(folder: Path, *arguments: str) -> float:
    """Seconds of one command."""
    start = time.perf_counter_ns()
    subprocess.run([sys.executable, "-m", "perfexp", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter_ns() - start) * 1e-9


def sent() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        perfexp(folder, "model=fake", "gpu=fake", "stopping=fixed", "output_dir=first")  # makes the store
        measured = perfexp(folder, *RUN, "tracking=none")
        seconds = perfexp(folder, "log", "run")
    print(f"measuring        {measured:.1f} s")
    print(f"sending          {seconds:.2f} s")
    print(f"share            {seconds / (measured + seconds):.2%}")


@dataclass
class Block:
    """Part of a training; `sending` is the time with a delivery in progress, in seconds as `seconds`."""

    is_live: bool
    seconds: float = 0.0
    epochs: int = 0
    sending: float = 0.0


class Finished(KeyboardInterrupt):
    """The time of a repetition is over; the command ends as by Ctrl-C."""


class Alternating(Follower):
    """Sends epochs in every other block only; the last blocks remain in `blocks` of the class."""

    length, limit = 20.0, 240.0
    blocks: ClassVar[list[Block]] = []

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._begin = self._last_epoch = time.monotonic()
        type(self).blocks = [Block(is_live=True)]
        send = self._send

        def timed(content: Payload) -> object:
            start, block = time.monotonic(), self.blocks[-1]
            answer = send(content)
            block.sending += time.monotonic() - start
            return answer

        self._send = timed

    def add(self, point: Point) -> None:
        now, block = time.monotonic(), self.blocks[-1]
        block.seconds += now - self._last_epoch
        block.epochs += 1
        self._last_epoch = now
        if block.seconds >= self.length:
            number = len(self.blocks)  # the first block, live as well, does not count
            with self._changed:
                self.blocks.append(Block(is_live=number % 4 in (1, 0)))
        super().add(point)
        if now - self._begin >= self.limit:
            raise Finished

    def _wait(self, seconds: float) -> bool:
        """Wait as the follower does, and then for a block in which epochs are sent."""
        if not super()._wait(seconds):
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self.blocks[-1].is_live)
            return not self._is_over


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run an MLflow server with a new sqlite store; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ("--workers", "1", "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/server.db")
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *arguments], env=environment, cwd=folder, stdout=log, stderr=log
        )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def live(repeats: int, seconds: float, length: float) -> None:
    Alternating.length, Alternating.limit = length, seconds
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of the processes that it starts, too
    ratios, sending, whole = [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as address, contextlib.chdir(name):
        perfexp(Path(name), "make-data", "cifar10", "shapes", "--train", str(IMAGES), "--test", "32")
        for repeat in range(repeats):
            with patch("perfexp.tracking.live.Follower", Alternating):
                command([*TRAINING, f"tracking.uri={address}", f"output_dir=run{repeat}"])
            blocks = Alternating.blocks[1:-1]
            for one, other in zip(blocks[::2], blocks[1::2], strict=False):
                on, off = (one, other) if one.is_live else (other, one)
                ratios.append(math.log(on.seconds / on.epochs / (off.seconds / off.epochs)))
            sending += sum(block.sending for block in blocks if block.is_live)
            whole += sum(block.seconds for block in blocks if block.is_live)
            epoch = statistics.median(block.seconds / block.epochs for block in blocks)
            print(f"repetition {repeat + 1}: {len(blocks)} blocks, epochs of {epoch:.2f} s", flush=True)
    mean, spread = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    half = student95(len(ratios) - 1) * spread
    low, middle, high = (100 * math.expm1(value) for value in (mean - half, mean, mean + half))
    print(f"added            {middle:+.2f} % ({low:+.2f} … {high:+.2f} %), {len(ratios)} pairs of blocks")
    print(f"delivering       {sending / whole:.2%} of the time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("sent", "live"), help="what to measure; both by default")
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
