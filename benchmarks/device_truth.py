"""`device` against the span that CUPTI sees, on work of known size, on the first CUDA device.

    python benchmarks/device_truth.py

For each case: perfexp's `device` time, and, from another process under torch's profiler with the queue held in the same
way, the span per call (first kernel's start to last kernel's end, over the calls), the sum of the kernels and the gap
per launch. Three processes each, in turn; the middle one counts. The claim: 0.5 % from 50 µs up, 5 % from 5 to 50 µs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import torch

from perfexp import stats
from perfexp.devices.cuda import CudaDevice
from perfexp.probes import timing
from perfexp.stopping import Precision

PROCESSES = 3


def cases() -> dict[str, Callable[[], Callable[[], object]]]:
    """Names and makers of calls: matrix products, convolutions, chains of small kernels."""

    def matmul(n: int, dtype: torch.dtype) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            a, b = torch.randn(n, n, device="cuda", dtype=dtype), torch.randn(n, n, device="cuda", dtype=dtype)
            out = torch.empty_like(a)
            return lambda: torch.mm(a, b, out=out)

        return make

    def convolution(batch: int, channels: int, size: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            x = torch.randn(batch, channels, size, size, device="cuda")
            w = torch.randn(channels, channels, 3, 3, device="cuda")
            return lambda: torch.nn.functional.conv2d(x, w, padding=1)

        return make

    def chain(length: int, numel: int) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
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
        "chain 10 small": chain(10, 1 << 12),
        "chain 100 small": chain(100, 1 << 12),
        "chain 20 of 64 MiB": chain(20, 1 << 24),
    }


def device_time(call: Callable[[], object]) -> dict[str, float]:
    """Perfexp's `device` time of a call, seconds, and how it was taken."""
    device = CudaDevice()
    for _ in range(10):
        call()
    k, chunk = timing.calls_and_chunk(call, device)
    block = timing.Chain(call, device, chunk, k, hold=True)
    monitor = Precision(epsilon=0.002, max_seconds=1.0, warmup_seconds=0.3).begin(calls_per_sample=k)
    samples, warmup, _ = timing.collect(block, monitor)
    interval = stats.median_interval(samples[warmup:])
    width = interval.relative_half_width
    return {"seconds": interval.value, "half_width": width or float("nan"), "k": k, "starved": block.starved}


def span(call: Callable[[], object], calls: int) -> dict[str, float]:
    """CUPTI's view of so many calls behind a hold: span, kernel sum and launches per call."""
    from torch.profiler import ProfilerActivity, profile

    device = CudaDevice()
    for _ in range(10):
        call()
    device.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        device.hold(0.05)
        for _ in range(calls):
            call()
        device.synchronize()
    kernels = [e for e in profiler.events() if e.device_type.name == "CUDA" and "spin" not in e.name]
    start, end = min(e.time_range.start for e in kernels), max(e.time_range.end for e in kernels)
    busy = sum(e.time_range.end - e.time_range.start for e in kernels)
    return {"seconds": (end - start) * 1e-6 / calls, "busy": busy * 1e-6 / calls, "launches": len(kernels) / calls}


def main() -> None:
    if len(sys.argv) == 4:
        what, name, calls = sys.argv[1:]
        call = cases()[name]()
        print(json.dumps(device_time(call) if what == "device" else span(call, int(calls))))
        return
    print("case                   device       ±        k  span         device/span  kernels      launches  gap/launch")
    for name in cases():
        first = ask("device", name, 0)
        calls = min(max(3, min(200, int(0.02 / first["seconds"]))), 600 // launches(name))
        pairs = [(ask("device", name, 0), ask("span", name, calls)) for _ in range(PROCESSES)]
        ours, theirs = (
            sorted(side, key=lambda answer: answer["seconds"])[PROCESSES // 2] for side in zip(*pairs, strict=True)
        )
        gap = (theirs["seconds"] - theirs["busy"]) / theirs["launches"]
        print(
            f"{name:<20} {ours['seconds'] * 1e6:9.2f} µs {ours['half_width']:7.2%} {ours['k']:5.0f} "
            f"{theirs['seconds'] * 1e6:9.2f} µs {ours['seconds'] / theirs['seconds']:10.4f} "
            f"{theirs['busy'] * 1e6:9.2f} µs {theirs['launches']:8.1f} {gap * 1e6:9.2f} µs",
            flush=True,
        )


def launches(name: str) -> int:
    """How many kernels a call has at the most: the span's pass has to fit into the queue too."""
    return int(name.split()[1]) if name.startswith("chain") else 6


def ask(what: str, name: str, calls: int) -> dict[str, float]:
    """The answer of a fresh process: a profiler never shares one with a clock."""
    command = [sys.executable, __file__, what, name, str(calls)]
    answer: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer


if __name__ == "__main__":
    main()
