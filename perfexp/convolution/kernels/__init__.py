"""Kernels: convolution algorithms as Triton kernels for NVIDIA GPUs.

* `direct` sums products in registers by the definition, in float32 or float64, without im2col or a
  matrix product.
* `winograd` is F(2 × 2, 3 × 3) with stride 1, and TF32 products if cuDNN may use TF32. Half
  precisions are transformed in float32 and multiplied in half precision by tensor cores.

Both rearrange or transform the weights in every call. Triton is imported with the first
computation. Inputs are (N, C, H, W) in any memory format, weights (O, C / G, kernel height, kernel
width) in the same data type. Results are (N, O, height, width) in the inputs' data type, and
channels last if the inputs are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module, metadata, util
from typing import Any

import torch

from perfexp.convolution.kernels.launch import (
    Choices,
    LaunchPlan,
    Layout,
    TensorConvolution,
    fastest,
)
from perfexp.convolution.portable.algorithms import ALGORITHMS as PORTABLE
from perfexp.convolution.portable.algorithms import is_channels_last, misfit
from perfexp.convolution.portable.geometry import Convolution
from perfexp.models import tf32
from perfexp.version import __version__

#: Oldest Triton version with this launch interface.
_OLDEST = (3, 3)
#: Minimum compute capability: asynchronous copies and TF32.
_CAPABILITY = (8, 0)
#: Number of multiprocessors that the interpreter assumes.
_PROCESSORS = 4

#: Plans by shape; the first call chooses.
_plans: dict[Any, LaunchPlan] = {}


def available(device: torch.device | None = None) -> str | None:
    """Return why Triton kernels cannot run on a device, for example `triton is not installed`.

    The result is None if they can. This imports nothing. Backends decide with it whether to offer
    Triton.

    Args:
        device: device to check; None for the current device.
    """
    if util.find_spec("triton") is None:
        return "triton is not installed"
    version = _version()
    if version and version < _OLDEST:
        return f"Triton is {'.'.join(map(str, version))}, older than {'.'.join(map(str, _OLDEST))}"
    if interpreted() and (device is None or device.type == "cpu"):
        return None
    if device is not None and device.type != "cuda":
        return f"the device is {device.type}, not cuda"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.version.hip is not None:
        return "AMD devices are untested"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return (
            f"the device has compute capability {capability[0]}.{capability[1]}, not 8.0 or higher"
        )
    return None


def interpreted() -> bool:
    """Return whether Triton's interpreter runs kernels; it must be set before Triton's import."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def compute(
    name: str, inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Return the outputs by the shape's plan, which the first call chooses.

    Autograd does not record it.
    """
    device = inputs.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return compute(name, inputs, weight, convolution)
    of_inputs = (tuple(inputs.shape), inputs.stride(), inputs.dtype)
    of_weight = (tuple(weight.shape), weight.stride(), weight.dtype)
    shape = (name, *of_inputs, *of_weight, convolution, _uses_tf32(name, inputs))
    plan = _plans.get((device, weight.device, shape))
    if plan is None:
        candidates = plans(name, inputs, weight, convolution)
        plan = _choose(shape, inputs, weight, candidates)
    return plan(inputs, weight)


def plans(
    name: str, inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> list[LaunchPlan]:
    """Return all candidate plans for a shape, the likeliest to be fast first.

    `compute` times them and keeps the fastest.

    Args:
        name: `direct` or `winograd`.
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).

    Raises:
        ValueError: the kernels cannot compute the convolution.
    """
    reason = misfit(convolution, inputs.shape) or PORTABLE[name].supports(convolution, inputs.dtype)
    if reason is None and (inputs.dtype, inputs.device) != (weight.dtype, weight.device):
        reason = f"inputs are {inputs.dtype} on {inputs.device}, "
        reason += f"weights {weight.dtype} on {weight.device}"
    reason = reason or available(inputs.device)
    if reason is not None:
        raise ValueError(f"The kernel of {name} can't compute this convolution: {reason}.")
    shape = (inputs.shape[0], weight.shape[0], *convolution.output_size(*inputs.shape[2:]))
    last = is_channels_last(inputs.shape, inputs.stride())
    layout = torch.channels_last if last else torch.contiguous_format
    outputs = torch.empty(shape, dtype=inputs.dtype, device="meta", memory_format=layout)
    if outputs.numel() == 0:
        return [LaunchPlan(outputs=Layout.of(outputs))]
    processors = _PROCESSORS
    if inputs.device.type == "cuda":
        processors = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    problem = TensorConvolution(
        convolution=convolution,
        dtype=inputs.dtype,
        inputs=Layout.of(inputs),
        weight=Layout.of(weight),
        outputs=Layout.of(outputs),
        last=last,
        processors=processors,
        tf32=_uses_tf32(name, inputs),
        interpreted=interpreted(),
    )
    module: Any = import_module(f"perfexp.convolution.kernels.{name}_kernels")
    candidates: list[LaunchPlan] = module.plans(problem)
    return candidates


def _choose(
    shape: object, inputs: torch.Tensor, weight: torch.Tensor, candidates: Sequence[LaunchPlan]
) -> LaunchPlan:
    """Return the fastest plan and remember it, for later processes, too.

    Under deterministic algorithms it is the first plan, so that all processes get the same results.
    """
    plan = candidates[0]
    is_timed = inputs.device.type == "cuda" and len(candidates) > 1
    if is_timed and not torch.are_deterministic_algorithms_enabled():
        time = partial(fastest, candidates, inputs, weight)
        is_capturing = torch.cuda.is_current_stream_capturing()  # timing is impossible
        choices = _choices(inputs.device.index)
        found = choices.fastest(shape, candidates, None if is_capturing else time)
        if found is None:
            return plan
        plan = found
    _plans[inputs.device, weight.device, shape] = plan
    return plan


@cache
def _choices(index: int) -> Choices:
    """Return the choices for a device with this software."""
    return Choices((torch.cuda.get_device_name(index), torch.__version__, _version(), __version__))


def _uses_tf32(name: str, inputs: torch.Tensor) -> bool:
    """Return whether a kernel multiplies these inputs as TF32."""
    return name == "winograd" and inputs.dtype == torch.float32 and tf32.allowed()[1]


def _version() -> tuple[int, ...]:
    """Return Triton's major and minor version; empty if it is unknown."""
    try:
        return tuple(map(int, metadata.version("triton").split(".")[:2]))
    except (metadata.PackageNotFoundError, ValueError):
        return ()


#: Algorithms with kernels: functions of inputs, weights and convolution.
ALGORITHMS = {name: partial(compute, name) for name in ("direct", "winograd")}
