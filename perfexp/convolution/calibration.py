"""Calibration: learn which kernels cuDNN runs for which algorithm on the current device.

`perfexp calibrate kernels` runs every algorithm on many convolutions under the profiler and writes
a table of kernel names. `families` uses the table to prove which algorithm ran.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from perfexp.convolution import proof
from perfexp.convolution.convolution_plan import ConvolutionPlan, Shape
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES, CudnnError, Math
from perfexp.convolution.families import Counts, Families, bare, calibrated, identity
from perfexp.devices import lock
from perfexp.errors import UserError
from perfexp.host.files import write_atomically

#: cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t and cudnnConvolutionBwdFilterAlgo_t from
#: NVIDIA's headers. Perfexp's own table of codes is not used, so that a mistake in it is not
#: learned.
ENUMERATED = {
    Pass.forward: [
        "implicit_gemm", "implicit_precomp_gemm", "gemm", "direct", "fft", "fft_tiling", "winograd",
        "winograd_nonfused",
    ],
    Pass.backward_data: ["algo_0", "algo_1", "fft", "fft_tiling", "winograd", "winograd_nonfused"],
    Pass.backward_filter: [
        "algo_0", "algo_1", "fft", "algo_3", "winograd", "winograd_nonfused", "fft_tiling",
    ],
}  # fmt: skip
#: Data type, whether channels come last, and cuDNN's math type.
_VARIANTS = (
    (torch.float32, False, Math.fma),
    (torch.float32, False, Math.default),
    (torch.float16, False, Math.tensor_op),
    (torch.float16, True, Math.tensor_op),
)
#: Calls with a larger workspace are not made.
_MOST_BYTES = 30 * 2**30
_BATCH = 16

Geometry = tuple[
    tuple[int, ...], tuple[int, ...], tuple[int, int], tuple[int, int], tuple[int, int], int
]
#: Number of calls by pass, algorithm and the set of bare names seen together.
Seen = Counter[tuple[str, str, tuple[str, ...]]]


#: Channels and image side of ResNet's stages.
_STAGES = ((64, 56), (128, 28), (256, 14), (512, 7))
#: Input channels, output channels, filter side, image side and stride; with padding.
_PADDED = (
    (3, 64, 7, 224, 2), (3, 64, 11, 224, 4), (3, 64, 3, 224, 1), (3, 32, 3, 299, 2),
    (3, 96, 7, 224, 2), (16, 32, 5, 28, 1), (48, 128, 5, 14, 1), (64, 192, 5, 27, 1),
    (256, 64, 1, 56, 1), (64, 256, 1, 56, 1), (1024, 256, 1, 14, 1), (512, 2048, 1, 7, 1),
    (2048, 512, 1, 7, 1), (24, 144, 1, 56, 1), (240, 40, 1, 14, 1), (528, 160, 1, 14, 1),
    (832, 384, 1, 7, 1), (480, 80, 1, 14, 1), (192, 384, 3, 13, 1), (96, 128, 3, 28, 1),
    (160, 320, 3, 14, 1), (32, 64, 3, 147, 1), (288, 384, 3, 35, 2),
)  # fmt: skip
#: The same without padding.
_UNPADDED = (
    (3, 32, 3, 224, 2), (3, 64, 3, 128, 2), (3, 64, 3, 128, 1), (64, 64, 3, 56, 1),
    (128, 256, 3, 28, 2), (256, 320, 3, 33, 2), (192, 192, 3, 17, 2), (64, 96, 3, 73, 1),
    (128, 512, 5, 5, 1), (256, 256, 7, 7, 1),
)  # fmt: skip
#: Channels, filter side, image side and stride of depthwise convolutions.
_DEPTHWISE = ((32, 3, 112, 1), (96, 3, 112, 2), (240, 5, 14, 1), (672, 5, 14, 2))
#: Channels, image side, stride and groups.
_GROUPED = ((64, 56, 1, 4), (256, 28, 1, 32), (144, 28, 2, 9), (1024, 14, 1, 32))
#: Channels, image side and dilation.
_DILATED = ((64, 56, 2), (256, 28, 2), (512, 28, 4))
#: Input channels, output channels and image side for filters of 1 × 1; the first are for pooled
#: features, a single pixel.
_POINTWISE = (
    (16, 64, 1), (64, 16, 1), (96, 24, 1), (256, 64, 1), (784, 196, 1), (512, 2048, 1),
    (64, 16, 55), (128, 48, 27), (512, 64, 13), (320, 72, 17), (768, 128, 9),
)  # fmt: skip


def geometries() -> list[Geometry]:
    """Return convolutions that differ in everything cuDNN chooses kernels by.

    These are filters, strides, channels, sizes and groups, as in common image models.
    """
    return list(dict.fromkeys(_designed()))


def _designed() -> Iterator[Geometry]:
    """Yield the convolutions of the tables above, some of them twice."""
    for channels, size in _STAGES:
        for stride in (1, 2):
            yield _of(channels, channels, 3, size, stride=stride)
            yield _of(channels, 2 * channels, 1, size, stride=stride)
    for inputs, outputs, filter_size, size, stride in _PADDED:
        yield _of(inputs, outputs, filter_size, size, stride=stride)
    for asymmetric in ((1, 7), (7, 1), (1, 3), (3, 1)):
        yield _of(160, 192, asymmetric, 17)
    for channels, filter_size, size, stride in _DEPTHWISE:
        yield _of(channels, channels, filter_size, size, stride=stride, groups=channels)
    for channels, size, stride, groups in _GROUPED:
        yield _of(channels, channels, 3, size, stride=stride, groups=groups)
    for channels, size, dilation in _DILATED:
        yield _of(channels, channels, 3, size, dilation=dilation)
    for channels, size in _STAGES:
        yield _of(channels, channels, 3, size, batch=1)
        yield _of(channels, 2 * channels, 1, size, batch=1)
    for inputs, outputs, filter_size, size, stride in _UNPADDED:
        yield _of(inputs, outputs, filter_size, size, stride=stride, padded=False)
    for inputs, outputs, size in _POINTWISE:
        yield _of(inputs, outputs, 1, size)


def _of(
    inputs: int,
    outputs: int,
    filter_size: int | tuple[int, int],
    size: int,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    batch: int = _BATCH,
    padded: bool = True,
) -> Geometry:
    """Return a convolution on square inputs; the default padding keeps their size at stride 1.

    Args:
        inputs: input channels.
        outputs: output channels.
        filter_size: side of the filter, or its height and width.
        size: side of the images in pixels.
    """
    height, width = (filter_size, filter_size) if isinstance(filter_size, int) else filter_size
    padding = (height // 2 * dilation, width // 2 * dilation) if padded else (0, 0)
    x, w = (batch, inputs, size, size), (outputs, inputs // groups, height, width)
    return x, w, (stride, stride), padding, (dilation, dilation), groups


def calibrate(name: str, seconds: float, progress: Callable[[str], None]) -> tuple[Families, Path]:
    """Learn a device's kernel table and write it where proofs look for it.

    The device is locked against other measurements until then.

    Args:
        name: the device in torch's words, for example `cuda:0`.
        seconds: time limit; no further convolution begins after it.
        progress: called with status lines.

    Raises:
        UserError: there is no GPU with cuDNN, no kernel can be observed, or the file cannot be
            written.
    """
    if identity() is None:
        raise UserError("Kernels are those of cuDNN, and there is no NVIDIA GPU with cuDNN here.")
    device = torch.device(name)
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    with lock.held(
        uuid,
        wait=True,
        purpose="perfexp calibrate",
        waiting=lambda owner: progress(f"waiting: {owner}"),
    ):
        table, _ = learn(geometries(), device, seconds, progress)
    if not table.counts:
        raise UserError(
            "No kernel was observed: torch's profiler sees none here (another profiler may be "
            "running)."
        )
    path = calibrated(table.architecture, table.cudnn)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.format(msgspec.json.encode(table), indent=1))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    return table, path


def learn(
    chosen: list[Geometry], device: torch.device, seconds: float, progress: Callable[[str], None]
) -> tuple[Families, Seen]:
    """Run every algorithm for every pass of some convolutions, and record each call's kernels.

    Return the table, and the number of calls for each set of names.

    Args:
        seconds: time limit; no further convolution begins after it.
        progress: called with a status line after each convolution.
    """
    architecture, cudnn = identity() or ("", 0)
    begun, done, seen = time.monotonic(), 0, Seen()
    for geometry in chosen:
        if time.monotonic() - begun > seconds:
            break
        calls = _calls(geometry, device)
        observed = proof.watch(partial(_run_all, calls))
        for pass_type, name, plan, _ in calls:
            names = {bare(kernel) for kernel in observed.kernels.get(plan, ())}
            if names:
                seen[pass_type.value, name, tuple(sorted(names))] += 1
        done += 1
        progress(f"{done} of {len(chosen)} convolutions, {seen.total()} calls")
        del calls, observed
        torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    text = f"{name}, cuDNN {cudnn}, torch {torch.__version__}: {done} of {len(chosen)} convolutions"
    return Families(seen=text, architecture=architecture, cudnn=cudnn, counts=counts_of(seen)), seen


def counts_of(seen: Seen) -> dict[str, dict[str, Counts]]:
    """Return the number of calls, in total and with each name, by pass and algorithm."""
    calls: Counter[tuple[str, str]] = Counter()
    kernels: dict[tuple[str, str], Counter[str]] = {}
    for (pass_type, algorithm, names), number in seen.items():
        calls[pass_type, algorithm] += number
        kernels.setdefault((pass_type, algorithm), Counter()).update(dict.fromkeys(names, number))
    counts: dict[str, dict[str, Counts]] = {}
    for (pass_type, algorithm), number in sorted(calls.items()):
        named = dict(sorted(kernels[pass_type, algorithm].items()))
        counts.setdefault(pass_type, {})[algorithm] = Counts(calls=number, kernels=named)
    return counts


def _run_all(calls: Sequence[tuple[Any, ...]]) -> None:
    """Make all calls once, so that a profiler sees their kernels."""
    for _, _, plan, reads in calls:
        plan(*reads)


def _calls(
    geometry: Geometry, device: torch.device
) -> list[tuple[Pass, str, ConvolutionPlan, tuple[torch.Tensor, ...]]]:
    """Return all calls of a convolution that cuDNN accepts: pass, algorithm, plan, tensors to read.

    Each has run once. Calls without enough memory are left out. `ENUMERATED` names the codes in
    NVIDIA's order, perfexp's own table only creates the plans.
    """
    inputs, weight, stride, padding, dilation, groups = geometry
    calls: list[tuple[Pass, str, ConvolutionPlan, tuple[torch.Tensor, ...]]] = []
    for dtype, last, math in _VARIANTS:
        shape = Shape(inputs, weight, stride, padding, dilation, groups, dtype, last, math, 0)
        layout = torch.channels_last if last else torch.contiguous_format
        x, w, dy = (
            torch.randn(size, device=device).to(dtype, memory_format=layout)
            for size in (inputs, weight, shape.outputs)
        )
        reads = {Pass.forward: (x, w), Pass.backward_data: (w, dy), Pass.backward_filter: (x, dy)}
        for pass_type, names in ENUMERATED.items():
            by_code = {code: name for name, code in CODES[pass_type].items()}
            for code, name in enumerate(names):
                try:
                    plan = ConvolutionPlan(pass_type, by_code[code], shape)
                    if plan.workspace_bytes <= _MOST_BYTES:
                        plan(*reads[pass_type])
                        calls.append((pass_type, name, plan, reads[pass_type]))
                except (CudnnError, torch.OutOfMemoryError):
                    continue
    return calls
