"""Pass: the three convolutions of one layer, and what is asked of a backend before it computes them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from perfexp.algorithms.convolution import Convolution


class Pass(StrEnum):
    """The outputs, the gradient of the inputs, the gradient of the weights."""

    forward = "forward"
    backward_data = "backward_data"
    backward_filter = "backward_filter"


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
