"""What a widespread recipe reports of a model, beside what perfexp measured on the same device.

    python -m perfexp -m model=resnet50,vgg16 batch_size=[1,16] probes.layers=true probes.energy=true output_dir=FOLDER
    python studies/hook_recipe.py FOLDER [--calls 50] [--sample 0.01]

The recipe, for the same torchvision models at the same sizes in float32: CUDA events around each call and a synchronise
behind it; for the layers events in the hooks of every convolution, with a synchronise in each hook; for the energy a
thread that samples the driver's power during a call, and the trapezoid rule. For each point of the records:

* **time**: ms of a call by perfexp (`device`, `latency`) and by the recipe, without hooks and with them.
* **convolutions**: ms in all of them together by perfexp's layers (kernels) and by the hooks, and which share of the
  call that is, each by its own call.
* **energy**: J of a call by perfexp's counter and by the recipe: mean, smallest and largest of the single calls.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import torch

from perfexp.models.torchvision_import import import_torchvision
from perfexp.records import point_times
from perfexp.records.record import Point, Record, is_layers, timed_key

WARMUP = 20


def points(folders: list[Path]) -> Iterator[tuple[str, Point, Point]]:
    """Model, timed point and its layers, of all records below the folders."""
    for folder in folders:
        for path in sorted(folder.rglob("record.json")):
            record = Record.load(path)
            layers = {
                timed_key(point.key): point for point in record.points if is_layers(point.key)
            }
            for point in record.points:
                found = layers.get(point.key)
                if point.key.phase == "inference" and found is not None and "layers" in found.facts:
                    yield record.plan["model"]["name"], point, found


def timed(call: Callable[[], object], calls: int) -> float:
    """Median of single calls, each between two events and waited for, seconds."""
    found = []
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e-3)
    return float(np.median(found))


def hooked(model: torch.nn.Module, call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Medians of the call and of the sum over its convolutions, by events and a synchronise in the hooks; seconds."""
    begun: dict[torch.nn.Module, torch.cuda.Event] = {}
    spent: dict[str, list[float]] = defaultdict(list)
    handles = []

    def before(module: torch.nn.Module, _: Any) -> None:
        begun[module] = torch.cuda.Event(enable_timing=True)
        begun[module].record()

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):

            def after(module: torch.nn.Module, _: Any, __: Any, name: str = name) -> None:
                end = torch.cuda.Event(enable_timing=True)
                end.record()
                torch.cuda.synchronize()
                spent[name].append(begun[module].elapsed_time(end) * 1e-3)

            handles += [
                module.register_forward_pre_hook(before),
                module.register_forward_hook(after),
            ]
    whole = timed(call, calls)
    for handle in handles:
        handle.remove()
    return whole, float(np.median(np.sum(list(spent.values()), axis=0)))


def sampled(call: Callable[[], object], handle: Any, calls: int, period: float) -> list[float]:
    """Joules of single calls, by a thread that samples the power meanwhile and the trapezoid rule."""
    found = []
    for _ in range(calls):
        samples: list[tuple[float, float]] = []
        over = threading.Event()

        def sample(
            samples: list[tuple[float, float]] = samples, over: threading.Event = over
        ) -> None:
            while True:
                samples.append((time.perf_counter(), pynvml.nvmlDeviceGetPowerUsage(handle) * 1e-3))
                if over.wait(period):
                    break
            samples.append((time.perf_counter(), pynvml.nvmlDeviceGetPowerUsage(handle) * 1e-3))

        thread = threading.Thread(target=sample)
        thread.start()
        call()
        torch.cuda.synchronize()
        over.set()
        thread.join()
        seconds, watts = np.array(samples).T
        found.append(float(((watts[1:] + watts[:-1]) / 2 * np.diff(seconds)).sum()))
    return found


def convolutions(layers: Point) -> float:
    """Seconds of a call in the convolutions' kernels."""
    lines = layers.facts["layers"]["lines"]
    return sum(line["seconds"]["median"] for line in lines if line.get("convolution"))


def handle_here() -> Any:
    """NVML's handle of the device that torch uses."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument(
        "--sample",
        type=float,
        default=0.01,
        help="seconds from one reading of the power to the next",
    )
    settings = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    handle, torchvision = handle_here(), import_torchvision()
    columns = (
        "`device`",
        "`latency`",
        "events",
        "with hooks",
        "convolutions",
        "by hooks",
        "J a call",
        "sampled: mean",
    )
    print(f"| model | batch | {' | '.join(columns)} | from | to |")
    print("|---|---" + "|---:" * (len(columns) + 2) + "|")
    for name, point, layers in points(settings.folders):
        model = torchvision.models.get_model(name).cuda().eval()
        inputs = torch.randn(point.key.batch_size, 3, *point.key.input_size, device="cuda")
        with torch.inference_mode():

            def call(model: torch.nn.Module = model, inputs: torch.Tensor = inputs) -> object:
                return model(inputs)

            for _ in range(WARMUP):
                call()
            plain = timed(call, settings.calls)
            whole, inside = hooked(model, call, settings.calls)
            joules = sampled(call, handle, settings.calls, settings.sample)
        device, latency = (
            point_times.first_median(point, series) or float("nan")
            for series in ("device", "latency")
        )
        counted = point.metric("energy/per_call_joules")
        told = counted.value if counted and counted.value is not None else float("nan")
        own = convolutions(layers)
        print(
            f"| {name} | {point.key.batch_size} | {device * 1e3:.3f} | {latency * 1e3:.3f} | {plain * 1e3:.3f} "
            f"| {whole * 1e3:.3f} | {own * 1e3:.3f} ({own / device:.0%}) | {inside * 1e3:.3f} ({inside / whole:.0%}) "
            f"| {told:.3f} | {np.mean(joules):.3f} | {min(joules):.3f} | {max(joules):.3f} |",
            flush=True,
        )
        del model


if __name__ == "__main__":
    main()
