"""Winograd's minimal filtering for 3 × 3 kernels.

See Lavin and Gray, "Fast Algorithms for …", CVPR 2016. Inputs are (N, C, H, W), weights (O, C / G,
3, 3). Outputs are (N, O, height, width) in the data type of the sums. Stride and dilation must be
1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt

import torch

from perfexp.convolution.portable.geometry import Convolution, constant, wide

#: Bᵀ, G and Aᵀ of F(2 × 2, 3 × 3); Lavin and Gray, section 4.1.
_F2 = (
    ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
    ((1, 1, 1, 0), (0, 1, -1, -1)),
)
#: Bᵀ, G and Aᵀ of F(4 × 4, 3 × 3); Lavin and Gray, section 4.3.
_F4 = (
    (
        (4, 0, -5, 0, 1, 0),
        (0, -4, -4, 1, 1, 0),
        (0, 4, -4, -1, 1, 0),
        (0, -2, -1, 2, 1, 0),
        (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
    (
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
    ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
)

#: A transform: from (rows, columns, …) to (rows, columns, …) with other lengths.
_Transform = Callable[[torch.Tensor], torch.Tensor]


def winograd(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Compute by F(2 × 2, 3 × 3): 16 multiplications instead of 36 for four outputs.

    Each transform takes one pass: both directions are a single product with the Kronecker product
    of the transform's matrix with itself.
    """
    transforms = [
        partial(_in_one_pass, _matrix("F2", rows, inputs, kronecker=True)) for rows in _F2
    ]
    return _filtered(inputs, weight, convolution, 2, transforms)


def winograd_nonfused(
    inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Compute by F(4 × 4, 3 × 3): 36 multiplications instead of 144 for 16 outputs.

    Each transform takes two stages. The transforms' constants make it less exact than F(2 × 2, 3 ×
    3).
    """
    transforms = [
        partial(_in_two_stages, _matrix("F4", rows, inputs, kronecker=False)) for rows in _F4
    ]
    return _filtered(inputs, weight, convolution, 4, transforms)


def _in_one_pass(matrix: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    length = isqrt(len(matrix))
    return (matrix @ tiles.flatten(0, 1).flatten(1)).reshape(length, length, *tiles.shape[2:])


def _in_two_stages(matrix: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    for _ in ("down", "across"):
        tiles = (matrix @ tiles.flatten(1)).reshape(len(matrix), *tiles.shape[1:]).transpose(0, 1)
    return tiles


def _matrix(
    name: str, rows: tuple[tuple[float, ...], ...], inputs: torch.Tensor, *, kronecker: bool
) -> torch.Tensor:
    """Return a transform's matrix, in the data type of the sums, on the inputs' device."""
    dtype, device = wide(inputs.dtype), inputs.device

    def make() -> torch.Tensor:
        matrix = torch.tensor(rows, dtype=torch.float64, device="cpu")
        return (torch.kron(matrix, matrix) if kronecker else matrix).to(dtype).to(device)

    return constant((name, rows, kronecker, dtype, device), make)


def _filtered(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    convolution: Convolution,
    step: int,
    transforms: Sequence[_Transform],
) -> torch.Tensor:
    """Compute Y = Aᵀ [Σ (G g Gᵀ) ⊙ (Bᵀ d B)] A for all tiles d at once.

    There is a matrix product per tile element. A tile has `step` × `step` outputs. Half precisions
    are transformed in float32 and multiplied in half precision.
    """
    of_data, of_kernels, of_outputs = transforms
    rows, columns = convolution.output_size(*inputs.shape[2:])
    down, across = -(-rows // step), -(-columns // step)
    batch, groups, dtype = inputs.shape[0], convolution.groups, wide(inputs.dtype)
    padded = convolution.padded(inputs, down * step + 2, across * step + 2).to(dtype)
    tiles = padded.unfold(2, step + 2, step).unfold(3, step + 2, step)[:, :, :down, :across]
    data = torch.unflatten(
        of_data(tiles.permute(4, 5, 1, 0, 2, 3)), 2, (groups, convolution.in_group)
    ).flatten(4)
    kernels = of_kernels(weight.to(dtype).permute(2, 3, 0, 1))
    kernels = torch.unflatten(kernels, 2, (groups, convolution.out_group))
    products = kernels.to(inputs.dtype) @ data.to(inputs.dtype)  # (tile, tile, G, O / G, N · tiles)
    outputs = torch.unflatten(
        of_outputs(products.to(dtype).flatten(2, 3)), 3, (batch, down, across)
    )
    whole = outputs.permute(3, 2, 4, 0, 5, 1).reshape(
        batch, convolution.out_channels, down * step, across * step
    )
    return whole[:, :, :rows, :columns]
