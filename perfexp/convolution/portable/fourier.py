"""Convolutions as products of spectra, over the whole image or over tiles.

Inputs and images are (N, C, H, W), weights (O, C / G, kernel height, kernel width), outputs (N, O,
height, width). Stride and dilation must be 1. Work is done in blocks, because spectra of all images
at once may not fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch.nn.functional import pad

from perfexp.convolution.portable.geometry import Convolution, Pair

#: Tile side of `fft_tiling` in pixels, as in cuDNN.
TILE = 32

#: Maximum number of complex numbers in memory, unless three spectra alone have more.
_NUMBERS = 2**24
#: The limit on a CPU, where fresh memory pages for larger tensors cost more time than computation.
_NUMBERS_OF_A_CPU = 2**21

#: Maps ranges in three dimensions to a block of images, shape (…, …, …, height, width).
_Blocks = Callable[[slice, slice, slice], torch.Tensor]


def fft(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Multiply the spectra of the whole image and the kernels.

    See Mathieu, Henaff and LeCun, "Fast Training of …", 2014. The transform is as long as the
    padded image, or slightly longer if that is faster. It is circular, but wrap-around only affects
    outputs that no kernel inside the image reaches.
    """
    return _filter(convolution.padded(inputs), weight, convolution.groups, None)


def fft_tiling(
    inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Convolve by overlap-save with kernels up to 32 × 32.

    Tiles of 32 × 32 overlap by the kernel size minus 1.
    """
    return _filter(convolution.padded(inputs), weight, convolution.groups, TILE)


def fast_length(length: int) -> int:
    """Return the smallest even number ≥ `length` with no prime factors other than 2, 3, 5 and 7."""
    candidate = max(2, length + length % 2)
    while not _is_smooth(candidate):
        candidate += 2
    return candidate


def _is_smooth(number: int) -> bool:
    """Return whether a number has no prime factors other than 2, 3, 5 and 7, which FFTs do fast."""
    for factor in (2, 3, 5, 7):
        while number % factor == 0:
            number //= factor
    return number == 1


def _filter(
    image: torch.Tensor, kernels: torch.Tensor, groups: int, tile: int | None
) -> torch.Tensor:
    """Return the correlation of an image with kernels, recorded for autograd if necessary.

    Args:
        tile: side of the transforms in pixels, or None for the whole image.
    """
    if torch.is_grad_enabled() and (image.requires_grad or kernels.requires_grad):
        apply: Any = _Correlation.apply
        outputs: torch.Tensor = apply(image, kernels, groups, tile)
        return outputs
    return _correlate_image(image, kernels, groups, tile)


class _Correlation(torch.autograd.Function):
    """Autograd for `_correlate_image` without saved spectra.

    The gradients are computed in blocks, too.
    """

    @staticmethod
    def forward(
        ctx: Any, image: torch.Tensor, kernels: torch.Tensor, groups: int, tile: int | None
    ) -> torch.Tensor:
        """Return the correlation, and keep image and kernels for the gradients."""
        ctx.save_for_backward(image, kernels)
        ctx.settings = (groups, tile)
        return _correlate_image(image, kernels, groups, tile)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Return the gradients of image and kernels, None for one that is not needed."""
        image, kernels = ctx.saved_tensors
        groups, tile = ctx.settings
        of_image = of_kernels = None
        if ctx.needs_input_grad[0]:  # full correlation with the kernels rotated by 180°
            down, across = kernels.shape[2] - 1, kernels.shape[3] - 1
            grouped = torch.unflatten(kernels.flip(2, 3), 0, (groups, -1))
            turned = grouped.transpose(1, 2).flatten(0, 1)
            of_image = _correlate_image(
                pad(grad, (across, across, down, down)), turned, groups, tile
            )
        if ctx.needs_input_grad[1]:
            of_kernels = _gradient_of_kernels(image, grad, groups, tile)
        return of_image, of_kernels, None, None


def _correlate_image(
    image: torch.Tensor, kernels: torch.Tensor, groups: int, tile: int | None
) -> torch.Tensor:
    """Correlate an image with kernels, at all positions with the kernel inside the image.

    Args:
        image: padded inputs.
        tile: side of the transforms in pixels, or None for the whole image.

    Returns:
        (N, O, H - kernel height + 1, W - kernel width + 1).
    """
    kernel = (kernels.shape[2], kernels.shape[3])
    size, steps, counts = _grid(image, kernel, tile)
    grouped = torch.unflatten(kernels, 0, (groups, -1))
    outputs = image.new_empty(groups, len(image) * counts[0] * counts[1], grouped.shape[1], *steps)
    tiles = _tiles(image, groups, kernel, steps, counts)
    _correlate_blocks(outputs, tiles, lambda *block: grouped[block], grouped.shape[2], size)
    parts = torch.unflatten(outputs, 1, (len(image), *counts)).permute(1, 0, 4, 2, 5, 3, 6)
    padded_outputs = parts.reshape(
        len(image), len(kernels), counts[0] * steps[0], counts[1] * steps[1]
    )
    return padded_outputs[:, :, : image.shape[2] - kernel[0] + 1, : image.shape[3] - kernel[1] + 1]


def _gradient_of_kernels(
    image: torch.Tensor, grad: torch.Tensor, groups: int, tile: int | None
) -> torch.Tensor:
    """Correlate image tiles with gradient tiles, and sum over the tiles.

    Args:
        image: padded inputs.
        grad: gradient of `_correlate_image`, (N, O, H - kernel height + 1, W - kernel width + 1).
        tile: side of the transforms in pixels, or None for the whole image.

    Returns:
        (O, C / G, kernel height, kernel width).
    """
    kernel = (image.shape[2] - grad.shape[2] + 1, image.shape[3] - grad.shape[3] + 1)
    size, steps, counts = _grid(image, kernel, tile)
    image_tiles = _tiles(image, groups, kernel, steps, counts)
    grad_tiles = _tiles(grad, groups, (1, 1), steps, counts)
    gradient = image.new_empty(groups, image.shape[1] // groups, grad.shape[1] // groups, *kernel)
    _correlate_blocks(
        gradient,
        lambda group, channel, tiles: image_tiles(group, tiles, channel).transpose(1, 2),
        lambda group, channel, tiles: grad_tiles(group, tiles, channel).transpose(1, 2),
        len(image) * counts[0] * counts[1],
        size,
    )
    return gradient.transpose(1, 2).flatten(0, 1)


def _grid(image: torch.Tensor, kernel: Pair, tile: int | None) -> tuple[Pair, Pair, Pair]:
    """Return transform sizes, steps from tile to tile, and tile counts, each (down, across).

    Args:
        kernel: kernel height and width.
        tile: side of the transforms in pixels, or None for the whole image as a single tile.
    """
    sizes, steps, counts = [], [], []
    for length, reach in zip(image.shape[2:], kernel, strict=True):
        outputs = length - reach + 1
        sizes.append(tile or fast_length(length))
        steps.append(min(sizes[-1] - reach + 1, outputs))
        counts.append(-(-outputs // steps[-1]))
    return (sizes[0], sizes[1]), (steps[0], steps[1]), (counts[0], counts[1])


def _tiles(image: torch.Tensor, groups: int, kernel: Pair, steps: Pair, counts: Pair) -> _Blocks:
    """Return a function for blocks of (group, tile, channel) of an image's tiles.

    Tiles overlap by the kernel size minus 1.
    """
    height, width = [
        count * step + reach - 1 for count, step, reach in zip(counts, steps, kernel, strict=True)
    ]
    padded = pad(image, (0, width - image.shape[3], 0, height - image.shape[2]))
    tiles = torch.unflatten(padded, 1, (groups, -1))
    tiles = tiles.unfold(3, steps[0] + kernel[0] - 1, steps[0]).unfold(
        4, steps[1] + kernel[1] - 1, steps[1]
    )
    # a view, because overlapping tiles may have many times the image's numbers
    tiles = tiles.permute(0, 3, 4, 1, 2, 5, 6)
    number = torch.arange(len(image) * counts[0] * counts[1], device=image.device)
    tile_row, across = number // counts[1], number % counts[1]
    batch, down = tile_row // counts[0], tile_row % counts[0]

    def block(group: slice, tile: slice, channel: slice) -> torch.Tensor:
        return tiles[:, :, :, group, channel][batch[tile], down[tile], across[tile]].transpose(0, 1)

    return block


def _correlate_blocks(
    outputs: torch.Tensor, left: _Blocks, right: _Blocks, inner: int, size: Pair
) -> None:
    """Multiply spectra, sum over `inner` and transform back, in blocks to save memory.

    Args:
        outputs: (G, rows, columns, height, width), overwritten.
        left: blocks of (G, rows, inner). Its images are as large as those in `outputs` plus `right`
            minus 1, and at most `size`.
        right: blocks of (G, columns, inner). Its images are rotated by 180°, which replaces the
            conjugation of their spectra.
    """
    height, width = outputs.shape[3:]
    most_numbers = _NUMBERS
    # a compiler unrolls the blocks, so it gets the larger limit and fewer blocks
    if outputs.device.type == "cpu" and not torch.compiler.is_compiling():
        most_numbers = _NUMBERS_OF_A_CPU
    most = most_numbers // (size[0] * (size[1] // 2 + 1))
    for group, row, column, inners in _blocks(*outputs.shape[:3], inner, most=most):
        total: torch.Tensor | None = None
        for block in inners:
            kernels = right(group, column, block)
            kernel_spectra = _spectra(kernels.flip(3, 4), size).transpose(3, 4)
            spectra = _spectra(left(group, row, block), size) @ kernel_spectra
            total = spectra if total is None else total.add_(spectra)
        assert total is not None
        sums = torch.fft.irfft2(total.permute(2, 3, 4, 0, 1), s=size)
        # wrap-around affects only earlier outputs
        top, side = kernels.shape[3] - 1, kernels.shape[4] - 1
        outputs[group, row, column] = sums[..., top : top + height, side : side + width]


def _spectra(images: torch.Tensor, size: Pair) -> torch.Tensor:
    """Transform (G, rows, inner, height, width) to (height, width / 2 + 1, G, rows, inner).

    This is one matrix per frequency. `_correlate_blocks` multiplies them.
    """
    spectra: torch.Tensor = torch.fft.rfft2(images, s=size)
    return spectra.permute(3, 4, 0, 1, 2).contiguous()


def _blocks(*sizes: int, most: int) -> Iterator[tuple[slice, slice, slice, list[slice]]]:
    """Yield blocks of groups, rows and columns, with slices of the summed dimension.

    Each block has at most `most` spectra, unless a single product needs more.

    Args:
        sizes: number of groups, rows, columns and summed elements.
    """
    lengths = list(sizes)
    while max(lengths) > 1 and _num_spectra(*lengths) > most:
        # groups first, because splitting them is free; fewer rows recompute the columns' spectra,
        # and vice versa
        weights = (10**9, 1, 1, 4)
        largest = max(range(4), key=lambda axis: (lengths[axis] - 1) * weights[axis])
        lengths[largest] = -(-lengths[largest] // 2)
    cut = [
        [slice(first, min(first + step, size)) for first in range(0, size, step)]
        for size, step in zip(sizes, lengths, strict=True)
    ]
    for group, row, column in product(*cut[:3]):
        yield group, row, column, cut[3]


def _num_spectra(groups: int, rows: int, columns: int, inner: int) -> int:
    """Return the number of spectra in memory for a block: two factors and a result."""
    return groups * (rows * inner + columns * inner + rows * columns)
