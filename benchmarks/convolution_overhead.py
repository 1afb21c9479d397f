"""What forcing an algorithm costs the host for each call of a layer, against the layer as it is.

    python benchmarks/convolution_overhead.py

The layer keeps torch's own convolution, once untouched and once through perfexp's replacement (`layers={"*":default}`),
alternating within one run; what an algorithm itself costs is not in it. The picture is tiny, so that the ratio is the
worst that there is.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import torch

from perfexp.algorithms.forced import Forced

ROUNDS, CALLS = 31, 500


def seconds_per_call(layer: torch.nn.Module, inputs: torch.Tensor) -> float:
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        layer(inputs)
    return (time.perf_counter_ns() - start) * 1e-9 / CALLS


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1))
    session, forced = SimpleNamespace(module=model), Forced(name="gemm", layers={"*": "default"})
    print("picture    untouched    replaced     added   ratio")
    for size in (8, 32, 128):
        inputs, pairs = torch.randn(1, 8, size, size), []
        with torch.inference_mode():
            for _ in range(ROUNDS):
                plain = seconds_per_call(model[0], inputs)
                with forced.applied(session):
                    model(inputs)
                    pairs.append((plain, seconds_per_call(model[0], inputs)))
        plain = statistics.median(pair[0] for pair in pairs)
        added = statistics.median(pair[1] - pair[0] for pair in pairs)
        times = f"{plain * 1e6:9.2f} µs {(plain + added) * 1e6:9.2f} µs {added * 1e6:6.2f} µs"
        print(f"{size:>3} × {size:<3} {times} {1 + added / plain:7.3f}")


if __name__ == "__main__":
    main()
