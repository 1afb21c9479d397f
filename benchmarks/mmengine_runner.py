"""Steady training of a segmentation model by three clocks: mmengine's Runner, a bare loop, and perfexp.

    perfexp make-data streets
    python benchmarks/mmengine_runner.py streets [--config NAME] [--batch-size 2] [--size 512x1024] [--seconds 60]

All three train the same configuration of mmsegmentation on the same pictures through its own training pipeline, with as
many workers of a DataLoader, in float32, one after the other on the same device, each in a process of its own:

* **Runner**: mmengine's, with its IterTimerHook; the mean of the `time` that it logs, without the first lines, and the
  time by the clock from the first step behind these to the last.
* **loop**: mmengine's data loader and data preprocessor, the model's loss, its optimiser and its schedule in a `for`
  statement, for so many seconds after a warm-up; a wait for the device at both ends.
* **perfexp**: `throughput` of `model=mmseg data=cityscapes mode=train`.

A line for each: images/s, and over the loop's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from perfexp.models.mmseg_config import import_mmseg, read_config, without_other_cards
from perfexp.record import Record
from perfexp.summary import rows
from perfexp.sweep import parse_sizes

#: Lines of mmengine's log that are left out: its first are slow, and its mean is over the last ten steps.
SKIPPED_LINES = 3
INTERVAL = 10


def configuration(name: str, data: Path, size: tuple[int, int], batch_size: int, workers: int, work_dir: Path) -> Any:
    """A configuration of mmsegmentation that trains on this data, as mmengine's Runner takes it."""
    import_mmseg()
    config, _ = read_config(name, {"crop_size": size})
    without_other_cards(config.model)
    config.model.data_preprocessor.size = size
    loader = config.train_dataloader
    loader.batch_size, loader.num_workers, loader.persistent_workers = batch_size, workers, workers > 0
    loader.dataset.data_root = str(data)
    for transform in loader.dataset.pipeline:
        if transform["type"] == "RandomCrop":
            transform["crop_size"] = size
    config.work_dir, config.default_scope, config.log_level = str(work_dir), "mmseg", "WARNING"
    for key in ("val_dataloader", "val_cfg", "val_evaluator", "test_dataloader", "test_cfg", "test_evaluator"):
        config.pop(key, None)
    config.env_cfg.cudnn_benchmark = False  # as torch's own default, and so the others', is
    config.default_hooks = {
        "timer": {"type": "IterTimerHook"},
        "logger": {"type": "LoggerHook", "interval": INTERVAL, "log_metric_by_epoch": False},
        "param_scheduler": {"type": "ParamSchedulerHook"},
    }
    return config


def by_runner(config: Any, seconds: float) -> tuple[float, float]:
    """Seconds of a step by the mean of what mmengine logs, and by the clock around the same steps."""
    from mmengine.hooks import Hook
    from mmengine.runner import Runner

    class Clock(Hook):  # type: ignore[misc]
        """Stops after the time is over, and remembers when each step ended."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            self.ends.append(time.perf_counter())
            if len(self.ends) > INTERVAL * (SKIPPED_LINES + 2) and self.ends[-1] - self.ends[0] > seconds:
                runner.train_loop._max_iters = runner.iter + 1

    config.train_cfg = {"type": "IterBasedTrainLoop", "max_iters": 10**6, "val_interval": 10**6}
    runner, clock = Runner.from_cfg(config), Clock()
    runner.register_hook(clock, priority="LOWEST")
    runner.train()
    wait()
    scalars = next(Path(runner.log_dir, "vis_data").glob("scalars.json"), None)
    assert scalars is not None, "mmengine wrote no scalars.json"
    lines = [json.loads(line) for line in scalars.read_text().splitlines()]
    logged = [line["time"] for line in lines if "time" in line][SKIPPED_LINES:]
    ends = clock.ends[SKIPPED_LINES * INTERVAL :]
    return sum(logged) / len(logged), (ends[-1] - ends[0]) / (len(ends) - 1)


def by_loop(config: Any, seconds: float, warmup_seconds: float = 10.0) -> float:
    """Seconds of a step in a loop that has no line of perfexp or of a hook."""
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import PARAM_SCHEDULERS, DefaultScope
    from mmengine.runner import Runner
    from mmseg.registry import MODELS

    with DefaultScope.overwrite_default_scope("mmseg"):
        model = MODELS.build(config.model).to("cuda" if torch.cuda.is_available() else "cpu").train()
        optimizer = build_optim_wrapper(model, config.optim_wrapper).optimizer
        schedules = [
            PARAM_SCHEDULERS.build(dict(each), default_args={"optimizer": optimizer}) for each in config.param_scheduler
        ]
        loader = Runner.build_dataloader(config.train_dataloader, seed=0)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    steps, start, begin = 0, 0.0, time.perf_counter()
    for batch in endless():
        data = model.data_preprocessor(batch, training=True)
        loss, _ = model.parse_losses(model(**data, mode="loss"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        steps += 1
        if not start and time.perf_counter() - begin > warmup_seconds:
            wait()
            steps, start = 0, time.perf_counter()
        if start and steps and time.perf_counter() - start > seconds:
            break
    wait()
    return (time.perf_counter() - start) / steps


def by_perfexp(arguments: argparse.Namespace, folder: Path) -> float:
    """Samples a second of a run."""
    command = [sys.executable, "-m", "perfexp", "model=mmseg", f"model.config={arguments.config}", "mode=train"]
    command += ["data=cityscapes", f"data.root={arguments.data}", f"data.workers={arguments.workers}"]
    command += [f"input_size={arguments.size}", f"batch_size={arguments.batch_size}", f"gpu={arguments.gpu}"]
    command += ["stopping.max_seconds=30", "percentiles=[50]", "probes.work=false", "tracking=none", "quiet=true"]
    subprocess.run([*command, f"output_dir={folder}"], check=True)
    [row] = rows(Record.load(folder))
    assert row.samples_per_second is not None
    return row.samples_per_second.value


def wait() -> None:
    """Until the device has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def apart(clock: Callable[..., Any], arguments: argparse.Namespace, folder: Path) -> Any:
    """What a clock says in a process of its own, which leaves the device and the processors to the next one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(configured, clock, arguments, folder).result()


def configured(clock: Callable[..., Any], arguments: argparse.Namespace, folder: Path) -> Any:
    """Have a clock measure the configuration that is asked for."""
    importlib.import_module("cv2").setNumThreads(0)  # as the Runner does
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    [size] = parse_sizes(arguments.size)
    config = configuration(arguments.config, arguments.data, size, arguments.batch_size, arguments.workers, folder)
    return clock(config, arguments.seconds)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder in the layout of Cityscapes")
    parser.add_argument("--config", default="fast_scnn_8xb4-160k_cityscapes-512x1024")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--size", default="512x1024")
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--gpu", default="auto")
    arguments = parser.parse_args()
    images = arguments.batch_size
    print(f"{arguments.config}, batch {images}, {arguments.size}, {arguments.workers} workers")
    print("| clock | images/s | over the loop |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loop = images / apart(by_loop, arguments, folder / "loop")

        def tell(what: str, rate: float) -> None:
            print(f"| {what} | {rate:.4g} | {rate / loop - 1:+.2%} |", flush=True)

        tell(f"loop of {arguments.seconds:g} s", loop)
        logged, clocked = apart(by_runner, arguments, folder / "runner")
        tell("Runner, by what it logs", images / logged)
        tell("Runner, by the clock", images / clocked)
        tell("perfexp, `throughput`", by_perfexp(arguments, folder / "perfexp"))


if __name__ == "__main__":
    main()
