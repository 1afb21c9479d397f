"""Convolution algorithms as Triton kernels for NVIDIA GPUs.

`direct` sums products in registers by the definition, without im2col or a matrix product. `winograd` is F(2 × 2, 3 × 3)
in one kernel after a kernel that transforms the weights. Triton is imported with the first computation.
Inputs are (N, C, H, W) in any memory format, weights (O, C / G, kernel height, kernel width) of the same data type.
Results are (N, O, height, width) in the inputs' data type, and channels last if the inputs are.
"""

from __future__ import annotations

import torch

from perfexp.convolutions.convolution import Convolution
from perfexp.convolutions.portable import ALGORITHMS
from perfexp.kernels.tile_choice import available, compute

__all__ = ["available", "direct", "why_not_direct", "why_not_winograd", "winograd"]

#: Why a kernel cannot compute a convolution of a data type, or None: the limits of the algorithms in torch operations.
why_not_direct = ALGORITHMS["direct"].supports
why_not_winograd = ALGORITHMS["winograd"].supports


def direct(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Sums of products in float32, or float64; weights are rearranged in every call."""
    return compute("direct", inputs, weight, convolution)


def winograd(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """F(2 × 2, 3 × 3) of stride 1, with TF32 products where cuDNN may use TF32; weights are transformed per call.

    Half precisions are transformed in float32 and multiplied in half precision by tensor cores.
    """
    return compute("winograd", inputs, weight, convolution)
