"""How many CIFAR-10 images per second ResNet-18 trains with, by perfexp's pipelines and by plain training scripts.

    perfexp make-data cifar10 shapes --train 50000 --test 10000
    python benchmarks/cifar_training.py shapes [--processes 3] [--only NAME …] [--json FILE]

Every case trains torchvision's ResNet-18 with 10 classes on 32 × 32 images with SGD (momentum 0.9, Nesterov, weight
decay 0.0005), random crops and mirrorings, in bfloat16 autocast on a CUDA device and in float32 on a CPU. Each is
measured in processes of its own, in turns: first one process of each case, then the next one of each.

* `script, PIL`: a training script as tutorials write it: PIL images through `torchvision.transforms`, a `DataLoader`
  with 4 workers and pinned memory.
* `script, tensors`: the same with `torchvision.transforms.v2` on uint8 tensors, as torchvision's reference scripts do.
* The others are commands of perfexp; `--list` shows them.

A line for each case: images/s (geometric mean over processes, 95 % interval by Student's t), and the ratio to the first
case that was measured. A script's rate is that of whole passes after the first 30 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

#: Overrides of perfexp for each of its cases.
CASES = {
    "loader, batch 256": "data.pipeline=loader data.workers=4 batch_size=256",
    "device, batch 256": "data.pipeline=device batch_size=256",
    "device, graph, batch 256": "data.pipeline=device batch_size=256 execution.cuda_graph=true",
    "device, compile, graph, batch 256": (
        "data.pipeline=device batch_size=256 execution=compile execution.cuda_graph=true"
    ),
    "device, compile, graph, batch 1024": (
        "data.pipeline=device batch_size=1024 execution=compile execution.cuda_graph=true"
    ),
    "3 × 3 stem, device, compile, graph, batch 2048": (
        "data.pipeline=device batch_size=2048 execution=compile execution.cuda_graph=true model.stem=cifar "
        "execution.channels_last=true"
    ),
}
SCRIPTS = {"script, PIL": False, "script, tensors": True}
#: Settings of experiment=cifar10 that concern whole trainings, and what is not to be measured.
STEPS = (
    "epochs=null mode.train.schedule=constant mode.train.warmup_steps=0 mode.train.eval_every=null "
    "mode.train.checkpoints=false replicate=1 stopping=brisk stopping.max_seconds=2 ttfp=false probes.work=false "
    "tracking=none quiet=true"
)
BATCH, WORKERS, WARMUP_STEPS, SECONDS = 256, 4, 30, 8.0
#: Limit on one process, with the time that a compiler takes.
LIMIT_SECONDS = 400.0


def measure(name: str, root: Path, device: str) -> float:
    """Images per second of one process of a case."""
    if name in SCRIPTS:
        command = [sys.executable, __file__, str(root), "--script", name]
        told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if told.returncode:
            raise RuntimeError(told.stderr.strip().splitlines()[-1])
        return float(told.stdout.split()[-1])
    precision = "amp_bf16" if device == "cuda" else "fp32"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "perfexp", "experiment=cifar10", f"data.root={root}", *STEPS.split()]
        command += [*CASES[name].split(), f"precision={precision}", f"output_dir={run}"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        if told.returncode:
            raise RuntimeError((told.stderr or told.stdout).strip().splitlines()[0])
        return of_record(run)


def of_record(folder: Path) -> float:
    """Images per second of the only row of a record."""
    from perfexp.records.record import Record
    from perfexp.records.summary import rows

    [row] = rows(Record.load(folder))
    assert row.samples_per_second is not None
    return row.samples_per_second.value


def script(root: Path, *, of_tensors: bool) -> float:
    """Images per second of a training script without perfexp, but for the reader of the files."""
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    from perfexp.data.cifar_files import read
    from perfexp.models import torchvision_import

    torchvision = torchvision_import.import_torchvision()
    training = read(root, 10).train
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    if of_tensors:
        from torchvision.transforms import v2

        steps: list[Any] = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
        transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
        images: Any = torch.from_numpy(training.pixels)
    else:
        from torchvision import transforms

        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(mean, std)])
        images = [Image.fromarray(image.transpose(1, 2, 0)) for image in training.pixels]

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(training.labels)

        def __getitem__(self, number: int) -> Any:
            return transform(images[number]), int(training.labels[number])

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Images(), BATCH, shuffle=True, num_workers=WORKERS, pin_memory=device == "cuda", drop_last=True)
    model = torchvision.models.resnet18(num_classes=10).to(device)
    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    begun, steps_done, first = 0.0, 0, 0
    while True:
        for inputs, targets in loader:
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            steps_done += 1
            if steps_done == WARMUP_STEPS:
                float(loss.detach())  # waits for the device
                begun, first = time.perf_counter(), steps_done
        if steps_done > WARMUP_STEPS:
            float(loss.detach())
            seconds = time.perf_counter() - begun
            if seconds > SECONDS:
                return BATCH * (steps_done - first) / seconds


def line(name: str, rates: list[float], first: list[float]) -> str:
    """A case with its interval, and its ratio to the first one."""
    from perfexp.statistics import variance

    ratios = [one / two for one, two in zip(rates, first, strict=False)]  # a process may have failed
    rate, ratio = variance.geometric_mean(rates), variance.geometric_mean(ratios)
    ends = "" if rate.low is None else f" [{rate.low:,.0f}, {rate.high:,.0f}]"
    limits = "" if ratio.low is None else f" [{ratio.low:.3g}, {ratio.high:.3g}]"
    return f"{name:<48}{rate.value:>10,.0f} images/s{ends}  {ratio.value:.3g} ×{limits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*SCRIPTS, *CASES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--script", choices=SCRIPTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.script:
        print(script(arguments.root, of_tensors=SCRIPTS[arguments.script]))
        return
    if arguments.list:
        for name, overrides in CASES.items():
            print(f"{name}: python -m perfexp experiment=cifar10 data.root={arguments.root} {STEPS} {overrides}")
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = arguments.only or [*SCRIPTS, *CASES]
    rates: dict[str, list[float]] = {name: [] for name in names}
    board = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{board}, torch {torch.__version__}, {os.cpu_count()} cores")
    for number in range(arguments.processes):
        for name in names:
            try:
                rates[name].append(measure(name, arguments.root, device))
                print(f"process {number + 1}, {name}: {rates[name][-1]:,.0f} images/s", flush=True)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"process {number + 1}, {name}: {error}", flush=True)
    measured = {name: found for name, found in rates.items() if found}
    first = next(iter(measured.values()), [])
    for name, found in measured.items():
        print(line(name, found, first))
    if arguments.json:
        arguments.json.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
