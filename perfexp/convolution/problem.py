"""Problems: a convolution together with input shape, data type, device and memory format.

Backends decide by problem, and races and plans are cached by problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from perfexp.convolution.coverage import Pass
from perfexp.convolution.portable.geometry import Convolution, Pair


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A convolution with everything that affects how it can be computed.

    Attributes:
        shape: input shape, (N, C, H, W).
        dtype: data type after autocast.
        channels_last: whether the result is stored as NHWC.
        passes: passes that run: forward, and the gradients that autograd needs.
    """

    convolution: Convolution
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    channels_last: bool = False
    passes: tuple[Pass, ...] = (Pass.forward,)

    @property
    def outputs(self) -> tuple[int, int, int, int]:
        """Return the output shape, (N, O, height, width)."""
        batch, _, height, width = self.shape
        size = self.convolution.output_size(height, width)
        return (batch, self.convolution.out_channels, *size)

    @property
    def layout(self) -> torch.memory_format:
        """Return the result's memory format."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def settings(self) -> tuple[Pair, Pair, Pair, int]:
        """Return stride, symmetric padding, dilation (down, across) and groups, in torch's form."""
        convolution = self.convolution
        left, _, top, _ = convolution.padding
        return convolution.stride, (top, left), convolution.dilation, convolution.groups

    def reads(self, pass_type: Pass) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the two tensors that a pass reads, in cuDNN's order.

        They are inputs and weights for the outputs, weights and output gradient for the input
        gradient, inputs and output gradient for the weight gradient.
        """
        weight = self.convolution.weight_shape
        return {
            Pass.forward: (self.shape, weight),
            Pass.backward_data: (weight, self.outputs),
            Pass.backward_filter: (self.shape, self.outputs),
        }[pass_type]

    def empty(self, shape: Sequence[int]) -> torch.Tensor:
        """Return an uninitialized tensor with the problem's data type, device and memory format."""
        return torch.empty(
            tuple(shape), dtype=self.dtype, device=self.device, memory_format=self.layout
        )

    def even(self) -> Problem:
        """Return the same problem with symmetric padding, because cuDNN takes no other.

        Asymmetric padding counts as already applied to the inputs.
        """
        left, right, top, bottom = self.convolution.padding
        if (left, top) == (right, bottom):
            return self
        batch, channels, height, width = self.shape
        return replace(
            self,
            convolution=replace(self.convolution, padding=(0, 0, 0, 0)),
            shape=(batch, channels, height + top + bottom, width + left + right),
        )
