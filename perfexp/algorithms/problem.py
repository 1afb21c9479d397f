"""Problem: what is asked of a backend before it computes a convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from perfexp.algorithms.passes import Pass
from perfexp.convolutions.convolution import Convolution


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A convolution with everything that decides whether and how it can be computed.

    Attributes:
        convolution: what to compute.
        shape: of the inputs, (N, C, H, W).
        dtype: in which it is computed, as autocast leaves it.
        device: where.
        channels_last: whether the result lies in memory as NHWC.
        passes: those that will run.
    """

    convolution: Convolution
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    channels_last: bool = False
    passes: tuple[Pass, ...] = (Pass.forward,)

    @property
    def outputs(self) -> tuple[int, int, int, int]:
        """(N, O, height, width)."""
        return (self.shape[0], self.convolution.out_channels, *self.convolution.output_size(*self.shape[-2:]))

    @property
    def layout(self) -> torch.memory_format:
        """How the result lies in memory."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def reads(self, which: Pass) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two tensors that a pass reads, in the order in which cuDNN takes them.

        Args:
            which: pass.
        """
        weight = self.convolution.weight_shape
        return {
            Pass.forward: (self.shape, weight),
            Pass.backward_data: (weight, self.outputs),
            Pass.backward_filter: (self.shape, self.outputs),
        }[which]

    def even(self) -> Problem:
        """The same problem with as many zeros on both sides; where they differ, the inputs have them already."""
        left, right, top, bottom = self.convolution.padding
        if (left, top) == (right, bottom):
            return self
        batch, channels, height, width = self.shape
        return replace(
            self,
            convolution=replace(self.convolution, padding=(0, 0, 0, 0)),
            shape=(batch, channels, height + top + bottom, width + left + right),
        )
