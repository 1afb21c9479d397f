"""The direct algorithm: the definition of a convolution, multiplied and added."""

from __future__ import annotations

import torch

from perfexp.convolutions.convolution import Convolution, wide

#: Maximum number of products in memory, unless one channel alone has more: they stay in the CPU's cache.
_PRODUCTS = 2**20


def direct(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Sum, over the kernel's positions and blocks of channels, shifted inputs times weights.

    Elementwise products, broadcast over the output channels, and sums: an einsum or a matmul would be a GEMM in
    disguise. Nothing is gathered: each kernel position reads a strided view of the inputs. Half precisions are
    multiplied in float32, and the result has the data type of the sums.
    """
    rows, columns = convolution.output_size(*inputs.shape[2:])
    dtype, groups, in_group = wide(inputs.dtype), convolution.groups, convolution.in_group
    grouped = torch.unflatten(convolution.padded(inputs).to(dtype), 1, (groups, 1, in_group))
    kernels = torch.unflatten(weight.to(dtype), 0, (groups, convolution.out_group))[None]
    block = max(1, _PRODUCTS // max(1, inputs.shape[0] * convolution.out_channels * rows * columns))
    (down, across), (high, wide_) = convolution.stride, convolution.dilation
    total: torch.Tensor | None = None
    for row, column in convolution.positions:
        top, left = row * high, column * wide_
        seen = grouped[..., top : top + (rows - 1) * down + 1 : down, left : left + (columns - 1) * across + 1 : across]
        factors = kernels[..., row, column, None, None]
        for first in range(0, in_group, block):
            channels = slice(first, first + block)
            part = (seen[:, :, :, channels] * factors[:, :, :, channels]).sum(3)
            total = part if total is None else total.add_(part)
    assert total is not None
    return total.flatten(1, 2)
