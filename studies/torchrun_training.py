"""Training on several GPUs by a plain script under torchrun and by perfexp, in turns on one machine.

    python studies/torchrun_training.py [--model resnet50] [--precision amp_bf16] [--batch-size 128] [--size 224]
        [--gpus 2] [--rounds 8] [--steps 30]
    python studies/torchrun_training.py --model fastscnn --precision fp32 --batch-size 2 --size 512x1024
    python studies/torchrun_training.py --device cpu --model squeezenet1_1 --precision fp32 --batch-size 2 \
        --size 64 --rounds 3 --steps 4

Both train the same model on synthetic data that is on the device, with DistributedDataParallel. Each has processes of
its own that stay, one per GPU; one of the two works at a time. Every round begins with another clock:

* **torchrun**: a script without a line of perfexp around its steps: the wall time of its first rank, whose device is
  idle at the beginning and at the end.
* **perfexp**: the series `throughput` (`latency` on a CPU), as every measurement takes it: with a control message to
  each other rank before each step.
* **without messages**: the same steps in a burst of all ranks, the check of `ranks/samples_per_second`.
* **one alone**: a burst of perfexp's first rank, for the scaling efficiency.

It prints the images/s of each round, then for each clock the geometric mean over the rounds and the ratio to torchrun
in the same round, with 95 % intervals; the scaling efficiency; and the time of the control messages of a step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfexp.cli.composition import compose
from perfexp.host import lifeline
from perfexp.measuring.procedure import Procedure
from perfexp.measuring.ranks import SETTLING_CALLS, start
from perfexp.models import Sharing
from perfexp.models.mmseg import _samples
from perfexp.models.mmseg_config import build, read_config, without_sync_batch_norm
from perfexp.models.torchvision_import import import_torchvision
from perfexp.plan import plan_file
from perfexp.plan.config import Plan
from perfexp.records.messages import Events
from perfexp.records.sizes import parse_sizes
from perfexp.statistics import moderated
from perfexp.statistics.estimators import Interval
from perfexp.timing import collecting, queue
from perfexp.worker import rank_process

TORCHRUN, PERFEXP, BURST, ALONE = CLOCKS = ("torchrun", "perfexp", "without messages", "one alone")
#: Configurations of mmsegmentation; other models are torchvision's.
CONFIGS = {
    "fastscnn": "fast_scnn_8xb4-160k_cityscapes-512x1024",
    "ocrnet_hrnetw48": "ocrnet_hr48_4xb2-160k_cityscapes-512x1024",
    "segformer_b0": "segformer_mit-b0_8xb2-160k_cityscapes-512x1024",
}
#: Steps of a turn before its clock starts.
SETTLING_STEPS = 3
#: Limit on the end of a process after its last turn.
END_SECONDS = 20.0


def plain_training(arguments: argparse.Namespace) -> Callable[[int], None]:
    """The plain script: returns a function that trains for a number of steps."""
    rank, on_gpu, [size] = (
        int(os.environ["LOCAL_RANK"]),
        arguments.device == "cuda",
        parse_sizes(arguments.size),
    )
    device, batch = (
        torch.device("cuda", rank) if on_gpu else torch.device("cpu"),
        arguments.batch_size,
    )
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.gpus))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    images = torch.randn(batch, 3, *size).to(device, memory_format=layout)
    schedules: list[Any] = []
    if arguments.model in CONFIGS:
        from mmengine.optim import build_optim_wrapper
        from mmengine.registry import PARAM_SCHEDULERS, DefaultScope

        config, _ = read_config(CONFIGS[arguments.model], {})
        if not on_gpu:
            without_sync_batch_norm(config.model)
        module: Any = build(config.model, arguments.model).to(device, memory_format=layout).train()
        with DefaultScope.overwrite_default_scope("mmseg"):
            optimizer = build_optim_wrapper(
                module, {**config.optim_wrapper, "type": "OptimWrapper"}
            ).optimizer
            settings = {"optimizer": optimizer}
            schedules = [
                PARAM_SCHEDULERS.build(dict(one), default_args=settings)
                for one in config.param_scheduler
            ]
        labels = torch.randint(0, 19, (batch, *size), device=device)
        model = DistributedDataParallel(module, broadcast_buffers=False)

        def loss_of() -> torch.Tensor:
            loss: torch.Tensor = module.parse_losses(
                model(images, _samples(images, labels), mode="loss")
            )[0]
            return loss
    else:
        torchvision = import_torchvision()

        module = (
            torchvision.models.get_model(arguments.model).to(device, memory_format=layout).train()
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
        labels = torch.randint(0, 1000, (batch,), device=device)
        model = DistributedDataParallel(module)

        def loss_of() -> torch.Tensor:
            return torch.nn.functional.cross_entropy(model(images), labels)

    def train(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(
                device.type, torch.bfloat16, enabled=arguments.precision == "amp_bf16"
            ):
                loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for schedule in schedules:
                schedule.step()
        if on_gpu:
            torch.cuda.synchronize()

    return train


def be_plain(arguments: argparse.Namespace) -> None:
    """Train as a rank of torchrun, one turn for each message, until the connection ends."""
    train = plain_training(arguments)
    train(SETTLING_CALLS)
    with Client(str(arguments.folder / "turns")) as connection, suppress(EOFError):
        connection.send(TORCHRUN)
        while True:
            connection.recv()
            train(SETTLING_STEPS)
            begin = time.perf_counter()
            train(arguments.steps)
            connection.send(((time.perf_counter() - begin) / arguments.steps, 0.0))
    os._exit(0)


class Messages:
    """Writes control messages as `os.write` does, and adds up the time that this takes."""

    def __init__(self) -> None:
        self.seconds, self._write = 0.0, os.write

    def write(self, descriptor: int, message: bytes) -> int:
        """See `os.write`."""
        begin = time.perf_counter_ns()
        written = self._write(descriptor, message)
        self.seconds += (time.perf_counter_ns() - begin) * 1e-9
        return written


def be_rank(arguments: argparse.Namespace) -> int:
    """Be a rank of perfexp, the first of which takes turns in place of the points of its plan."""

    def take_turns(procedure: Procedure, plan: Plan, *_: Any) -> bool:
        [key], device, group, messages = (
            plan.timed_keys(),
            procedure.device,
            procedure.group,
            Messages(),
        )
        with (
            Client(str(arguments.folder / "turns")) as connection,
            ExitStack() as stack,
            suppress(EOFError),
        ):
            with patch.object(os, "write", messages.write):  # which the step remembers
                step, batches = stack.enter_context(procedure.step(key))
            procedure.first_call(step, batches)
            block = (
                queue.Loop(step.call, device)
                if device.asynchronous
                else collecting.HostChain(step.call, device)
            )
            block(SETTLING_CALLS)
            connection.send(PERFEXP)
            while True:
                clock = connection.recv()
                with collecting.undisturbed():
                    block(SETTLING_STEPS)
                    messages.seconds = 0.0
                    if clock == PERFEXP:
                        seconds = statistics.fmean(block(arguments.steps))
                    else:
                        bursts = group.burst(
                            step, arguments.steps, Sharing.alone if clock == ALONE else Sharing.all
                        )
                        bursts = bursts[:1] if clock == ALONE else bursts
                        span = max(burst.end_ns for burst in bursts) - min(
                            burst.start_ns for burst in bursts
                        )
                        seconds = span * 1e-9 / arguments.steps
                connection.send((seconds, messages.seconds / arguments.steps))
        return True

    lifeline.die_with(arguments.parent)
    with patch.object(rank_process, "measure_points", take_turns):
        code = rank_process.main(arguments.folder, arguments.sha256, 0, arguments.ranks)
    sys.stderr.flush()
    os._exit(code)


def be_launcher(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Start the ranks of perfexp as its worker does, with its events on stderr."""
    return start.run([*command, "--role=rank"], size=arguments.gpus, port=None, emit=Events(2))


def write_plan(arguments: argparse.Namespace, folder: Path) -> str:
    """Write the plan of perfexp's training into a folder; return its hash."""
    overrides = [
        f"model={arguments.model}",
        "mode=train",
        f"precision={arguments.precision}",
        "sweep=point",
    ]
    overrides += [
        f"batch_size={arguments.batch_size}",
        f"input_size={arguments.size}",
        "tracking=none",
    ]
    overrides += [
        f"gpu={'cpu' if arguments.device == 'cpu' else 'auto'}",
        f"gpu.count={arguments.gpus}",
    ]
    overrides += [f"execution.channels_last={str(arguments.channels_last).lower()}", "processes=1"]
    content = plan_file.to_yaml(compose(overrides))
    (folder / "plan.yaml").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, tuple[float, float]]]:
    """Seconds of a step, and of its control messages, by each clock in each round."""
    own = [str(Path(__file__).resolve()), *sys.argv[1:], f"--folder={folder}"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={arguments.gpus}",
    ]
    launcher = [
        sys.executable,
        *own,
        "--role=launcher",
        f"--sha256={write_plan(arguments, folder)}",
    ]
    with Listener(str(folder / "turns"), "AF_UNIX") as listener, ExitStack() as stack:
        connections: dict[str, list[Connection]] = {TORCHRUN: [], PERFEXP: []}
        for command in ([*torchrun, *own, "--role=plain"], launcher):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(end, process)
            threading.Thread(target=interrupt_after, args=(process,), daemon=True).start()
        for _ in range(arguments.gpus + 1):
            connection: Any = listener.accept()
            stack.callback(connection.close)
            connections[connection.recv()].append(connection)
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        rounds = []
        for number in range(arguments.rounds):
            taken = {}
            for index in range(len(CLOCKS)):
                clock = CLOCKS[(number + index) % len(CLOCKS)]
                members = connections[TORCHRUN if clock == TORCHRUN else PERFEXP]
                for member in members:
                    member.send(clock)
                taken[clock] = max(member.recv() for member in members)
            rounds.append(taken)
            print(
                f"| {number + 1} | {' | '.join(f'{images(arguments, taken, c):.4g}' for c in CLOCKS)} |",
                flush=True,
            )
        return rounds


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, as it does without connections; terminate it if it does not."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()


def interrupt_after(process: subprocess.Popen[bytes]) -> None:
    """Interrupt this program when a process ends, which it only does before the last turn if it fails."""
    process.wait()
    os.kill(os.getpid(), signal.SIGINT)


def images(
    arguments: argparse.Namespace, taken: dict[str, tuple[float, float]], clock: str
) -> float:
    """Images/s of a clock in a round."""
    return arguments.batch_size * (1 if clock == ALONE else arguments.gpus) / taken[clock][0]


def with_interval(interval: Interval, form: str) -> str:
    """An interval's value with its ends."""
    return f"{interval.value:{form}} ({interval.low:{form}} … {interval.high:{form}})"


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="resnet50", help=f"of torchvision, or {', '.join(CONFIGS)}"
    )
    parser.add_argument("--precision", choices=["fp32", "amp_bf16"], default="amp_bf16")
    parser.add_argument("--batch-size", type=int, default=128, help="of one GPU")
    parser.add_argument("--size", default="224")
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs, or processes on a CPU")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of a turn")
    for option, kind in (
        ("--role", str),
        ("--folder", Path),
        ("--sha256", str),
        ("--ranks", Path),
        ("--parent", int),
    ):
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.channels_last is None:
        arguments.channels_last = arguments.model not in CONFIGS
    if arguments.rounds < 2:
        parser.error("--rounds: an interval needs 2 at least")
    if arguments.role == "plain":
        be_plain(arguments)
    if arguments.role == "rank":
        return be_rank(arguments)
    if arguments.role == "launcher":
        return be_launcher(arguments, [sys.executable, *sys.argv])
    batches = f"batch {arguments.batch_size} × {arguments.gpus}"
    print(
        f"{arguments.model}, {arguments.precision}, {batches}, {arguments.size}\n\n"
        f"| round | {' | '.join(CLOCKS)} |\n|---:{'|---:' * len(CLOCKS)}|"
    )
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(arguments, Path(folder))
    rates = {clock: [images(arguments, taken, clock) for taken in rounds] for clock in CLOCKS}
    print("\n| clock | images/s | ratio to torchrun |\n|---|---:|---:|")
    for clock, own in rates.items():
        ratios = [rate / plain for rate, plain in zip(own, rates[TORCHRUN], strict=True)]
        ratio = (
            ""
            if clock in (TORCHRUN, ALONE)
            else with_interval(moderated.geometric_mean(ratios), ".4f")
        )
        print(f"| {clock} | {with_interval(moderated.geometric_mean(own), '.4g')} | {ratio} |")
    shares = [
        rate / arguments.gpus / one for rate, one in zip(rates[BURST], rates[ALONE], strict=True)
    ]
    print(f"\nScaling efficiency: {with_interval(moderated.geometric_mean(shares), '.1%')}.")
    step, messages = (statistics.fmean(taken[PERFEXP][part] for taken in rounds) for part in (0, 1))
    print(
        f"Control messages: {messages * 1e6:.1f} µs of a step of {step * 1e3:.4g} ms ({messages / step:.3%})."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
