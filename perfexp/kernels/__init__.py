"""Triton: convolution algorithms that cuDNN has no kernels for, as kernels of our own for NVIDIA's GPUs.

`direct` is the definition: products, added up in registers; neither im2col nor a product of matrices. `winograd` is
F(2 × 2, 3 × 3) in one kernel after one that transforms the weights. Triton is imported with the first computation.
"""

from __future__ import annotations

import torch

from perfexp.convolutions.convolution import Convolution
from perfexp.convolutions.portable import ALGORITHMS
from perfexp.kernels.tile_choice import available, compute

__all__ = ["available", "direct", "why_not_direct", "why_not_winograd", "winograd"]

#: Why a kernel can't compute a convolution of a data type, in a few words, or None: the same as the portable ones.
why_not_direct = ALGORITHMS["direct"].supports
why_not_winograd = ALGORITHMS["winograd"].supports


def direct(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Sums of products in float32, or float64; weights are rearranged in every call.

    Args:
        inputs: (N, C, H, W), in any memory format.
        weight: (O, C / G, kernel height, kernel width), of the same data type.
        convolution: what to compute.

    Returns:
        (N, O, height, width), in the inputs' data type; channels last if theirs are.
    """
    return compute("direct", inputs, weight, convolution)


def winograd(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """F(2 × 2, 3 × 3), products of TF32 where cuDNN may use it; weights are transformed in every call.

    Half precisions are transformed in float32 and multiplied as they are, by tensor cores.

    Args:
        inputs: (N, C, H, W), in any memory format.
        weight: (O, C / G, 3, 3), of the same data type.
        convolution: of stride and dilation 1.

    Returns:
        (N, O, height, width), in the inputs' data type; channels last if theirs are.
    """
    return compute("winograd", inputs, weight, convolution)
