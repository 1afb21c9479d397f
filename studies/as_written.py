"""Times of modules that keep state from their first call, beside a plain loop of the same calls, in turns.

Usage: python studies/as_written.py [ROUNDS]
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import perfexp
from perfexp.records.point_times import first_median

SIZE, BATCH, WIDTH = 128, 4, 64


class Ramp(nn.Module):
    """Eight convolutions behind a ramp that is made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.pos: torch.Tensor | None = None
        layers = [nn.Conv2d(WIDTH if number else 3, WIDTH, 3, padding=1) for number in range(8)]
        self.convs, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 10)

    def ramp(self, x: torch.Tensor) -> torch.Tensor:
        if self.pos is None:
            self.pos = torch.linspace(-1, 1, x.shape[-1], device=x.device)
        return self.pos

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convs(x + self.ramp(x)).mean((2, 3)))


@functools.cache
def cached_ramp(size: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, 1, size, device=device)


class CachedRamp(Ramp):
    """The ramp is in a cache of a function."""

    def ramp(self, x: torch.Tensor) -> torch.Tensor:
        return cached_ramp(x.shape[-1], x.device)


def plain_seconds(module: nn.Module, device: torch.device) -> float:
    module.to(device).eval()
    inputs, seconds = torch.randn(BATCH, 3, SIZE, SIZE, device=device), []
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with torch.inference_mode():
        for number in range(25):
            start = time.perf_counter()
            module(inputs)
            wait()
            if number >= 5:
                seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measured_seconds(module: nn.Module, folder: Path) -> float:
    record = perfexp.measure(
        module,
        input_size=SIZE,
        batch_size=BATCH,
        stopping="brisk",
        tracking="none",
        output_dir=folder,
    )
    seconds = first_median(record.points[0], "latency")
    assert seconds is not None
    return seconds


def main(rounds: int = 5) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # as perfexp's fp32
    print(
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in (Ramp, CachedRamp):
            ratios = []
            for number in range(rounds):
                plain = plain_seconds(kind(), device)
                ratios.append(
                    measured_seconds(kind(), Path(folder) / f"{kind.__name__}-{number}") / plain
                )
            listed = " ".join(f"{ratio:.3f}" for ratio in ratios)
            print(
                f"{kind.__name__}: {statistics.median(ratios):.3f} of a plain loop's latency (rounds: {listed})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
