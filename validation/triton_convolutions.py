"""The Triton kernels on this CUDA device: their errors, and their times beside `torch.nn.functional.conv2d`'s.

    python validation/triton_convolutions.py [--dtypes float32 float16 bfloat16 float64] [--plans]

A line for each kernel, data type and shape: the relative L2 error against float64 and its bound, the time of a call in
µs (events around 20 calls after 5 that warm up; the median of 5) of the kernel with what prepares its weights and of
conv2d, the ratio of the two, and how long the first call took, which compiles and chooses. With `--plans` a line more
for each plan that may be chosen. TF32 is off but where the shape says so. A case that fails is a line as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch.nn.functional import conv2d, pad

from perfexp.convolution import kernels
from perfexp.convolution.kernels import plans
from perfexp.convolution.portable.geometry import Convolution

BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
TF32_BOUND = 5e-3
COUNT, WARMUP, ROUNDS = 20, 5, 5


@dataclass(frozen=True)
class Case:
    """A convolution of images; padding is left, right, top, bottom."""

    name: str
    shape: tuple[int, int, int, int]
    out_channels: int
    kernel: tuple[int, int] = (3, 3)
    padding: tuple[int, int, int, int] = (1, 1, 1, 1)
    more: dict[str, object] = field(default_factory=dict)
    last: bool = False
    tf32: bool = False

    @property
    def convolution(self) -> Convolution:
        """What to compute."""
        return Convolution(
            in_channels=self.shape[1],
            out_channels=self.out_channels,
            kernel=self.kernel,
            padding=self.padding,
            **self.more,
        )


NONE = (0, 0, 0, 0)
DIRECT = (
    Case("3x3 64->64 56x56 b8", (8, 64, 56, 56), 64),
    Case("3x3 64->64 56x56 b8 channels last", (8, 64, 56, 56), 64, last=True),
    Case("1x1 256->64 56x56 b8", (8, 256, 56, 56), 64, (1, 1), NONE),
    Case(
        "7x7 stride 2 3->64 224x224 b8",
        (8, 3, 224, 224),
        64,
        (7, 7),
        (3, 3, 3, 3),
        {"stride": (2, 2)},
    ),
    Case("3x3 512->512 7x7 b1", (1, 512, 7, 7), 512),
    Case("depthwise 3x3 96 56x56 b8", (8, 96, 56, 56), 96, more={"groups": 96}),
    Case("3x3 32 groups 128->128 28x28 b8", (8, 128, 28, 28), 128, more={"groups": 32}),
    Case(
        "3x3 dilation 2 64->96 33x31 b3 uneven",
        (3, 64, 33, 31),
        96,
        (3, 3),
        (0, 3, 2, 1),
        {"dilation": (2, 2)},
    ),
)
WINOGRAD = (
    Case("3x3 64->64 56x56 b8", (8, 64, 56, 56), 64),
    Case("3x3 64->64 56x56 b8 TF32", (8, 64, 56, 56), 64, tf32=True),
    Case("3x3 64->64 56x56 b8 channels last", (8, 64, 56, 56), 64, last=True),
    Case("3x3 256->256 14x14 b32", (32, 256, 14, 14), 256),
    Case("3x3 512->512 7x7 b1", (1, 512, 7, 7), 512),
    Case("3x3 3->64 224x224 b4", (4, 3, 224, 224), 64),
    Case("3x3 4 groups 128->128 28x28 b8", (8, 128, 28, 28), 128, more={"groups": 4}),
    Case("3x3 20->40 33x31 b3 uneven", (3, 20, 33, 31), 40, (3, 3), (0, 3, 2, 1)),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--plans", action="store_true", help="also each plan that may be chosen")
    arguments = parser.parse_args()
    reason = kernels.available()
    if reason is not None:
        raise SystemExit(f"The Triton kernels can't run: {reason}.")
    begin = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"{'':<57} {'error':>8} {'bound':>6}  {'ours':>8} {'conv2d':>8} {'ratio':>6} {'first':>7}"
    )
    failures = 0
    for kind, cases in (("direct", DIRECT), ("winograd", WINOGRAD)):
        for dtype in (getattr(torch, name) for name in arguments.dtypes):
            for case in cases:
                if case.tf32 and dtype != torch.float32:
                    continue
                label = f"{kind:<8} {str(dtype).removeprefix('torch.'):<8} {case.name}"
                try:
                    failures += not report(label, kind, dtype, case, all_plans=arguments.plans)
                except Exception as error:
                    failures += 1
                    print(
                        f"{label:<57} {type(error).__name__}: {' '.join(str(error).split())[:300]}",
                        flush=True,
                    )
    print(f"{failures} failed; {time.perf_counter() - begin:.0f} s")


def report(label: str, kind: str, dtype: torch.dtype, case: Case, *, all_plans: bool) -> bool:
    """Print a case; whether the error is within its bound."""
    torch.backends.cudnn.allow_tf32 = case.tf32
    generator = torch.Generator("cuda").manual_seed(0)
    convolution = case.convolution
    weight_shape = (case.out_channels, convolution.in_group, *case.kernel)
    inputs, weight = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype)
        for shape in (case.shape, weight_shape)
    )
    if case.last:
        inputs, weight = (
            tensor.to(memory_format=torch.channels_last) for tensor in (inputs, weight)
        )
    left, right, top, bottom = case.padding
    even = left == right and top == bottom
    settings = (
        None,
        convolution.stride,
        (top, left) if even else 0,
        convolution.dilation,
        convolution.groups,
    )

    def of_torch(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return conv2d(inputs if even else pad(inputs, case.padding), weight, *settings)

    compute = kernels.ALGORITHMS[kind]
    true = of_torch(inputs.double(), weight.double())
    begin = time.perf_counter()
    with torch.no_grad():
        found = compute(inputs, weight, convolution)
        torch.cuda.synchronize()
        first = time.perf_counter() - begin
        error = float((found.double() - true).norm() / true.norm())
        bound = TF32_BOUND if case.tf32 else BOUNDS[dtype]
        right_shape = found.shape == true.shape and found.dtype == dtype
        ours, theirs = (
            microseconds(call)
            for call in (
                lambda: compute(inputs, weight, convolution),
                lambda: of_torch(inputs, weight),
            )
        )
        good = right_shape and error <= bound
        errors = f"{error:8.1e} {bound:6.0e}{'  ' if good else ' !'}"
        print(
            f"{label:<57} {errors}{ours:8.1f} {theirs:8.1f} {ours / theirs:6.2f} {first:5.1f} s",
            flush=True,
        )
        for number, plan in enumerate(
            plans(kind, inputs, weight, convolution) if all_plans else ()
        ):
            error = float((plan(inputs, weight).double() - true).norm() / true.norm())
            constants = " ".join(map(str, plan.launch.constants))
            spent = microseconds(lambda plan=plan: plan(inputs, weight))
            print(f"    plan {number} {error:8.1e} {spent:8.1f} µs  {constants}", flush=True)
    return good


def microseconds(call) -> float:
    """Of a call: the median of rounds of them between two events."""
    for _ in range(WARMUP):
        call()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(COUNT):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / COUNT)
    return statistics.median(times)


if __name__ == "__main__":
    main()
