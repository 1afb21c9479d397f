"""Fourier: convolutions as products of spectra, of the whole image or of tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch.nn.functional import pad

from perfexp.convolutions.convolution import Convolution, Pair

#: Pixels a side of `fft_tiling`'s tiles, as cuDNN's.
TILE = 32

#: Complex numbers that are held at a time, unless three spectra alone have more.
_NUMBERS = 2**24
#: On a CPU, where larger tensors cost more time for fresh pages of memory than for what is computed.
_NUMBERS_OF_A_CPU = 2**21

#: From ranges in three dimensions to that block of pictures, of which each has a height and a width.
_Blocks = Callable[[slice, slice, slice], torch.Tensor]


def fft(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """The whole image's spectrum times the kernels' (Mathieu, Henaff and LeCun, "Fast Training of …", 2014).

    The transform is as long as the padded image, or a little longer where that is faster. It is circular, but what
    wraps around touches only outputs that a kernel inside the image does not reach.

    Args:
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).
        convolution: of stride and dilation 1.

    Returns:
        (N, O, height, width).
    """
    return _differentiable(convolution.padded(inputs), weight, convolution.groups, None)


def fft_tiling(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Overlap-save: tiles of 32 × 32 that overlap by the kernel less one; what wraps around in each is dropped.

    Args:
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width), at most 32 × 32.
        convolution: of stride and dilation 1.

    Returns:
        (N, O, height, width).
    """
    return _differentiable(convolution.padded(inputs), weight, convolution.groups, TILE)


def fast_length(length: int) -> int:
    """The smallest even number, at least `length`, that has no prime factors but 2, 3, 5 and 7."""
    candidate = max(2, length + length % 2)
    while not _is_smooth(candidate):
        candidate += 2
    return candidate


def _is_smooth(number: int) -> bool:
    for factor in (2, 3, 5, 7):
        while number % factor == 0:
            number //= factor
    return number == 1


def _differentiable(image: torch.Tensor, kernels: torch.Tensor, groups: int, tile: int | None) -> torch.Tensor:
    if torch.is_grad_enabled() and (image.requires_grad or kernels.requires_grad):
        outputs: torch.Tensor = _Filtered.apply(image, kernels, groups, tile)  # type: ignore[no-untyped-call]
        return outputs
    return _filtered(image, kernels, groups, tile)


class _Filtered(torch.autograd.Function):
    """Autograd of `_filtered` that keeps no spectra: the gradients are computed in blocks as well."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, kernels: torch.Tensor, groups: int, tile: int | None) -> torch.Tensor:
        """See `torch.autograd.Function`."""
        ctx.save_for_backward(image, kernels)
        ctx.settings = (groups, tile)
        return _filtered(image, kernels, groups, tile)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """See `torch.autograd.Function`."""
        image, kernels = ctx.saved_tensors
        groups, tile = ctx.settings
        of_image = of_kernels = None
        if ctx.needs_input_grad[0]:  # each kernel, rotated by half a turn, in all places where it meets the gradient
            down, across = kernels.shape[2] - 1, kernels.shape[3] - 1
            turned = torch.unflatten(kernels.flip(2, 3), 0, (groups, -1)).transpose(1, 2).flatten(0, 1)
            of_image = _filtered(pad(grad, (across, across, down, down)), turned, groups, tile)
        if ctx.needs_input_grad[1]:
            of_kernels = _gradient_of_kernels(image, grad, groups, tile)
        return of_image, of_kernels, None, None


def _filtered(image: torch.Tensor, kernels: torch.Tensor, groups: int, tile: int | None) -> torch.Tensor:
    """Correlations of an image with kernels, in all places where a kernel lies inside the image.

    Args:
        image: (N, C, H, W).
        kernels: (O, C / G, kernel height, kernel width).
        groups: G.
        tile: pixels a side of the transforms; None for the whole image.

    Returns:
        (N, O, H - kernel height + 1, W - kernel width + 1).
    """
    kernel = (kernels.shape[2], kernels.shape[3])
    size, steps, counts = _grid(image, kernel, tile)
    grouped = torch.unflatten(kernels, 0, (groups, -1))
    outputs = image.new_empty(groups, len(image) * counts[0] * counts[1], grouped.shape[1], *steps)
    tiles = _tiles(image, groups, kernel, steps, counts)
    _correlate(outputs, tiles, lambda *block: grouped[block], grouped.shape[2], size)
    parts = torch.unflatten(outputs, 1, (len(image), *counts)).permute(1, 0, 4, 2, 5, 3, 6)
    whole = parts.reshape(len(image), len(kernels), counts[0] * steps[0], counts[1] * steps[1])
    return whole[:, :, : image.shape[2] - kernel[0] + 1, : image.shape[3] - kernel[1] + 1]


def _gradient_of_kernels(image: torch.Tensor, grad: torch.Tensor, groups: int, tile: int | None) -> torch.Tensor:
    """Correlations of an image's tiles with those of the gradient of `_filtered`, summed over the tiles.

    Args:
        image: (N, C, H, W).
        grad: (N, O, H - kernel height + 1, W - kernel width + 1).
        groups: G.
        tile: pixels a side of the transforms; None for the whole image.

    Returns:
        (O, C / G, kernel height, kernel width).
    """
    kernel = (image.shape[2] - grad.shape[2] + 1, image.shape[3] - grad.shape[3] + 1)
    size, steps, counts = _grid(image, kernel, tile)
    of_image, of_grad = _tiles(image, groups, kernel, steps, counts), _tiles(grad, groups, (1, 1), steps, counts)
    gradient = image.new_empty(groups, image.shape[1] // groups, grad.shape[1] // groups, *kernel)
    _correlate(
        gradient,
        lambda group, channel, tiles: of_image(group, tiles, channel).transpose(1, 2),
        lambda group, channel, tiles: of_grad(group, tiles, channel).transpose(1, 2),
        len(image) * counts[0] * counts[1],
        size,
    )
    return gradient.transpose(1, 2).flatten(0, 1)


def _grid(image: torch.Tensor, kernel: Pair, tile: int | None) -> tuple[Pair, Pair, Pair]:
    """Sizes of the transforms, steps from tile to tile, and numbers of tiles, each down and across."""
    sizes, steps, counts = [], [], []
    for length, reach in zip(image.shape[2:], kernel, strict=True):
        outputs = length - reach + 1
        sizes.append(tile or fast_length(length))
        steps.append(min(sizes[-1] - reach + 1, outputs))
        counts.append(-(-outputs // steps[-1]))
    return (sizes[0], sizes[1]), (steps[0], steps[1]), (counts[0], counts[1])


def _tiles(image: torch.Tensor, groups: int, kernel: Pair, steps: Pair, counts: Pair) -> _Blocks:
    """Blocks of (group, tile, channel) of an image's tiles, which overlap by the kernel less one."""
    height, width = [count * step + reach - 1 for count, step, reach in zip(counts, steps, kernel, strict=True)]
    padded = pad(image, (0, width - image.shape[3], 0, height - image.shape[2]))
    tiles = torch.unflatten(padded, 1, (groups, -1))
    tiles = tiles.unfold(3, steps[0] + kernel[0] - 1, steps[0]).unfold(4, steps[1] + kernel[1] - 1, steps[1])
    tiles = tiles.permute(0, 3, 4, 1, 2, 5, 6)  # a view: all tiles may have many times the image's numbers
    number = torch.arange(len(image) * counts[0] * counts[1], device=image.device)
    which, across = number // counts[1], number % counts[1]
    batch, down = which // counts[0], which % counts[0]

    def block(group: slice, tile: slice, channel: slice) -> torch.Tensor:
        return tiles[:, :, :, group, channel][batch[tile], down[tile], across[tile]].transpose(0, 1)

    return block


def _correlate(outputs: torch.Tensor, left: _Blocks, right: _Blocks, inner: int, size: Pair) -> None:
    """Spectra of `left` times those of `right`, summed and transformed back; block by block, to hold little at a time.

    The pictures of `right` are rotated by half a turn, which spares their spectra's conjugation.

    Args:
        outputs: (G, rows, columns, height, width), where to put the correlations.
        left: blocks of (G, rows, inner), of pictures as large as those of `outputs` and `right` less one.
        right: blocks of (G, columns, inner).
        inner: what is summed over.
        size: height and width of the transforms, at least that of the pictures of `left`.
    """
    height, width = outputs.shape[3:]
    eager_on_cpu = outputs.device.type == "cpu" and not torch.compiler.is_compiling()  # a compiler unrolls the blocks
    most = (_NUMBERS_OF_A_CPU if eager_on_cpu else _NUMBERS) // (size[0] * (size[1] // 2 + 1))
    groups, rows, columns = outputs.shape[:3]
    for group, row, column, inners in _blocks(groups, rows, columns, inner, most):
        total: torch.Tensor | None = None
        for each in inners:
            kernels = right(group, column, each)
            spectra = _spectra(left(group, row, each), size) @ _spectra(kernels.flip(3, 4), size).transpose(3, 4)
            total = spectra if total is None else total.add_(spectra)
        assert total is not None
        sums = torch.fft.irfft2(total.permute(2, 3, 4, 0, 1), s=size)
        top, side = kernels.shape[3] - 1, kernels.shape[4] - 1  # what wraps around touches only what is before
        outputs[group, row, column] = sums[..., top : top + height, side : side + width]


def _spectra(pictures: torch.Tensor, size: Pair) -> torch.Tensor:
    """From (G, rows, inner, height, width) to (height, half the width + 1, G, rows, inner): a matrix each frequency."""
    spectra: torch.Tensor = torch.fft.rfft2(pictures, s=size)
    return spectra.permute(3, 4, 0, 1, 2).contiguous()


def _blocks(
    groups: int, rows: int, columns: int, inner: int, most: int
) -> Iterator[tuple[slice, slice, slice, list[slice]]]:
    """Blocks of groups, rows and columns, and those of what is summed over, that have at most `most` spectra."""
    lengths = [groups, rows, columns, inner]
    while max(lengths) > 1 and _spectra_of(*lengths) > most:
        # groups first: parts of them cost nothing; less rows let the columns' spectra be computed again, and vice versa
        weights = (10**9, 1, 1, 4)
        largest = max(range(4), key=lambda axis: (lengths[axis] - 1) * weights[axis])
        lengths[largest] = -(-lengths[largest] // 2)
    cut = [
        [slice(first, min(first + step, length)) for first in range(0, length, step)]
        for length, step in zip((groups, rows, columns, inner), lengths, strict=True)
    ]
    for group, row, column in product(*cut[:3]):
        yield group, row, column, cut[3]


def _spectra_of(groups: int, rows: int, columns: int, inner: int) -> int:
    return groups * (rows * inner + columns * inner + rows * columns)
