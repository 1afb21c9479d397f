"""Operators: Triton's convolutions as torch knows them, `perfexp::triton_direct` and `perfexp::triton_winograd`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module, metadata, util
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.functional import pad

from perfexp.algorithms.convolution import Convolution
from perfexp.algorithms.portable import ALGORITHMS, is_channels_last, misfit
from perfexp.kernels.launch import Layout, Plan, Problem, fastest

_SCHEMA = "(Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor"
#: Whose kernels are launched as they are here.
_OLDEST = (3, 3)
#: Those with asynchronous copies and TF32.
_CAPABILITY = (8, 0)
#: What the interpreter's host counts as.
_PROCESSORS = 4

_plans: dict[Any, Plan] = {}


def available(device: torch.device | None = None) -> str | None:
    """Why Triton's kernels can't run, in a few words; None if they can. Imports nothing.

    Args:
        device: where; None for the current CUDA device.
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
        return "the device is AMD's, which nobody has tried"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return f"the device has compute capability {capability[0]}.{capability[1]}, not 8.0 or higher"
    return None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, which is to be set before it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def apply(name: str, inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Compute: by the operator where somebody wants to see it, otherwise without torch's dispatcher.

    Args:
        name: `direct` or `winograd`.
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).
        convolution: one that the kernels can compute.

    Returns:
        (N, O, height, width), in the inputs' data type and memory format.
    """
    settings = (convolution.stride, convolution.padding, convolution.dilation, convolution.groups)
    if torch.compiler.is_compiling() or _watched(inputs, weight):
        outputs: torch.Tensor = _OPERATORS[name](inputs, weight, *settings)
        return outputs
    return _compute(name, inputs, weight, *settings)


def plans(name: str, inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> list[Plan]:
    """Every way that may be chosen for a shape, the likeliest to be fast first.

    Args:
        name: `direct` or `winograd`.
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).
        convolution: what to compute.

    Raises:
        ValueError: it can't be computed.
    """
    reason = misfit(convolution, inputs.shape) or ALGORITHMS[name].supports(convolution, inputs.dtype)
    if reason is None and (inputs.dtype, inputs.device) != (weight.dtype, weight.device):
        reason = f"inputs are {inputs.dtype} on {inputs.device}, weights {weight.dtype} on {weight.device}"
    reason = reason or available(inputs.device)
    if reason is not None:
        raise ValueError(f"triton_{name} can't compute this convolution: {reason}.")
    outputs = _outputs(inputs, weight, convolution, torch.device("meta"))
    if outputs.numel() == 0:
        return [Plan(None, outputs)]
    processors = _PROCESSORS
    if inputs.device.type == "cuda":
        processors = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    problem = Problem(
        convolution=convolution,
        dtype=inputs.dtype,
        inputs=Layout.of(inputs),
        weight=Layout.of(weight),
        outputs=Layout.of(outputs),
        last=is_channels_last(inputs.shape, inputs.stride()),
        processors=processors,
        tf32=_tf32(name, inputs),
        interpreted=interpreted(),
    )
    kernels = import_module(f"perfexp.kernels.{name}_kernels")
    return [Plan(recipe, outputs) for recipe in kernels.recipes(problem)]


def _watched(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether autograd, a subclass of tensors, a mode, a transform, a profiler or a tracer is to see the operator."""
    return bool(
        ((inputs.requires_grad or weight.requires_grad) and torch.is_grad_enabled())
        or type(inputs) is not torch.Tensor
        or type(weight) not in (torch.Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
        or torch._C._get_tracing_state() is not None
    )


def _compute(
    name: str,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """The operators' implementation: the plan for a shape, which its first call makes."""
    device = inputs.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _compute(name, inputs, weight, stride, padding, dilation, groups)
    of_inputs = (inputs.shape, inputs.stride(), inputs.dtype, device, _tf32(name, inputs))
    of_weight = (weight.shape, weight.stride(), weight.dtype, weight.device)
    key = (name, *of_inputs, *of_weight, *stride, *padding, *dilation, groups)
    plan = _plans.get(key)
    if plan is None:
        plan = _chosen(
            key, inputs, weight, plans(name, inputs, weight, _convolution(weight, stride, padding, dilation, groups))
        )
    return plan(inputs, weight)


def _chosen(key: Any, inputs: torch.Tensor, weight: torch.Tensor, found: Sequence[Plan]) -> Plan:
    """Of several plans the fastest, unless results are to be the same in every process; then, the first."""
    plan = found[0]
    if inputs.device.type == "cuda" and len(found) > 1 and not torch.are_deterministic_algorithms_enabled():
        if torch.cuda.is_current_stream_capturing():
            return plan  # nothing can be timed now
        plan = fastest(found, inputs, weight)
    _plans[key] = plan
    return plan


def _tf32(name: str, inputs: torch.Tensor) -> bool:
    return name == "winograd" and inputs.dtype == torch.float32 and torch.backends.cudnn.allow_tf32


def _convolution(
    weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Convolution:
    out_channels, in_group, kernel_height, kernel_width = weight.shape
    left, right, top, bottom = padding
    return Convolution(
        in_channels=in_group * groups,
        out_channels=out_channels,
        kernel=(kernel_height, kernel_width),
        stride=(stride[0], stride[1]),
        padding=(left, right, top, bottom),
        dilation=(dilation[0], dilation[1]),
        groups=groups,
    )


def _outputs(
    inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution, device: torch.device
) -> torch.Tensor:
    """Uninitialised outputs, in the memory format of the inputs."""
    shape = (inputs.shape[0], weight.shape[0], *convolution.output_size(*inputs.shape[2:]))
    layout = torch.channels_last if is_channels_last(inputs.shape, inputs.stride()) else torch.contiguous_format
    return torch.empty(shape, dtype=inputs.dtype, device=device, memory_format=layout)


def _fake(inputs: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
    """What the operators return, without numbers."""
    convolution = _convolution(weight, *settings)
    reason = misfit(convolution, inputs.shape)
    if reason is not None:
        raise ValueError(f"This convolution can't be computed: {reason}.")
    return _outputs(inputs, weight, convolution, inputs.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """What the backward pass needs; torch gives the arguments by name."""
    of_inputs, weight, *ctx.settings = inputs
    ctx.save_for_backward(of_inputs, weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Torch's own gradients of a convolution, which has no padding of four sides: the inputs get theirs before."""
    inputs, weight = ctx.saved_tensors
    stride, (left, right, top, bottom), dilation, groups = ctx.settings
    even = left == right and top == bottom
    of_inputs, of_weight, _ = torch.ops.aten.convolution_backward(
        *(gradient, inputs if even else pad(inputs, (left, right, top, bottom)), weight, None, stride),
        *((top, left) if even else (0, 0), dilation, False, (0, 0), groups, (*ctx.needs_input_grad[:2], False)),
    )
    if of_inputs is not None and not even:
        of_inputs = of_inputs.narrow(2, top, inputs.shape[2]).narrow(3, left, inputs.shape[3])
    return of_inputs, of_weight, None, None, None, None


def _version() -> tuple[int, ...]:
    try:
        return tuple(map(int, metadata.version("triton").split(".")[:2]))
    except (metadata.PackageNotFoundError, ValueError):
        return ()


def _defined(name: str) -> Any:
    """The operator of a name, for any device, compiler and autograd."""
    operator = f"triton_{name}"
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _library.define(operator + _SCHEMA, tags=tags)  # type: ignore[no-untyped-call]
    _library.impl(operator, partial(_compute, name), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"perfexp::{operator}", _fake, lib=_library)
    torch.library.register_autograd(f"perfexp::{operator}", _backward, setup_context=_keep, lib=_library)
    return getattr(torch.ops.perfexp, operator).default


_library = torch.library.Library("perfexp", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPERATORS = {name: _defined(name) for name in ("direct", "winograd")}
