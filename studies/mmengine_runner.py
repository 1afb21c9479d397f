"""Steady training of a segmentation model by a bare loop, mmengine's Runner and perfexp, in turns.

    perfexp make-data streets
    python studies/mmengine_runner.py streets [--config NAME] [--batch-size 2] [--size 512x1024] [--workers 5]
        [--rounds 64] [--steps 25] [--only perfexp …]

All train the same configuration of mmsegmentation on the same pictures through its own training pipeline, with as
many workers of a DataLoader, in float32, each in a process of its own that stays. One of them works at a time, the
others wait: a machine that others use, too, may be a tenth slower a few seconds later. So turns are many and short. In
each of them more steps go by than batches were loaded ahead before the clock starts; then it is read between two steps,
without a wait: the device is behind its host by as much at the beginning as at the end.

* **loop**: mmengine's data loader and data preprocessor, the model's loss, its optimiser and its schedule in a `for`
  statement.
* **loop that reads**: the same, and each step ends with reading its losses and accuracies back, which waits for the
  device; so does mmengine's RuntimeInfoHook.
* **Runner**: mmengine's; the mean of the `time` that its IterTimerHook hands to the log, and the time by the clock.
* **perfexp**: the series `throughput` of `model=mmseg data=cityscapes mode=train` (`latency` on a CPU).

A line for each round, and one for each clock: images/s over all its turns, and by how much it is over the loop of the
same round: the geometric mean of the rounds' ratios, with its 95 % interval. `--only` takes some clocks beside the
loop.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from perfexp.cli.composition import compose
from perfexp.measuring.procedure import Procedure
from perfexp.models.mmseg_config import import_mmseg, read_config, without_sync_batch_norm
from perfexp.plan import config as configuration
from perfexp.records.messages import Events
from perfexp.records.paths import RunPaths
from perfexp.records.sizes import parse_sizes
from perfexp.statistics import moderated
from perfexp.timing import collecting, depth, queue
from perfexp.timing.stopping import Fixed
from perfexp.worker.workbench import Workbench

#: Steps before the first turn.
WARMUP_STEPS = 20
#: Batches that each of the loader's processes has ready: torch's own number.
PREFETCH_FACTOR = 2


class Turns:
    """The turns of one process, as it is given them.

    Args:
        connection: to the process that gives them.
        steps: of a turn.
        workers: processes of its loader.

    Attributes:
        steps: of a turn that count.
        settling: steps before these.
    """

    def __init__(self, connection: Connection, steps: int, workers: int) -> None:
        self._connection = connection
        self.steps, self.settling = steps, PREFETCH_FACTOR * workers + 2

    def wait(self) -> None:
        """Wait for a turn. The process ends when there is none any more."""
        if not self._connection.recv():
            os._exit(0)  # a loader's processes end with this one

    def tell(self, *step_seconds: float) -> None:
        """A turn is over, or the process is ready for its first.

        Args:
            step_seconds: mean of a step, by each of its clocks.
        """
        self._connection.send(step_seconds)


def wait() -> None:
    """Until the device has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mmengine_configuration(arguments: argparse.Namespace, work_dir: Path) -> Any:
    """A configuration of mmsegmentation that trains on this data, as mmengine's Runner takes it."""
    importlib.import_module("cv2").setNumThreads(0)  # as the Runner does
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    import_mmseg()
    [size] = parse_sizes(arguments.size)
    config, _ = read_config(arguments.config, {"crop_size": size})
    without_sync_batch_norm(config.model)
    config.model.data_preprocessor.size = size
    loader, workers = config.train_dataloader, arguments.workers
    loader.batch_size, loader.num_workers, loader.persistent_workers = (
        arguments.batch_size,
        workers,
        workers > 0,
    )
    loader.dataset.data_root = str(arguments.data)
    for transform in loader.dataset.pipeline:
        if transform["type"] == "RandomCrop":
            transform["crop_size"] = size
    config.work_dir, config.default_scope, config.log_level = str(work_dir), "mmseg", "WARNING"
    for key in (
        "val_dataloader",
        "val_cfg",
        "val_evaluator",
        "test_dataloader",
        "test_cfg",
        "test_evaluator",
    ):
        config.pop(key, None)
    config.env_cfg.cudnn_benchmark = False  # as torch's own default, and so the others', is
    config.default_hooks = {
        "timer": {"type": "IterTimerHook"},
        "logger": {"type": "LoggerHook", "interval": 10, "log_metric_by_epoch": False},
        "param_scheduler": {"type": "ParamSchedulerHook"},
    }
    return config


def by_loop(
    turns: Turns, arguments: argparse.Namespace, folder: Path, *, reads: bool = False
) -> None:
    """A loop that has no line of perfexp or of a hook; in one that reads, each step ends with its losses' values."""
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import PARAM_SCHEDULERS, DefaultScope
    from mmengine.runner import Runner
    from mmseg.registry import MODELS

    config = mmengine_configuration(arguments, folder)
    with DefaultScope.overwrite_default_scope("mmseg"):
        model = (
            MODELS.build(config.model).to("cuda" if torch.cuda.is_available() else "cpu").train()
        )
        optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
        schedules = [
            PARAM_SCHEDULERS.build(dict(each), default_args={"optimizer": optimizer})
            for each in config.param_scheduler
        ]
        loader = Runner.build_dataloader(config.train_dataloader, seed=0)

    def train(steps: int) -> None:
        for batch in islice(batches, steps):
            data = model.data_preprocessor(batch, training=True)
            loss, logged = model.parse_losses(model(**data, mode="loss"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
            if reads:
                [float(value.detach()) for value in logged.values()]

    batches = (batch for _ in iter(int, 1) for batch in loader)
    train(WARMUP_STEPS)
    wait()
    turns.tell()
    while True:
        turns.wait()
        train(turns.settling)
        start = time.perf_counter()
        train(turns.steps)
        taken = time.perf_counter() - start
        wait()
        turns.tell(taken / turns.steps)


def by_runner(turns: Turns, arguments: argparse.Namespace, folder: Path) -> None:
    """Mmengine's Runner: what its timer hook says, and the clock around the same steps."""
    from mmengine.hooks import Hook
    from mmengine.runner import Runner

    class Clock(Hook):  # type: ignore[misc]
        """Takes the turns, between two steps."""

        def __init__(self) -> None:
            self._first, self._begin = WARMUP_STEPS, 0.0

        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            """A turn's clock starts after step `_first` and stops `turns.steps` later."""
            now, done = time.perf_counter(), runner.iter + 1
            if done == WARMUP_STEPS:
                wait()
                turns.tell()
                self._wait_for_turn(done)
            elif done == self._first:
                self._begin = now
            elif done == self._first + turns.steps:
                noted, _ = runner.message_hub.get_scalar("train/time").data
                wait()
                turns.tell(
                    float(noted[self._first : done].mean()), (now - self._begin) / turns.steps
                )
                self._wait_for_turn(done)

        def _wait_for_turn(self, done: int) -> None:
            turns.wait()
            self._first = done + turns.settling

    config = mmengine_configuration(arguments, folder)
    config.train_cfg = {"type": "IterBasedTrainLoop", "max_iters": 10**6, "val_interval": 10**6}
    runner = Runner.from_cfg(config)
    runner.register_hook(Clock(), priority="LOWEST")
    runner.train()


def by_perfexp(turns: Turns, arguments: argparse.Namespace, folder: Path) -> None:
    """The series that perfexp's samples/s are of."""

    def work(procedure: Procedure) -> None:
        [key], device = plan.timed_keys(), procedure.device
        with procedure.step(key) as (step, batches):
            procedure.first_call(step, batches)
            k = depth.group_calls(step.call, device)[0] if device.asynchronous else 1
            block = (
                queue.Loop(step.call, device, k)
                if device.asynchronous
                else collecting.HostChain(step.call, device)
            )
            rule = Fixed(warmup=turns.settling, measure=turns.steps)
            turns.tell()
            while True:
                turns.wait()
                collector = collecting.Collector(
                    "throughput", block, lambda _: rule.begin(calls_per_sample=k), k
                )
                collecting.collect([collector], device.now_ns)
                wait()
                turns.tell(statistics.fmean(collector.series().measured))

    overrides = ["model=mmseg", f"model.config={arguments.config}", "mode=train", "data=cityscapes"]
    overrides += [
        f"data.root={arguments.data}",
        f"data.workers={arguments.workers}",
        f"input_size={arguments.size}",
    ]
    overrides += [f"batch_size={arguments.batch_size}", f"gpu={arguments.gpu}"]
    plan = configuration.typed(compose(overrides))
    with Workbench(plan, RunPaths(folder), Events(None)).opened() as procedure:
        work(procedure)


#: What each process runs, and what its clocks are called.
CLOCKS: dict[str, tuple[Callable[[Turns, argparse.Namespace, Path], None], tuple[str, ...]]] = {
    "loop": (by_loop, ("loop",)),
    "reads": (partial(by_loop, reads=True), ("loop that reads",)),
    "runner": (by_runner, ("Runner, as it logs", "Runner, by the clock")),
    "perfexp": (by_perfexp, ("perfexp",)),
}


def begin(name: str, connection: Connection, arguments: argparse.Namespace, folder: Path) -> None:
    """The process of one clock; tells what goes wrong in place of a turn."""
    try:
        folder.mkdir()
        CLOCKS[name][0](Turns(connection, arguments.steps, arguments.workers), arguments, folder)
    except BaseException:
        connection.send(traceback.format_exc())
        os._exit(1)


def received(connection: Connection) -> tuple[float, ...]:
    """What a clock tells next."""
    try:
        told = connection.recv()
    except EOFError:
        sys.exit("A process ended without a word.")
    if isinstance(told, str):
        sys.exit(told)
    return tuple(told)


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """Seconds of a step by each clock, for each round."""
    spawn, connections = multiprocessing.get_context("spawn"), {}
    for name in CLOCKS:
        if name != "loop" and name not in arguments.only:
            continue
        connections[name], theirs = spawn.Pipe()
        spawn.Process(target=begin, args=(name, theirs, arguments, folder / name)).start()
        theirs.close()
    try:
        for connection in connections.values():
            received(connection)
        return list(rounds(connections, arguments.rounds, arguments.batch_size))
    finally:
        for connection in connections.values():
            with suppress(OSError):
                connection.send(False)


def rounds(
    connections: dict[str, Connection], count: int, images: int
) -> Iterator[dict[str, float]]:
    """Each begins with another clock."""
    names = list(connections)
    titles = [title for name in names for title in CLOCKS[name][1]]
    print(f"| round | {' | '.join(titles)} |\n|---:{'|---:' * len(titles)}|")
    for number in range(count):
        taken: dict[str, float] = {}
        for each in range(len(names)):
            name = names[(number + each) % len(names)]
            connections[name].send(True)
            taken |= zip(CLOCKS[name][1], received(connections[name]), strict=True)
        print(
            f"| {number + 1} | {' | '.join(f'{images / taken[title]:.4g}' for title in titles)} |",
            flush=True,
        )
        yield taken


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder in the layout of Cityscapes")
    parser.add_argument("--config", default="fast_scnn_8xb4-160k_cityscapes-512x1024")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--size", default="512x1024")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument(
        "--steps",
        type=int,
        default=25,
        help="of a turn; 64 × 25 are a minute of FastSCNN on an H200",
    )
    parser.add_argument("--gpu", default="auto")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(CLOCKS)[1:],
        default=list(CLOCKS),
        help="clocks beside the loop",
    )
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: an interval needs 2 at least")
    print(
        f"{arguments.config}, batch {arguments.batch_size}, {arguments.size}, {arguments.workers} workers, images/s\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        taken = measure(arguments, Path(folder))
    print("\n| clock | images/s | over the loop | 95 % interval |\n|---|---:|---:|---:|")
    for title in taken[0]:
        rate = arguments.batch_size / statistics.fmean(each[title] for each in taken)
        over = moderated.geometric_mean([each["loop"] / each[title] for each in taken])
        ends = "" if title == "loop" else f"{over.low - 1:+.1%} to {over.high - 1:+.1%}"
        print(f"| {title} | {rate:.4g} | {over.value - 1:+.1%} | {ends} |")


if __name__ == "__main__":
    main()
