"""Engines: implementations of a convolution pass, and how torch calls them.

An engine is a word:

* `default` and `benchmark`: torch's own choice and its search.
* `cudnn.NAME`: a cuDNN algorithm, for example `cudnn.gemm`.
* `triton.direct`, `triton.winograd`: perfexp's kernels.
* `torch.NAME`: an algorithm in torch operations, which autograd differentiates itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from perfexp.convolution import convolution_plan
from perfexp.convolution.convolution_plan import ConvolutionPlan, Shape
from perfexp.convolution.coverage import Pass
from perfexp.convolution.operators import CUDNN, DEFAULT, ConvolutionSettings
from perfexp.convolution.portable.algorithms import ALGORITHMS, as_torch_does, is_channels_last
from perfexp.convolution.portable.geometry import Convolution
from perfexp.convolution.problem import Problem

SEARCH, TORCH = "search", "torch"

#: Engines that are torch's unmodified `conv2d`; the last three name whole-model settings.
OF_TORCH = (DEFAULT, SEARCH, "onednn", "native")


@dataclass(frozen=True, slots=True)
class Engines:
    """The engine for each pass of a convolution."""

    forward: str = DEFAULT
    backward_data: str = DEFAULT
    backward_filter: str = DEFAULT

    def compute(
        self,
        convolution: Convolution,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute as `torch.nn.functional.conv2d` would, with its memory format and autocast casts.

        Args:
            inputs: (N, C, H, W) or (C, H, W).
            weight: (O, C / G, kernel height, kernel width).
            bias: (O,), or None.

        Returns:
            (N, O, height, width), or (O, height, width) for inputs without a batch.
        """
        backend, _, name = self.forward.partition(".")
        compute = ALGORITHMS[name].compute if backend == TORCH else self._operator
        return as_torch_does(compute, convolution, inputs, weight, bias)

    def _operator(
        self, inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
    ) -> torch.Tensor:
        """Return the outputs of `torch.ops.perfexp.convolution`, which runs each pass's engine.

        Asymmetric padding is applied to the inputs first.
        """
        left, right, top, bottom = convolution.padding
        padding = (top, left)
        if padding != (bottom, right):
            inputs, padding = convolution.padded(inputs), (0, 0)
        last = any(is_channels_last(tensor.shape, tensor.stride()) for tensor in (inputs, weight))
        settings = (convolution.stride, padding, convolution.dilation, convolution.groups, last)
        engines = (self.forward, self.backward_data, self.backward_filter)
        outputs: torch.Tensor = torch.ops.perfexp.convolution(inputs, weight, *settings, *engines)
        return outputs


def shape_of(problem: Problem) -> Shape:
    """Return the cuDNN plan shape for a problem on an NVIDIA GPU."""
    even = problem.even()
    settings = ConvolutionSettings(*even.settings, even.channels_last)
    return settings.shape(even.shape, even.convolution.weight_shape, even.dtype, even.device)


class Direct:
    """A convolution by cuDNN alone that bypasses torch's dispatcher, for eager calls.

    There is one plan per pass.
    """

    def __init__(self, plans: dict[Pass, ConvolutionPlan], layout: torch.memory_format) -> None:
        self.forward = plans[Pass.forward]
        self.plans, self.layout = plans, layout

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the outputs for dense inputs and weights.

        They are differentiable if there are plans for backward passes.
        """
        if len(self.plans) == 1:
            return self.forward(inputs, weight)
        outputs: torch.Tensor = _Direct.apply(inputs, weight, self)  # type: ignore[no-untyped-call]
        return outputs


class _Direct(torch.autograd.Function):
    """Autograd for `Direct`: the backward passes run their own cuDNN plans."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, direct: Direct
    ) -> torch.Tensor:
        """Return the outputs, and keep inputs and weights for the gradients."""
        ctx.save_for_backward(inputs, weight)
        ctx.direct = direct
        return direct.forward(inputs, weight)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the gradients of inputs and weights, None for one that is not needed."""
        inputs, weight = ctx.saved_tensors
        grad, plans = grad.contiguous(memory_format=ctx.direct.layout), ctx.direct.plans
        of_inputs = plans[Pass.backward_data](weight, grad) if ctx.needs_input_grad[0] else None
        of_weight = plans[Pass.backward_filter](inputs, grad) if ctx.needs_input_grad[1] else None
        return of_inputs, of_weight, None


def direct(engines: Engines, problem: Problem) -> Direct | None:
    """Return a problem's implementation that bypasses torch's dispatcher.

    The dispatcher costs host time in each call.

    Returns:
        None unless cuDNN computes all passes and the padding is symmetric.
    """
    if problem.even() is not problem:
        return None
    plans: dict[Pass, ConvolutionPlan] = {}
    for pass_type in problem.passes:
        plan = plan_of(pass_type, getattr(engines, pass_type), problem)
        if plan is None:
            return None
        plans[pass_type] = plan
    return Direct(plans, problem.layout)


def plan_of(pass_type: Pass, engine: str, problem: Problem) -> ConvolutionPlan | None:
    """Return the cuDNN plan behind an engine for one pass; None for other engines.

    Raises `CudnnError` if cuDNN refuses.
    """
    backend, _, name = engine.partition(".")
    if backend != CUDNN:
        return None
    return convolution_plan.plan(pass_type, name, shape_of(problem))
