"""Fourier: convolutions as products of spectra, of the whole image or of tiles."""

from __future__ import annotations

import torch

from perfexp.algorithms.convolution import Convolution

#: Pixels a side of `fft_tiling`'s tiles, as cuDNN's.
TILE = 32


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
    rows, columns = convolution.output_size(*inputs.shape[2:])
    padded = convolution.padded(inputs)
    size = [fast_length(length) for length in padded.shape[2:]]
    spectra = torch.fft.rfft2(padded, s=size)[:, :, None, None]
    outputs = _correlate(spectra, weight, convolution, size)
    return outputs[:, :, 0, 0, :rows, :columns]


def fft_tiling(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Overlap-save: tiles of 32 × 32 that overlap by the kernel less one; what wraps around in each is dropped.

    Args:
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width), at most 32 × 32.
        convolution: of stride and dilation 1.

    Returns:
        (N, O, height, width).
    """
    rows, columns = convolution.output_size(*inputs.shape[2:])
    steps = [TILE - size + 1 for size in convolution.kernel]
    down, across = -(-rows // steps[0]), -(-columns // steps[1])
    padded = convolution.padded(inputs, (down - 1) * steps[0] + TILE, (across - 1) * steps[1] + TILE)
    tiles = padded.unfold(2, TILE, steps[0]).unfold(3, TILE, steps[1])[:, :, :down, :across]
    outputs = _correlate(torch.fft.rfft2(tiles), weight, convolution, [TILE, TILE])
    kept = outputs[..., : steps[0], : steps[1]].permute(0, 1, 2, 4, 3, 5)
    whole = kept.reshape(*kept.shape[:2], down * steps[0], across * steps[1])
    return whole[:, :, :rows, :columns]


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


def _correlate(spectra: torch.Tensor, weight: torch.Tensor, convolution: Convolution, size: list[int]) -> torch.Tensor:
    """Spectra of tiles times the kernels' conjugate ones, summed over channels, and transformed back.

    Args:
        spectra: (N, C, tiles down, tiles across, height, half the width + 1).
        weight: (O, C / G, kernel height, kernel width).
        convolution: what to compute.
        size: height and width of the transforms.

    Returns:
        (N, O, tiles down, tiles across, height, width).
    """
    groups, batch, down, across = convolution.groups, spectra.shape[0], *spectra.shape[2:4]
    kernels = torch.fft.rfft2(weight, s=size).conj()
    # for each frequency and group a product: (N · tiles, C / G) times (C / G, O / G)
    left = torch.unflatten(spectra, 1, (groups, convolution.in_group)).permute(5, 6, 1, 0, 3, 4, 2).flatten(3, 5)
    right = torch.unflatten(kernels, 0, (groups, convolution.out_group)).permute(3, 4, 0, 2, 1)
    products = torch.unflatten(left @ right, 3, (batch, down, across)).permute(3, 2, 6, 4, 5, 0, 1)
    outputs: torch.Tensor = torch.fft.irfft2(products.flatten(1, 2), s=size)
    return outputs
