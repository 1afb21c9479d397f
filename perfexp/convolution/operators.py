"""Operators: how torch's autograd, compiler and graphs call an engine (see `engines`).

`torch.ops.perfexp.convolution` takes inputs (N, C, H, W), weights (O, C / G, kernel height, kernel
width), five settings and an engine for each pass. It returns (N, O, height, width). Two more
operators compute the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

from perfexp.convolution import kernels
from perfexp.convolution.convolution_plan import Shape, plan
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import math_of
from perfexp.convolution.portable.geometry import Convolution, Pair

DEFAULT, BENCHMARK = "default", "benchmark"
CUDNN, TRITON = "cudnn", "triton"

#: Triton kernels by engine.
_KERNELS = {f"{TRITON}.{name}": kernel for name, kernel in kernels.ALGORITHMS.items()}


class ConvolutionSettings(NamedTuple):
    """How a convolution moves over its inputs, and the result's memory format.

    The padding is the same on both sides. Pairs are (down, across).
    """

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    channels_last: bool

    @classmethod
    def of(
        cls, stride: Any, padding: Any, dilation: Any, groups: int, channels_last: bool, *_: str
    ) -> ConvolutionSettings:
        """Build settings from an operator's arguments: lists, then engines."""
        return cls(tuple(stride), tuple(padding), tuple(dilation), groups, channels_last)

    @property
    def layout(self) -> torch.memory_format:
        """Return the result's memory format."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def convolution(self, weight: torch.Tensor) -> Convolution:
        """Return the convolution with these weights."""
        return Convolution.of(weight.shape, *self[:4])

    def shape(
        self, inputs: Sequence[int], weight: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Shape:
        """Return the cuDNN plan shape for inputs and weights of these shapes."""
        moves, device_index = self[:4], device.index or 0
        storage = dtype, self.channels_last, math_of(dtype), device_index
        return Shape(tuple(inputs), tuple(weight), *moves, *storage)


@contextmanager
def _search_setting(engine: str) -> Iterator[None]:
    """Enable torch's search for the fastest algorithm while entered, for the engine `benchmark`."""
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(before or engine == BENCHMARK)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)


def _convolution(inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return the outputs by the forward engine.

    `arguments` are five settings, then three engines.
    """
    settings, forward = ConvolutionSettings.of(*arguments), arguments[5]
    if forward in _KERNELS:
        inputs = inputs.contiguous(memory_format=settings.layout)
        return _KERNELS[forward](inputs, weight, settings.convolution(weight))
    if forward.startswith(CUDNN):
        shape = settings.shape(inputs.shape, weight.shape, inputs.dtype, inputs.device)
        return _run_cudnn(Pass.forward, forward, shape, inputs, weight)
    with _search_setting(forward):
        return conv2d(inputs, weight, None, *settings[:4]).contiguous(memory_format=settings.layout)


def _gradient(
    pass_type: Pass, grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any
) -> torch.Tensor:
    """Return the gradient of the inputs or of the weights by an engine.

    Args:
        pass_type: the backward pass.
        grad: gradient of the outputs, (N, O, height, width).
        arguments: five settings, then the engine.
    """
    settings, engine = ConvolutionSettings.of(*arguments), arguments[5]
    of_inputs = pass_type is Pass.backward_data
    if engine in _KERNELS:
        turned = turned_around(settings.convolution(weight))
        assert turned is not None
        grad = grad.contiguous(memory_format=settings.layout)
        return _KERNELS[engine](grad, _turned_weight(weight, settings.groups), turned)
    if engine.startswith(CUDNN):
        shape = settings.shape(inputs.shape, weight.shape, grad.dtype, grad.device)
        return _run_cudnn(pass_type, engine, shape, weight if of_inputs else inputs, grad)
    *moves, groups, _ = settings
    output_mask = [of_inputs, not of_inputs, False]
    with _search_setting(engine):
        gradients = torch.ops.aten.convolution_backward(
            grad, inputs, weight, None, *moves, False, [0, 0], groups, output_mask
        )
    gradient: torch.Tensor = gradients[0 if of_inputs else 1]
    return gradient.contiguous(memory_format=settings.layout)


def _run_cudnn(pass_type: Pass, engine: str, shape: Shape, *reads: torch.Tensor) -> torch.Tensor:
    """Return a pass's result by a cuDNN plan.

    Args:
        reads: the two tensors that the pass reads, in cuDNN's order.
    """
    layout = torch.channels_last if shape.channels_last else torch.contiguous_format
    first, second = (tensor.contiguous(memory_format=layout) for tensor in reads)
    return plan(pass_type, engine.removeprefix(f"{CUDNN}."), shape)(first, second)


def turned_around(convolution: Convolution) -> Convolution | None:
    """Return the convolution that maps output gradients to input gradients; None if none does.

    With stride 1 it is a convolution with rotated weights, for which a forward kernel suffices.
    Triton kernels compute input gradients this way.
    """
    if convolution.stride != (1, 1):
        return None
    reach = [d * (k - 1) for d, k in zip(convolution.dilation, convolution.kernel, strict=True)]
    left, right, top, bottom = convolution.padding
    padding = (reach[1] - left, reach[1] - right, reach[0] - top, reach[0] - bottom)
    if min(padding) < 0:
        return None
    inputs, outputs = convolution.in_channels, convolution.out_channels
    return replace(convolution, in_channels=outputs, out_channels=inputs, padding=padding)


def _turned_weight(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return weights rotated by 180°, with each group's channels transposed.

    The result's shape is (C, O / G, kernel height, kernel width).
    """
    grouped = torch.unflatten(weight.flip(2, 3), 0, (groups, -1))
    return grouped.transpose(1, 2).flatten(0, 1).contiguous()


def _fake(inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return an empty tensor like the outputs, for compilers and tracing."""
    settings = ConvolutionSettings.of(*arguments)
    size = settings.convolution(weight).output_size(*inputs.shape[-2:])
    return _empty(inputs, (inputs.shape[0], weight.shape[0], *size), settings)


def _fake_gradient(
    pass_type: Pass, grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any
) -> torch.Tensor:
    """Return an empty tensor like the gradient, for compilers and tracing."""
    like = inputs if pass_type is Pass.backward_data else weight
    return _empty(grad, like.shape, ConvolutionSettings.of(*arguments))


def _empty(like: torch.Tensor, shape: Sequence[int], settings: ConvolutionSettings) -> torch.Tensor:
    """Return an empty tensor with `like`'s data type and device, in the settings' layout."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=settings.layout)


class _Differentiable(torch.autograd.Function):
    """The operator's autograd; `torch.library.register_autograd` costs ten times the host time."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any
    ) -> torch.Tensor:
        """Return the outputs, and keep what the gradients need."""
        ctx.save_for_backward(inputs, weight)
        *ctx.settings, _, ctx.data, ctx.filter = arguments
        return _without_autograd(inputs, weight, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients for the inputs and the weight, from the chosen engines."""
        inputs, weight = ctx.saved_tensors
        inputs_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            inputs_grad = torch.ops.perfexp.convolution_backward_data(
                grad, inputs, weight, *ctx.settings, ctx.data
            )
        if ctx.needs_input_grad[1]:
            weight_grad = torch.ops.perfexp.convolution_backward_filter(
                grad, inputs, weight, *ctx.settings, ctx.filter
            )
        # five settings and three engines have no gradient
        return inputs_grad, weight_grad, *[None] * 8


def _without_autograd(*arguments: Any) -> torch.Tensor:
    """Return the operator's outputs without recording them for autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        outputs: torch.Tensor = torch.ops.perfexp.convolution(*arguments)
    return outputs


def _with_autograd(inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return the operator's outputs, recorded for autograd if a gradient is required.

    It is registered with the operator for tensors that autograd tracks.
    """
    if torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad):
        apply: Any = _Differentiable.apply
        outputs: torch.Tensor = apply(inputs, weight, *arguments)
        return outputs
    return _without_autograd(inputs, weight, *arguments)


_TENSORS = "Tensor input, Tensor weight"
_ENGINES = "str forward, str backward_data, str backward_filter"
_SETTINGS = "int[] stride, int[] padding, int[] dilation, int groups, bool channels_last"
_BACKWARD = f"Tensor grad, {_TENSORS}, {_SETTINGS}, str engine"
_library = torch.library.Library("perfexp", "FRAGMENT")


def _define(name: str, arguments: str, compute: Any, fake: Any) -> None:
    """Add an operator `perfexp::name`; `fake` makes an empty result while a compiler traces."""
    _library.define(f"{name}({arguments}) -> Tensor")
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"perfexp::{name}", fake, lib=_library)


_define("convolution", f"{_TENSORS}, {_SETTINGS}, {_ENGINES}", _convolution, _fake)
for _which in (Pass.backward_data, Pass.backward_filter):
    _gradients = partial(_gradient, _which), partial(_fake_gradient, _which)
    _define(f"convolution_{_which}", _BACKWARD, *_gradients)
_library.impl("convolution", _with_autograd, "Autograd")
