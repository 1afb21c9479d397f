"""What forcing an algorithm costs the host for each call of a layer, against the layer as it is.

    python validation/convolution_overhead.py

* The layer keeps torch's own convolution, once untouched and once through perfexp's replacement
  (`layers={"*":default}`): what the replacement itself costs. The picture is tiny, so that the ratio is the worst there
  is.
* On an NVIDIA GPU also by each of cuDNN's algorithms, against `torch.nn.functional.conv2d` on the same tensors: batch
  1, 1 × 1 filters, in inference and (forward pass only) in training. Few calls are issued before the device is waited
  for, so that its queue is never full and the time is the host's alone.

Both alternate within one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from perfexp.convolution.forced import Forced

ROUNDS, CALLS, CALLS_IN_QUEUE = 31, 500, 25
#: A pass is captured when it comes for the second time with the same addresses.
CALLS_TO_SETTLE = 5


def seconds_per_call(call: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter_ns() - start) * 1e-9 / calls
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds


def replacement() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1))
    session, forced = SimpleNamespace(module=model), Forced(name="gemm", layers={"*": "default"})
    print("picture    untouched    replaced     added   ratio")
    for size in (8, 32, 128):
        inputs, pairs = torch.randn(1, 8, size, size), []
        with torch.inference_mode():
            for _ in range(ROUNDS):
                plain = seconds_per_call(lambda inputs=inputs: model[0](inputs), CALLS)
                with forced.applied(session):
                    model(inputs)
                    pairs.append(
                        (plain, seconds_per_call(lambda inputs=inputs: model[0](inputs), CALLS))
                    )
        plain = statistics.median(pair[0] for pair in pairs)
        added = statistics.median(pair[1] - pair[0] for pair in pairs)
        times = f"{plain * 1e6:9.2f} µs {(plain + added) * 1e6:9.2f} µs {added * 1e6:6.2f} µs"
        print(f"{size:>3} × {size:<3} {times} {1 + added / plain:7.3f}")


def cudnn() -> None:
    print("\nchannels  data type  mode       algorithm               conv2d      forced   ratio")
    for channels, out, dtype in (
        (64, 64, torch.float32),
        (256, 64, torch.float32),
        (256, 64, torch.float16),
    ):
        layer = torch.nn.Conv2d(channels, out, 1, bias=False, device="cuda", dtype=dtype)
        for mode in ("inference", "training"):
            inputs = torch.randn(1, channels, 14, 14, device="cuda", dtype=dtype)
            inputs.requires_grad_(mode == "training")
            for name in ("implicit_gemm", "implicit_precomp_gemm", "gemm", "fft"):
                report(layer, inputs, mode, name)


def report(layer: torch.nn.Conv2d, inputs: torch.Tensor, mode: str, name: str) -> None:
    """One line: `torch.nn.functional.conv2d` and the layer's forward pass by an algorithm, in turns."""
    forced, pairs = Forced(name=name, backend="cudnn"), []
    with torch.inference_mode(mode == "inference"):
        for _ in range(ROUNDS):

            def plain() -> torch.Tensor:
                return torch.nn.functional.conv2d(inputs, layer.weight, None)

            plain()
            seconds = seconds_per_call(plain, CALLS_IN_QUEUE)
            with forced.applied(SimpleNamespace(module=layer)):
                seconds_per_call(
                    lambda: layer._conv_forward(inputs, layer.weight, None), CALLS_TO_SETTLE
                )
                ours = seconds_per_call(
                    lambda: layer._conv_forward(inputs, layer.weight, None), CALLS_IN_QUEUE
                )
            pairs.append((seconds, ours))
    before, after = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
    kind = str(layer.weight.dtype).removeprefix("torch.")
    what = f"{layer.in_channels:>3} → {layer.out_channels:<4} {kind:<9}  {mode:<9}  {name:<21}"
    print(f"{what} {before * 1e6:7.2f} µs {after * 1e6:7.2f} µs {after / before:7.2f}")


def main() -> None:
    torch.set_num_threads(1)
    replacement()
    if torch.cuda.is_available():
        cudnn()


if __name__ == "__main__":
    main()
