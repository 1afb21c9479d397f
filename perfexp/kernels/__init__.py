"""Convolution algorithms as Triton kernels for NVIDIA GPUs.

`direct` sums products in registers by the definition, in float32 or float64, without im2col or a matrix product.
`winograd` is F(2 × 2, 3 × 3) of stride 1, with TF32 products where cuDNN may use TF32; half precisions are transformed
in float32 and multiplied in half precision by tensor cores. Both rearrange or transform the weights in every call.
Triton is imported with the first computation.
Inputs are (N, C, H, W) in any memory format, weights (O, C / G, kernel height, kernel width) of the same data type.
Results are (N, O, height, width) in the inputs' data type, and channels last if the inputs are.
"""

from __future__ import annotations

from functools import partial

from perfexp.kernels.tile_choice import available, compute

__all__ = ["available", "direct", "winograd"]

direct = partial(compute, "direct")
winograd = partial(compute, "winograd")
