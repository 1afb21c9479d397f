"""Operators by which torch's autograd, compiler and graphs call an engine (see `perfexp.algorithms.engines`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import conv2d

from perfexp import kernels
from perfexp.algorithms.codes import math_of
from perfexp.algorithms.convolution_plan import Shape, plan
from perfexp.algorithms.passes import Pass
from perfexp.convolutions.convolution import Convolution, Pair
from perfexp.convolutions.portable import Compute

DEFAULT, BENCHMARK = "default", "benchmark"
CUDNN, TRITON = "cudnn", "triton"

#: Triton kernels by engine.
_KERNELS: dict[str, Compute] = {f"{TRITON}.direct": kernels.direct, f"{TRITON}.winograd": kernels.winograd}


def _run(
    which: Pass, engine: str, first: torch.Tensor, second: torch.Tensor, inputs: Sequence[int], weight: Sequence[int],
    settings: tuple[Pair, Pair, Pair, int, bool],
) -> torch.Tensor:  # fmt: skip
    stride, padding, dilation, groups, channels_last = settings
    shape = Shape(
        tuple(inputs), tuple(weight), stride, padding, dilation, groups, first.dtype, channels_last,
        math_of(first.dtype), first.device.index or 0,
    )  # fmt: skip
    layout = torch.channels_last if channels_last else torch.contiguous_format
    first, second = first.contiguous(memory_format=layout), second.contiguous(memory_format=layout)
    return plan(which, engine.removeprefix(f"{CUDNN}."), shape)(first, second)


@contextmanager
def _searching(engine: str) -> Iterator[None]:
    """While entered, torch searches for its fastest algorithm if the engine is `benchmark`."""
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(before or engine == BENCHMARK)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)


_SETTINGS = "int[] stride, int[] padding, int[] dilation, int groups, bool channels_last"
_library = torch.library.Library("perfexp", "FRAGMENT")  # type: ignore[no-untyped-call]
_ENGINES = "str forward, str backward_data, str backward_filter"
_library.define(  # type: ignore[no-untyped-call]
    f"convolution(Tensor input, Tensor weight, {_SETTINGS}, {_ENGINES}) -> Tensor"
)
for _name in ("backward_data", "backward_filter"):
    _arguments = f"Tensor grad, Tensor input, Tensor weight, {_SETTINGS}, str engine"
    _library.define(f"convolution_{_name}({_arguments}) -> Tensor")  # type: ignore[no-untyped-call]


def _settings(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int, channels_last: bool
) -> tuple[Pair, Pair, Pair, int, bool]:
    return (stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]), groups, channels_last


def _convolution(
    inputs: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, channels_last: bool, forward: str, backward_data: str, backward_filter: str,
) -> torch.Tensor:  # fmt: skip
    if forward in _KERNELS:
        convolution = Convolution.of(weight.shape, stride, padding, dilation, groups)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return _KERNELS[forward](inputs.contiguous(memory_format=layout), weight, convolution)
    if forward.startswith(CUDNN):
        settings = _settings(stride, padding, dilation, groups, channels_last)
        return _run(Pass.forward, forward, inputs, weight, inputs.shape, weight.shape, settings)
    with _searching(forward):
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return conv2d(inputs, weight, None, stride, padding, dilation, groups).contiguous(memory_format=layout)


def _backward_data(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, channels_last: bool, engine: str,
) -> torch.Tensor:  # fmt: skip
    if engine in _KERNELS:
        turned = turned_around(Convolution.of(weight.shape, stride, padding, dilation, groups))
        assert turned is not None
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return _KERNELS[engine](grad.contiguous(memory_format=layout), _turned_weight(weight, groups), turned)
    if engine.startswith(CUDNN):
        settings = _settings(stride, padding, dilation, groups, channels_last)
        return _run(Pass.backward_data, engine, weight, grad, inputs.shape, weight.shape, settings)
    return _of_torch(engine, (True, False), grad, inputs, weight, stride, padding, dilation, groups, channels_last)


def _backward_filter(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, channels_last: bool, engine: str,
) -> torch.Tensor:  # fmt: skip
    if engine.startswith(CUDNN):
        settings = _settings(stride, padding, dilation, groups, channels_last)
        return _run(Pass.backward_filter, engine, inputs, grad, inputs.shape, weight.shape, settings)
    return _of_torch(engine, (False, True), grad, inputs, weight, stride, padding, dilation, groups, channels_last)


def _of_torch(
    engine: str, wanted: tuple[bool, bool], grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, channels_last: bool,
) -> torch.Tensor:  # fmt: skip
    with _searching(engine):
        both = torch.ops.aten.convolution_backward(
            grad, inputs, weight, None, stride, padding, dilation, False, [0, 0], groups, [*wanted, False]
        )
    gradient: torch.Tensor = both[0 if wanted[0] else 1]
    return gradient.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def turned_around(convolution: Convolution) -> Convolution | None:
    """The convolution that turns the outputs' gradient into the inputs' gradient; None if there is none."""
    if convolution.stride != (1, 1):
        return None
    reach = [d * (k - 1) for d, k in zip(convolution.dilation, convolution.kernel, strict=True)]
    left, right, top, bottom = convolution.padding
    padding = (reach[1] - left, reach[1] - right, reach[0] - top, reach[0] - bottom)
    if min(padding) < 0:
        return None
    return Convolution(
        in_channels=convolution.out_channels,
        out_channels=convolution.in_channels,
        kernel=convolution.kernel,
        padding=padding,
        dilation=convolution.dilation,
        groups=convolution.groups,
    )


def _turned_weight(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Weights rotated by 180° with each group's channels transposed: (C, O / G, kernel height, kernel width)."""
    grouped = torch.unflatten(weight.flip(2, 3), 0, (groups, -1))
    return grouped.transpose(1, 2).flatten(0, 1).contiguous()


def _fake(
    inputs: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, channels_last: bool, *engines: str,
) -> torch.Tensor:  # fmt: skip
    rows, columns = Convolution.of(weight.shape, stride, padding, dilation, groups).output_size(*inputs.shape[-2:])
    return _empty(inputs, (inputs.shape[0], weight.shape[0], rows, columns), channels_last)


def _fake_data(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
    return _empty(grad, inputs.shape, settings[4])


def _fake_filter(grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
    return _empty(grad, weight.shape, settings[4])


def _empty(like: torch.Tensor, shape: Sequence[int], channels_last: bool) -> torch.Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


class _Differentiable(torch.autograd.Function):
    """Autograd of the operator; `torch.library.register_autograd` costs ten times the host time per call."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        *ctx.settings, _, ctx.data, ctx.filter = arguments
        return _without_autograd(inputs, weight, *arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = torch.ops.perfexp.convolution_backward_data(grad, inputs, weight, *ctx.settings, ctx.data)
        if ctx.needs_input_grad[1]:
            of_weight = torch.ops.perfexp.convolution_backward_filter(grad, inputs, weight, *ctx.settings, ctx.filter)
        return of_inputs, of_weight, *[None] * 8


def _without_autograd(*arguments: Any) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        outputs: torch.Tensor = torch.ops.perfexp.convolution(*arguments)
    return outputs


def _with_autograd(inputs: torch.Tensor, weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad):
        outputs: torch.Tensor = _Differentiable.apply(inputs, weight, *arguments)  # type: ignore[no-untyped-call]
        return outputs
    return _without_autograd(inputs, weight, *arguments)


for _name, _real, _shaped in (
    ("convolution", _convolution, _fake),
    ("convolution_backward_data", _backward_data, _fake_data),
    ("convolution_backward_filter", _backward_filter, _fake_filter),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"perfexp::{_name}", _shaped, lib=_library)
_library.impl("convolution", _with_autograd, "Autograd")  # type: ignore[no-untyped-call]
