"""Convolutions as matrix products, which differ in how they copy the inputs.

Inputs are (N, C, H, W), weights (O, C / G, kernel height, kernel width), outputs (N, O, height,
width).
"""

from __future__ import annotations

import torch
from torch.nn.functional import unfold

from perfexp.convolution.portable.geometry import Convolution, constant, wide


def gemm(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Compute by explicit im2col and a single product.

    See Chellapilla et al., "High Performance Convolutional Neural Networks", 2006.
    """
    size = convolution.output_size(*inputs.shape[2:])
    padded = convolution.padded(inputs)
    columns = unfold(
        padded, convolution.kernel, dilation=convolution.dilation, stride=convolution.stride
    )
    return torch.unflatten(_product(weight.flatten(1), columns, convolution), 2, size)


def implicit_gemm(
    inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Compute by kn2row: sum shifted 1 × 1 convolutions of the image, one per kernel position.

    This is the accumulating form, without im2col, of Vasudevan, Anderson and Gregg, "Parallel Multi
    Channel Convolution using General Matrix Multiplication", 2017. With a stride s, the image is
    first split into the s² sub-images that a kernel position can fall on. So skipped pixels are not
    computed. The result has the accumulator's data type.
    """
    rows, columns = convolution.output_size(*inputs.shape[2:])
    padded = convolution.padded(inputs)
    (down, across), dtype = convolution.stride, wide(inputs.dtype)
    parts: dict[tuple[int, int], torch.Tensor] = {}
    total: torch.Tensor | None = None
    for row, column in convolution.positions:
        y, x = row * convolution.dilation[0], column * convolution.dilation[1]
        phase = (y % down, x % across)
        if phase not in parts:
            parts[phase] = padded[:, :, phase[0] :: down, phase[1] :: across]
        image = parts[phase]
        product = _product(weight[:, :, row, column], image.flatten(2), convolution)
        product = torch.unflatten(product, 2, image.shape[2:])
        top, left = y // down, x // across
        shifted = product[:, :, top : top + rows, left : left + columns]
        total = shifted.to(dtype, copy=True) if total is None else total.add_(shifted)
    assert total is not None
    return total


def implicit_precomp_gemm(
    inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Gather by indices that are cached per input size, then compute a single product."""
    rows, columns = convolution.output_size(*inputs.shape[2:])
    padded = convolution.padded(inputs)
    width, device = padded.shape[3], padded.device
    key = ("indices", convolution, rows, columns, width, device)
    indices = constant(key, lambda: _indices(convolution, rows, columns, width, device))
    gathered = padded.flatten(2).index_select(2, indices).flatten(1)
    taps = convolution.kernel[0] * convolution.kernel[1]
    matrix = gathered.reshape(inputs.shape[0], convolution.in_channels * taps, rows * columns)
    return torch.unflatten(_product(weight.flatten(1), matrix, convolution), 2, (rows, columns))


def _indices(
    convolution: Convolution, rows: int, columns: int, width: int, device: torch.device
) -> torch.Tensor:
    """Return the indices into a flattened image that each kernel position reads.

    The shape is (positions · rows · columns,).
    """
    axes = [
        torch.arange(taps, device=device)[:, None] * spread
        + torch.arange(count, device=device) * step
        for taps, spread, count, step in zip(
            convolution.kernel,
            convolution.dilation,
            (rows, columns),
            convolution.stride,
            strict=True,
        )
    ]
    return (axes[0][:, None, :, None] * width + axes[1][None, :, None, :]).flatten()


def _product(weight: torch.Tensor, columns: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Multiply weights (O, K / G) by columns (N, K, L), group by group, to (N, O, L)."""
    groups = convolution.groups
    if groups == 1:
        return weight @ columns
    grouped = torch.unflatten(columns, 1, (groups, columns.shape[1] // groups))
    return (torch.unflatten(weight, 0, (groups, convolution.out_group)) @ grouped).flatten(1, 2)
