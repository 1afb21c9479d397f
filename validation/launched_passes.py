"""Passes by cuDNN's name, enqueued by the v7 call against launched as captured: the same numbers, and what each costs.

    python validation/launched_passes.py

For every algorithm, pass and shape that cuDNN supports: whether both write the same bits, from this thread and from
another (autograd's backward passes have one of their own); the host's time to issue a call, while the device's queue is
never full, and the device's time of a call behind a held queue, both ways in turns. At the end how much memory launches
take, and whether the driver uses again what was given back. Exits with 1 where two results differ.

Gradients that are added up in a changing order (`execution.deterministic` refuses those) differ from call to call; a
launch may differ from a v7 call by twice as much as ten of those differ from one another. Times are µs.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch

from perfexp.convolution.convolution_plan import ConvolutionPlan, Shape
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES, UNREPEATABLE, CudnnError, math_of
from perfexp.convolution.replays import CaptureError, GraphLaunch

ROUNDS, HOST_CALLS, DEVICE_CALLS, LAUNCHES, REPEATS = 9, 25, 40, 500, 10
#: 10 ms of an H200: longer than the host takes for the calls.
HOLD_CYCLES = 20_000_000
#: Inputs and weights.
SHAPES = (
    ((1, 64, 14, 14), (64, 64, 1, 1), torch.float32),
    ((1, 256, 14, 14), (64, 256, 1, 1), torch.float16),
    ((1, 64, 56, 56), (64, 64, 3, 3), torch.float32),
    ((16, 64, 28, 28), (64, 64, 3, 3), torch.float16),
)


def host_microseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(HOST_CALLS):
        call()
    taken = (time.perf_counter_ns() - start) * 1e-3 / HOST_CALLS
    torch.cuda.synchronize()
    return taken


def device_microseconds(call: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HOLD_CYCLES)
    first.record()
    for _ in range(DEVICE_CALLS):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / DEVICE_CALLS


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def elsewhere(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Call:
    """A pass on tensors of its own.

    Args:
        plan: of the pass.
    """

    def __init__(self, plan: ConvolutionPlan) -> None:
        shape = plan._shape
        sizes = {
            Pass.forward: (shape.inputs, shape.weight),
            Pass.backward_data: (shape.weight, shape.outputs),
            Pass.backward_filter: (shape.inputs, shape.outputs),
        }[plan.which]
        read = [torch.randn(size, device="cuda").to(shape.dtype) for size in sizes]
        self.out = torch.empty(plan._result, dtype=shape.dtype, device="cuda")
        workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        self._tensors = [*read, self.out, workspace]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._plan = plan

    def enqueue(self) -> None:
        """By the v7 call."""
        self._plan._enqueue(*self._addresses)

    def result(self, run: Callable[[], object]) -> torch.Tensor:
        """What it comes to when it is run so."""
        self.out.zero_()
        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
        return self.out.clone()

    def captured(self) -> Callable[[], None]:
        """What launches it."""
        launch = GraphLaunch(self.enqueue, self.out.device)
        return partial(launch, torch.cuda.current_stream().cuda_stream)


def compare(call: Call, *, to_the_bit: bool) -> tuple[bool, dict[str, float]]:
    """Whether a pass comes to the same both ways, and what it costs, µs."""
    expected = call.result(call.enqueue)
    launch = call.captured()
    ways = (launch, partial(elsewhere, launch), partial(elsewhere, call.enqueue))
    found = [call.result(run) for run in ways]
    if to_the_bit:
        agrees = all(torch.equal(each, expected) for each in found)
    else:
        usual = max(difference(call.result(call.enqueue), expected) for _ in range(REPEATS))
        agrees = all(difference(each, expected) <= 2 * usual for each in found)
    taken = defaultdict(list)
    for _ in range(ROUNDS):
        for way, enqueue in (("v7", call.enqueue), ("launched", launch)):
            taken[f"host {way}"].append(host_microseconds(enqueue))
            taken[f"device {way}"].append(device_microseconds(enqueue))
    return agrees, {name: statistics.median(values) for name, values in taken.items()}


def plans() -> Iterator[ConvolutionPlan]:
    """Of everything that cuDNN supports."""
    for inputs, weight, dtype in SHAPES:
        padding = (weight[2] // 2, weight[3] // 2)
        shape = Shape(inputs, weight, (1, 1), padding, (1, 1), 1, dtype, False, math_of(dtype), 0)
        for which, codes in CODES.items():
            for name in codes:
                with suppress(CudnnError):
                    yield ConvolutionPlan(which, name, shape)


def tell_memory(call: Call) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]

    def taken() -> str:
        torch.cuda.synchronize()
        return f"{(before - torch.cuda.mem_get_info()[0]) / 2**20:.1f} MiB"

    told = []
    for _ in range(2):
        kept = [GraphLaunch(call.enqueue, call.out.device) for _ in range(LAUNCHES)]
        told.append(f"{LAUNCHES} more launches: {taken()}")
        for launch in kept:
            launch.destroy()
        told.append(f"given back: {taken()}")
    print(f"Of the device's memory: {'; '.join(told)}.")


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("This needs an NVIDIA GPU.")
    torch.set_num_threads(1)
    code, call = 0, None
    titles = f"{'pass':<16} {'algorithm':<22} {'inputs':<16} {'weights':<16} {'type':<8}"
    print(f"{titles}  host v7, launched  device v7, launched")
    for plan in plans():
        call, shape = Call(plan), plan._shape
        kind = str(shape.dtype).removeprefix("torch.")
        what = f"{plan.which.name:<16} {plan.algorithm:<22} {shape.inputs!s:<16} {shape.weight!s:<16} {kind:<8}"
        try:
            agrees, taken = compare(
                call, to_the_bit=(plan.which, plan.algorithm) not in UNREPEATABLE
            )
        except (CudnnError, CaptureError) as error:  # it names a workspace for what it then refuses
            print(f"{what}  {error}")
            continue
        code = code or int(not agrees)
        figures = " ".join(
            f"{taken[name]:9.2f}"
            for name in ("host v7", "host launched", "device v7", "device launched")
        )
        print(f"{what} {figures}{'' if agrees else '  DIFFERENT'}", flush=True)
    if call is not None:
        tell_memory(call)
    return code


if __name__ == "__main__":
    sys.exit(main())
