"""Engines: what computes one pass of one convolution, and the operator by which torch calls them.

An engine is a word: `default` and `benchmark` are torch's own choice and its own search, `cudnn.gemm` and the like are
cuDNN's algorithms, `triton.direct` and `triton.winograd` kernels of ours, `torch.gemm` and the like the algorithms in
torch's operations, through which autograd runs by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from perfexp.algorithms.codes import math_of
from perfexp.algorithms.convolution import Convolution
from perfexp.algorithms.operators import CUDNN, DEFAULT
from perfexp.algorithms.passes import Pass, Problem
from perfexp.algorithms.plan import Plan, Shape, plan
from perfexp.algorithms.portable import ALGORITHMS, as_torch_does, is_channels_last

SEARCH, TORCH = "search", "torch"

#: Passes by these are torch's `conv2d` as it stands; the last three say what torch has been told for the whole model.
OF_TORCH = (DEFAULT, SEARCH, "onednn", "native")


@dataclass(frozen=True, slots=True)
class Engines:
    """What computes each pass of a convolution.

    Attributes:
        forward: engine of the outputs.
        backward_data: of the gradient of the inputs.
        backward_filter: of the gradient of the weights.
    """

    forward: str = DEFAULT
    backward_data: str = DEFAULT
    backward_filter: str = DEFAULT

    def compute(
        self, convolution: Convolution, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute as `torch.nn.functional.conv2d` would: the memory format of its result, its casts under autocast.

        Args:
            convolution: one that the engines can compute.
            inputs: (N, C, H, W) or (C, H, W).
            weight: (O, C / G, kernel height, kernel width).
            bias: (O,), or None.
        """
        if self.forward.startswith(f"{TORCH}."):
            return ALGORITHMS[self.forward.removeprefix(f"{TORCH}.")].run(convolution, inputs, weight, bias)
        return as_torch_does(self._operator, convolution, inputs, weight, bias)

    def _operator(self, inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
        left, right, top, bottom = convolution.padding
        if (left, top) != (right, bottom):
            inputs, padding = pad(inputs, (left, right, top, bottom)), (0, 0)
        else:
            padding = (top, left)
        outputs: torch.Tensor = torch.ops.perfexp.convolution(
            inputs,
            weight,
            convolution.stride,
            padding,
            convolution.dilation,
            convolution.groups,
            any(is_channels_last(each.shape, each.stride()) for each in (inputs, weight)),
            self.forward,
            self.backward_data,
            self.backward_filter,
        )
        return outputs


def shape_of(problem: Problem) -> Shape:
    """What cuDNN's plans of a problem are for.

    Args:
        problem: on an NVIDIA GPU.
    """
    even = problem.even()
    convolution = even.convolution
    return Shape(
        even.shape,
        convolution.weight_shape,
        convolution.stride,
        (convolution.padding[2], convolution.padding[0]),
        convolution.dilation,
        convolution.groups,
        problem.dtype,
        problem.channels_last,
        math_of(problem.dtype),
        problem.device.index or 0,
    )


def forward_plan(engines: Engines, problem: Problem) -> Plan | None:
    """What computes the outputs if nothing but cuDNN has to, for calls that need no more of torch; else None.

    Args:
        engines: of the problem.
        problem: what to compute.
    """
    backend, _, name = engines.forward.partition(".")
    if backend != CUDNN or problem.even() is not problem:
        return None
    return plan(Pass.forward, name, shape_of(problem))
