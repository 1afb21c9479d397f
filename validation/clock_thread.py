"""Whether the thread that reads clock and power under load changes the device's times, on the first CUDA device.

    python validation/clock_thread.py

For resnet50 at batch 16 and resnet18 at batch 1, by a pre-filled queue (`device`) and as a CUDA graph (`device/graph`):
turns of equal work with and without the thread of `LoadReader` alternate in one process, ABBA. Prints the
geometric mean of the ratios with/without of the medians of neighboring turns, with its 95 % interval (Student's t), how
many readings the thread took, their medians, and how long a reading takes. About 50 s; exit code 1 without a CUDA
device or NVML.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.devices import Device
from perfexp.records.record import Key, Point, Status
from perfexp.timing import collecting, depth, queue
from perfexp.timing.conditions import LoadReader

MODELS = (("resnet50", 16), ("resnet18", 1))
#: Pairs of turns per case, and the wall time of a turn, in which the thread reads about twice.
PAIRS, TURN_SECONDS = 20, 0.28
#: Work before the first turn of a case.
SETTLE_SECONDS = 1.0
KEY = Key(phase="inference", input_size=(224, 224), batch_size=1, precision="fp32")

Call = Callable[[], object]


def inference(name: str, batch: int) -> Call:
    """A forward pass of a torchvision model with random weights, which has been called before."""
    from torchvision import models

    torch.manual_seed(0)
    model = getattr(models, name)(weights=None).cuda().eval()
    images = torch.randn(batch, 3, 224, 224, device="cuda")

    def call() -> None:
        with torch.inference_mode():
            model(images)

    for _ in range(5):
        call()
    torch.cuda.synchronize()
    return call


def captured(call: Call) -> Call:
    """The same call as one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def clocked(query: Callable[[], float | None], durations: list[float]) -> float | None:
    """The answer of a query whose duration is noted."""
    begun = time.perf_counter()
    answer = query()
    durations.append(time.perf_counter() - begun)
    return answer


def compare(call: Call, device: Device) -> dict[str, Any]:
    """Alternate turns with and without the thread; return the logarithms of their ratios, and the readings."""
    durations: list[float] = []
    queries = {
        name: functools.partial(clocked, query, durations)
        for name, query in device.load_queries().items()
    }
    reader = LoadReader(queries)
    k, chunk, *_ = depth.group_calls(call, device)
    if not chunk:
        raise RuntimeError("the call does not fit the launch queue")
    chain = queue.Chain(call, device, chunk, k, draining=reader.draining)
    samples = samples_of(chain)
    times: dict[bool, list[float]] = {False: [], True: []}
    readings: dict[str, list[float]] = {name: [] for name in queries}
    with collecting.undisturbed():
        for pair in range(PAIRS):
            for is_read in (True, False) if pair % 2 else (False, True):
                point = Point(key=KEY, status=Status.OK)
                with reader.observing(point, "device" if is_read else None):
                    times[is_read].append(float(np.median(chain(samples))))
                for name, by_series in point.facts.items():
                    readings[name] += by_series["device"]
    logs = [math.log(ours / theirs) for ours, theirs in zip(times[True], times[False], strict=True)]
    return {"logs": logs, "seconds": times[False], "readings": readings, "durations": durations}


def samples_of(chain: queue.Chain) -> int:
    """Samples of a turn of the wished wall time, found while the device settles."""
    samples, spent = 1, 0.0
    while spent < SETTLE_SECONDS:
        begun = time.perf_counter()
        chain(samples)
        taken = time.perf_counter() - begun
        spent += taken
        samples = max(1, round(samples * min(max(TURN_SECONDS / taken, 0.1), 10.0)))
    return samples


def line(result: dict[str, Any]) -> str:
    """Ratio and interval, time of a call, and the readings of one case."""
    logs, readings = result["logs"], result["readings"]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * error
    low, middle, high = (math.exp(value) for value in (mean - half, mean, mean + half))
    text = f"{statistics.median(result['seconds']) * 1e3:10.4f} ms  {middle:.5f} [{low:.5f}, {high:.5f}]  "
    found = [
        f"{len(values)} {name} {statistics.median(values):.4g}"
        for name, values in readings.items()
        if values
    ]
    took = (
        f", {statistics.median(result['durations']) * 1e3:.2f} ms per query"
        if result["durations"]
        else ""
    )
    return text + (", ".join(found) or "NO READINGS") + took


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("clock_thread.py: no CUDA device here; run it on a machine with one")
    from perfexp.devices.cuda import CudaDevice

    device = CudaDevice()
    device.start()
    if not device.load_queries():
        sys.exit(
            f"clock_thread.py: NVML does not report clock and power here: {device.facts().get('nvml', 'refused')}"
        )
    begun = time.perf_counter()
    print(f"{device.name}, torch {torch.__version__}, {PAIRS} pairs of turns of {TURN_SECONDS} s")
    print(f"{'case':<36}{'call':>13}  with/without [95 % interval]  readings and their medians")
    for name, batch in MODELS:
        call = inference(name, batch)
        for series, make in (
            ("device", lambda call=call: call),
            ("device/graph", lambda call=call: captured(call)),
        ):
            try:
                text = line(compare(make(), device))
            except Exception as error:  # the other cases still count
                text = f"failed: {type(error).__name__}: {error}"
            print(f"{f'{name} batch {batch} {series}':<36}{text}", flush=True)
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
