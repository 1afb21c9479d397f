"""How fast ResNet-18 trains on CIFAR-10's format, by perfexp and by plain training scripts, and how well.

    perfexp make-data cifar10 shapes --train 50000 --test 10000
    python studies/cifar_training.py shapes [--processes 3] [--only NAME …] [--json FILE]
    python studies/cifar_training.py shapes --seeds 5 [--json FILE]

Every case trains torchvision's ResNet-18 with 10 classes on 32 × 32 images with SGD (momentum 0.9, Nesterov, weight
decay 0.0005), random crops and mirrorings, in bfloat16 autocast on a CUDA device and in float32 on a CPU. A process
measures all cases one after the other, the next process begins with another one. Scripts:

* `script, PIL`: a training script as tutorials write it: PIL images through `torchvision.transforms`, a `DataLoader`
  with 4 workers and pinned memory.
* `script, tensors`: the same with `torchvision.transforms.v2` on uint8 tensors and cudnn.benchmark, as torchvision's
  reference scripts do.
* `script, Lightning`: these tensors with the Trainer of Lightning, measured by name only.

A script's rate is that of whole passes after the first 30 steps. The others are whole trainings by `experiment=cifar10`
with the overrides that `--list` shows, in a process as perfexp's workers are. Their rate is that of the undisturbed
steps; that of the epochs has evaluations and checkpoints in its time.

A line for each case: images/s (geometric mean over processes, 95 % interval by Student's t), and the ratio to the first
case that was measured. `--seeds` compares the accuracies of both pipelines instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

_FAST = "data.pipeline=device execution=compile execution.cuda_graph=true mode.train.eval_every=5"
_TUNED = "execution.channels_last=true execution.cudnn_benchmark=true"
#: Overrides of perfexp for each of its cases; `OTHERS` are measured by name only.
CASES = {
    "compile, graph, batch 256": f"{_FAST} batch_size=256 epochs=10",
    "compile, graph, channels_last, cudnn.benchmark, batch 1024": f"{_FAST} {_TUNED} batch_size=1024 epochs=20",
    "compile, graph, 3 × 3 stem, batch 2048": (
        f"{_FAST} batch_size=2048 epochs=5 model.stem=cifar execution.channels_last=true"
    ),
}
OTHERS = {
    "compile, graph, batch 1024": f"{_FAST} batch_size=1024 epochs=20",
    "compile, graph, cudnn.benchmark, batch 256": f"{_FAST} batch_size=256 epochs=10 execution.cudnn_benchmark=true",
    "loader, batch 256": "data.pipeline=loader data.workers=4 batch_size=256 epochs=3",
    "eager, batch 256": "data.pipeline=device batch_size=256 epochs=3",
    "graph, batch 256": "data.pipeline=device batch_size=256 epochs=10 execution.cuda_graph=true",
    "graph, batch 1024": "data.pipeline=device batch_size=1024 epochs=20 execution.cuda_graph=true",
    "compile, graph, batch 4096": f"{_FAST} batch_size=4096 epochs=20",
}
BATCH, WORKERS, WARMUP_STEPS, SECONDS = 256, 4, 30, 4.0
#: A training of each seed.
SEEDED = "batch_size=256 epochs=3 mode.train.eval_every=null mode.train.checkpoints=false"


# scripts without perfexp, but for the reader of the files


def images(root: Path, *, of_tensors: bool) -> Any:
    """The training images as a `Dataset` of a script."""
    import torch
    from PIL import Image
    from torch.utils.data import Dataset

    from perfexp.data.cifar_files import read
    from perfexp.models import torchvision_import

    torchvision_import.import_torchvision()
    training = read(root, 10).train
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    if of_tensors:
        from torchvision.transforms import v2

        steps: list[Any] = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
        transform = v2.Compose(
            [*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
        )
        pictures: Any = torch.from_numpy(training.pixels)
    else:
        from torchvision import transforms

        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
        transform = transforms.Compose(
            [*steps, transforms.ToTensor(), transforms.Normalize(mean, std)]
        )
        pictures = [Image.fromarray(image.transpose(1, 2, 0)) for image in training.pixels]

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return len(training.labels)

        def __getitem__(self, number: int) -> Any:
            return transform(pictures[number]), int(training.labels[number])

    return Images()


def loader_of(data: Any, device: str) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        data, BATCH, shuffle=True, num_workers=WORKERS, pin_memory=device == "cuda", drop_last=True
    )


def parts(device: str) -> tuple[Any, Any, Any]:
    """A model on the device, its loss, and a function that makes an optimizer."""
    import torch
    import torchvision

    model = torchvision.models.resnet18(num_classes=10).to(device)

    def optimizer() -> Any:
        return torch.optim.SGD(
            model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
        )

    return model, torch.nn.CrossEntropyLoss(), optimizer


class Clock:
    """Images per second of whole passes after the first steps."""

    def __init__(self) -> None:
        self.steps, self._first, self._begun = 0, 0, 0.0

    def step(self, loss: Any) -> None:
        self.steps += 1
        if self.steps == WARMUP_STEPS:
            float(loss.detach())  # waits for the device
            self._begun, self._first = time.perf_counter(), self.steps

    def rate(self, loss: Any) -> float | None:
        """At the end of a pass; None while the time is short."""
        if self.steps <= WARMUP_STEPS:
            return None
        float(loss.detach())
        seconds = time.perf_counter() - self._begun
        return BATCH * (self.steps - self._first) / seconds if seconds > SECONDS else None


def plain(root: Path, device: str, *, of_tensors: bool) -> float:
    """Images per second of a loop of one's own."""
    import torch

    loader, clock = loader_of(images(root, of_tensors=of_tensors), device), Clock()
    model, loss_of, make = parts(device)
    optimizer = make()
    torch.backends.cudnn.benchmark = of_tensors
    try:
        while True:
            for inputs, targets in loader:
                inputs, targets = (
                    inputs.to(device, non_blocking=True),
                    targets.to(device, non_blocking=True),
                )
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                clock.step(loss)
            if (rate := clock.rate(loss)) is not None:
                return rate
    finally:
        torch.backends.cudnn.benchmark = False


def lightning(root: Path, device: str) -> float:
    """Images per second of Lightning's Trainer without its loggers."""
    import logging
    import warnings

    import pytorch_lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    model, loss_of, make = parts(device)
    clock, rates = Clock(), []

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            self.loss = loss_of(self.model(batch[0]), batch[1])
            return self.loss

        def configure_optimizers(self) -> Any:
            return make()

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step(self.loss)

        def on_train_epoch_end(self) -> None:
            if (rate := clock.rate(self.loss)) is not None:
                rates.append(rate)
                self.trainer.should_stop = True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytorch_lightning.Trainer(
            max_epochs=1000,
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if device == "cuda" else "32-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), loader_of(images(root, of_tensors=True), device))
    return float(rates[0])


SCRIPTS: dict[str, Callable[[Path, str], float]] = {
    "script, PIL": lambda root, device: plain(root, device, of_tensors=False),
    "script, tensors": lambda root, device: plain(root, device, of_tensors=True),
    "script, Lightning": lightning,
}


# perfexp, in this process


def trained(root: Path, device: str, folder: Path, overrides: str) -> Any:
    """The point of a training by a command's plan."""
    from perfexp.cli.composition import compose
    from perfexp.plan import config
    from perfexp.records.messages import Events
    from perfexp.records.paths import RunPaths
    from perfexp.records.record import Status
    from perfexp.worker.workbench import Workbench

    precision = "amp_bf16" if device == "cuda" else "fp32"
    own = [
        "experiment=cifar10",
        f"data.root={root}",
        f"precision={precision}",
        "stopping=fixed",
        "probes.work=false",
    ]
    plan = config.typed(compose([*own, *overrides.split()]))
    folder.mkdir(parents=True)
    with Workbench(plan, RunPaths(folder), Events(None)).opened() as procedure:
        [key] = plan.timed_keys()
        point = procedure.measure(key)
    if point.status is not Status.OK:
        raise RuntimeError(point.error)
    gc.unfreeze()  # what the procedure froze is its model, too
    gc.collect()
    return point


def figures(point: Any) -> dict[str, float]:
    """Images/s of the steps and of the epochs, and where the time of the epochs went."""
    from perfexp.records.record import Series

    series: Series = point.find_series("throughput") or point.find_series("latency")
    seconds = {
        name: sum(getattr(epoch, name) for epoch in point.epochs)
        for name in ("seconds", "evaluation_seconds", "checkpoint_seconds")
    }
    passes = sum(epoch.seconds * epoch.samples_per_second for epoch in point.epochs)
    return {
        "images/s": point.key.batch_size / statistics.fmean(series.measured),
        "of epochs": passes / sum(seconds.values()),
        "steps, s": seconds["seconds"],
        "evaluations, s": seconds["evaluation_seconds"],
        "checkpoints, s": seconds["checkpoint_seconds"],
        "accuracy": next(
            (epoch.accuracy for epoch in reversed(point.epochs) if epoch.accuracy), math.nan
        ),
    }


def measured(root: Path, device: str, names: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """The figures of each case in this process, or why there are none."""
    for number, name in enumerate(names):
        begun = time.perf_counter()
        try:
            if name in SCRIPTS:
                known = {"images/s": SCRIPTS[name](root, device)}
            else:
                known = figures(trained(root, device, folder / str(number), (CASES | OTHERS)[name]))
        except Exception as error:
            yield {"case": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        else:
            yield {"case": name, "took, s": time.perf_counter() - begun, **known}


# the tables


def line(name: str, known: list[dict[str, Any]], first: list[dict[str, Any]], key: str) -> str:
    """A case with its interval, and its ratio to the first one, process by process."""
    from perfexp.statistics import moderated

    rates = {one["process"]: one[key] for one in known}
    ratios = [rates[one["process"]] / one["images/s"] for one in first if one["process"] in rates]
    rate = moderated.geometric_mean(list(rates.values()))
    ends = "" if rate.low is None else f" [{rate.low:,.0f}, {rate.high:,.0f}]"
    text = f"{name:<44}{key:<10}{rate.value:>9,.0f}{ends}"
    if not ratios:
        return text
    ratio = moderated.geometric_mean(ratios)
    limits = "" if ratio.low is None else f" [{ratio.low:.3g}, {ratio.high:.3g}]"
    return f"{text}  {ratio.value:.3g} ×{limits}"


def turned(names: list[str], count: int) -> list[str]:
    """The names from another one on."""
    first = count % max(len(names), 1)
    return names[first:] + names[:first]


def compare_rates(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the cases in processes, one after the other, and print a line for each."""
    names, known = arguments.only or ["script, PIL", "script, tensors", *CASES], []
    for process in range(arguments.processes):
        # the scripts stay first: a loader's processes are forks of this one
        scripts = turned([name for name in names if name in SCRIPTS], process)
        others = turned([name for name in names if name not in SCRIPTS], process)
        command = [
            sys.executable,
            __file__,
            str(arguments.root),
            "--processes",
            "0",
            "--only",
            *scripts,
            *others,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for text in running.stdout:
                if not text.startswith("{"):
                    print(text, end="", flush=True)
                    continue
                one = {"process": process + 1, **json.loads(text)}
                known.append(one)
                shown = (
                    f"{key} {value:,.4g}" for key, value in one.items() if isinstance(value, float)
                )
                print(
                    f"{one['process']} {one['case']}: {one.get('error') or ', '.join(shown)}",
                    flush=True,
                )
    whole = {
        name: [one for one in known if one["case"] == name and "images/s" in one] for name in names
    }
    first = next(filter(None, whole.values()), [])
    for name, of_case in whole.items():
        for key in ("images/s", "of epochs"):
            if of_case and key in of_case[0]:
                print(line(name, of_case, first, key))
    return known


def compare_seeds(arguments: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Train with both pipelines from the same seeds, and print the difference of their accuracies."""
    from perfexp.statistics import distributions

    graph, known = "execution.cuda_graph=true" if device == "cuda" else "", []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, arguments.seeds + 1):
            for pipeline in ("loader", "device"):
                overrides = f"{SEEDED} data.pipeline={pipeline} seed={seed} {graph}"
                overrides += " data.workers=8" if pipeline == "loader" else ""
                point = trained(
                    arguments.root, device, Path(folder, f"{pipeline}-{seed}"), overrides
                )
                known.append({"seed": seed, "pipeline": pipeline, **figures(point)})
                print(
                    f"seed {seed}, {pipeline}: accuracy {100 * known[-1]['accuracy']:.2f} %",
                    flush=True,
                )
    accuracies = {
        pipeline: [100 * one["accuracy"] for one in known if one["pipeline"] == pipeline]
        for pipeline in ("loader", "device")
    }
    for pipeline, values in accuracies.items():
        print(
            f"{pipeline}: {statistics.fmean(values):.2f} % ± {statistics.stdev(values):.2f} between seeds"
        )
    differences = [two - one for one, two in zip(*accuracies.values(), strict=True)]
    half = (
        distributions.student95(len(differences) - 1)
        * statistics.stdev(differences)
        / math.sqrt(len(differences))
    )
    print(f"device − loader: {statistics.fmean(differences):+.2f} % ± {half:.2f} (95 %)")
    return known


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--processes", type=int, default=3, help="0 measures in this one")
    parser.add_argument("--only", nargs="+", choices=[*SCRIPTS, *CASES, *OTHERS])
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        for name, overrides in (CASES | OTHERS).items():
            print(
                f"{name}: python -m perfexp experiment=cifar10 data.root={arguments.root} {overrides}"
            )
        return
    if arguments.processes and not arguments.seeds:
        known = compare_rates(arguments)
    else:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        board = torch.cuda.get_device_name() if device == "cuda" else device
        print(f"{board}, torch {torch.__version__}, {os.cpu_count()} cores", flush=True)
        if not arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                for one in measured(arguments.root, device, arguments.only, Path(folder)):
                    print(json.dumps(one), flush=True)
            return
        known = compare_seeds(arguments, device)
    if arguments.json:
        arguments.json.write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    main()
