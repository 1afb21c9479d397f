"""`device` against the span that CUPTI sees, on work of known size, on the first CUDA device.

    python validation/device_truth.py

Each case in rounds: perfexp's clean chain of calls, then the same chain under the profiler.

* `device`: perfexp's time per call, k calls to a sample; the median over the clean rounds.
* `events/span`: what perfexp's events read in the profiled rounds, over the span that CUPTI saw in the same rounds
  (from the end of the wait that holds the queue to the end of the last kernel): whether the clock tells the truth.
* `device/span`: the clean time over that span: the same, and what the profiler itself costs.
* `kernels`, `gap/launch`: sum of the kernels per call, and the rest of the span per launch.
* `harness`: device time per call that the events add at the k that perfexp chose: against samples of many more calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from perfexp.devices.cuda import CudaDevice
from perfexp.timing import collecting, depth, queue

ROUNDS = 5
#: So long the device works before each reading, so that its clock has settled, and for each reading.
SETTLE_SECONDS = 0.2
#: Each of two readings that are compared lasts about so long.
PAIR_SECONDS = 0.05
#: So many such pairs has a round.
PAIRS = 3
#: So many times as many calls have the samples whose events are rare.
RARER = 8
#: Launches in a profiled chain.
PROFILED_LAUNCHES = 400

Call = Callable[[], object]


def cases() -> dict[str, Callable[[], Call]]:
    """Names and makers of calls: matrix products, convolutions, chains of small kernels."""

    def matmul(n: int, dtype: torch.dtype) -> Callable[[], Call]:
        def make() -> Call:
            a, b = (
                torch.randn(n, n, device="cuda", dtype=dtype),
                torch.randn(n, n, device="cuda", dtype=dtype),
            )
            out = torch.empty_like(a)
            return lambda: torch.mm(a, b, out=out)

        return make

    def convolution(batch: int, channels: int, size: int) -> Callable[[], Call]:
        def make() -> Call:
            x = torch.randn(batch, channels, size, size, device="cuda")
            w = torch.randn(channels, channels, 3, 3, device="cuda")
            return lambda: torch.nn.functional.conv2d(x, w, padding=1)

        return make

    def chain(length: int, numel: int) -> Callable[[], Call]:
        def make() -> Call:
            x = torch.randn(numel, device="cuda")

            def call() -> None:
                for _ in range(length):
                    x.mul_(1.0000001)

            return call

        return make

    return {
        "matmul 256 fp32": matmul(256, torch.float32),
        "matmul 1024 fp32": matmul(1024, torch.float32),
        "matmul 4096 fp32": matmul(4096, torch.float32),
        "matmul 4096 bf16": matmul(4096, torch.bfloat16),
        "conv 1x64x56": convolution(1, 64, 56),
        "conv 16x128x56": convolution(16, 128, 56),
        "conv 32x256x56": convolution(32, 256, 56),
        "chain 10 of 16 KiB": chain(10, 1 << 12),
        "chain 100 of 16 KiB": chain(100, 1 << 12),
        "chain 20 of 64 MiB": chain(20, 1 << 24),
    }


def measure(name: str) -> dict[str, Any]:
    """One case; seconds per call."""
    device, call = CudaDevice(), cases()[name]()
    device.start()
    for _ in range(10):
        call()
    k, chunk, *_ = depth.group_calls(call, device)
    clean = queue.Chain(call, device, chunk, k)
    long = queue.Chain(call, device, chunk // RARER, RARER * k) if chunk >= RARER else None
    launches = max(1, count_launches(call, device))
    count = max(1, min(chunk, PROFILED_LAUNCHES // (launches * k)))
    rounds = []
    for _ in range(ROUNDS):
        turn(clean, SETTLE_SECONDS)
        ours = float(np.median(turn(clean, SETTLE_SECONDS)))
        added = float(statistics.median(differences(clean, long))) if long else 0.0
        rounds.append({"device": ours, "added": added, **profiled(clean, device, count, count * k)})
    median = {key: statistics.median(entry[key] for entry in rounds) for key in rounds[0]}
    ratios = [entry["events"] / entry["span"] for entry in rounds]
    return {
        **median,
        "k": k,
        "launches": launches,
        "same": statistics.median(ratios),
        "known": bool(long),
    }


def turn(chain: queue.Chain, seconds: float) -> collecting.Samples:
    """Samples of about so many seconds of work."""
    rough = float(np.median(chain(1))) * chain.calls_per_sample
    return chain(max(1, round(seconds / rough)))


def differences(clean: queue.Chain, rare: queue.Chain) -> list[float]:
    """What the events add to a call: samples against those of more calls, in turns, so that both see the same clock."""
    pairs = [
        (np.median(turn(clean, PAIR_SECONDS)), np.median(turn(rare, PAIR_SECONDS)))
        for _ in range(PAIRS)
    ]
    return [float(often - seldom) * RARER / (RARER - 1) for often, seldom in pairs]


def profiled(chain: queue.Chain, device: CudaDevice, samples: int, calls: int) -> dict[str, float]:
    """The same chain under CUPTI: what the events and what the kernels say, seconds per call."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds = chain(samples)
        device.synchronize()
    kernels = sorted(
        (e.time_range.start, e.time_range.end, "spin" in e.name)
        for e in profiler.events()
        if e.device_type.name == "CUDA"
    )
    last = max(
        index for index, kernel in enumerate(kernels) if kernel[2]
    )  # a wait that was too short is repeated
    work = kernels[last + 1 :]
    busy = sum(end - start for start, end, _ in work)
    return {
        "events": float(seconds.sum()) * chain.calls_per_sample / calls,
        "span": (work[-1][1] - kernels[last][1]) * 1e-6 / calls,
        "busy": busy * 1e-6 / calls,
    }


def count_launches(call: Call, device: CudaDevice) -> int:
    """How many kernels a call launches."""
    device.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        device.synchronize()
    return sum(e.device_type.name == "CUDA" for e in profiler.events())


def main() -> None:
    head = (
        "device µs",
        "k",
        "span µs",
        "events/span",
        "device/span",
        "kernels µs",
        "launches",
        "gap µs",
        "harness µs",
    )
    print(f"{'case':<20}" + "".join(f"{title:>12}" for title in head))
    for name in cases():
        r = measure(name)
        gap = (r["span"] - r["busy"]) / r["launches"]
        harness = f"{r['added'] * 1e6:12.3f}" if r["known"] else f"{'–':>12}"
        print(
            f"{name:<20}{r['device'] * 1e6:12.2f}{r['k']:12d}{r['span'] * 1e6:12.2f}{r['same']:12.4f}"
            f"{r['device'] / r['span']:12.4f}{r['busy'] * 1e6:12.2f}{r['launches']:12d}{gap * 1e6:12.2f}{harness}",
            flush=True,
        )


if __name__ == "__main__":
    main()
