"""Convolution: shape arithmetic for 2-D convolutions, which all algorithms share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.nn.functional import pad

Pair = tuple[int, int]

#: Data types for sums of half-precision numbers, as on tensor cores.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
#: Small constant tensors that the algorithms use (transforms, indices).
_constants: dict[Hashable, torch.Tensor] = {}


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution, independent of input size: y = Σ x[c, s·p + d·k] · w[o, c, k].

    It has C input channels, O output channels and G groups. Pairs are (down, across); `padding`
    counts zeros at the left, right, top and bottom.
    """

    in_channels: int
    out_channels: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @classmethod
    def of(
        cls,
        weight_shape: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Convolution:
        """Return the convolution for arguments of `torch.nn.functional.conv2d`.

        Args:
            weight_shape: (O, C / G, kernel height, kernel width).
        """
        out_channels, per_group, *kernel = weight_shape
        spread = _pair(dilation)
        return cls(
            in_channels=per_group * groups,
            out_channels=out_channels,
            kernel=(kernel[0], kernel[1]),
            stride=_pair(stride),
            padding=_sides(padding, _pair(kernel), spread),
            dilation=spread,
            groups=groups,
        )

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Return (O, C / G, kernel height, kernel width)."""
        return (self.out_channels, self.in_group, *self.kernel)

    @property
    def in_group(self) -> int:
        """Return C / G, the number of input channels that an output reads."""
        return self.in_channels // self.groups

    @property
    def out_group(self) -> int:
        """Return O / G, the number of output channels per group."""
        return self.out_channels // self.groups

    @property
    def positions(self) -> Iterator[Pair]:
        """Yield the row and column of each kernel element."""
        return ((row, column) for row in range(self.kernel[0]) for column in range(self.kernel[1]))

    def output_size(self, height: int, width: int) -> Pair:
        """Return the output height and width in pixels; below 1 if the kernel does not fit.

        Args:
            height: height of the unpadded inputs.
            width: width of the unpadded inputs.
        """
        left, right, top, bottom = self.padding
        reach = [step * (size - 1) for step, size in zip(self.dilation, self.kernel, strict=True)]
        down, across = self.stride
        rows = (height + top + bottom - reach[0] - 1) // down + 1
        columns = (width + left + right - reach[1] - 1) // across + 1
        return rows, columns

    def padded(self, inputs: torch.Tensor, height: int = 0, width: int = 0) -> torch.Tensor:
        """Return inputs (N, C, H, W) with zero padding.

        They are extended at the bottom and right to at least the total `height` and `width`, which
        Winograd's tiles need.
        """
        left, right, top, bottom = self.padding
        bottom += max(0, height - inputs.shape[2] - top - bottom)
        right += max(0, width - inputs.shape[3] - left - right)
        if not (left or right or top or bottom):
            return inputs
        return pad(inputs, (left, right, top, bottom))

    def flops(self, batch: int, height: int, width: int) -> int:
        """Return two FLOPs per multiplication in the definition, for a batch of unpadded inputs."""
        outputs = batch * self.out_channels * prod(self.output_size(height, width))
        return 2 * outputs * self.in_group * prod(self.kernel)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the data type for sums: float32 for half precisions, otherwise the same."""
    return _WIDE.get(dtype, dtype)


def constant(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the cached result of `make`; the key must include data type and device.

    Transforms and indices are made this way, once per shape. A tracing compiler sees how the tensor
    is made and does its own constant folding.
    """
    if torch.compiler.is_compiling():
        return make()
    tensor = _constants.get(key)
    if tensor is None:
        with torch.inference_mode(False):  # training cannot use inference tensors
            tensor = make()
        if type(tensor) is torch.Tensor:  # no call can use the fake tensors of a trial
            _constants[key] = tensor
    return tensor


def clear_constants() -> None:
    """Free all cached constants; they are made again on demand."""
    _constants.clear()


def _pair(value: int | Sequence[int]) -> Pair:
    """Return (down, across) for one number or two."""
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _sides(
    padding: str | int | Sequence[int], kernel: Pair, dilation: Pair
) -> tuple[int, int, int, int]:
    """Return the padding at the left, right, top and bottom.

    An odd `same` padding has an additional zero at the end, as in torch.
    """
    if isinstance(padding, str):
        if padding != "same":  # `valid`
            return 0, 0, 0, 0
        down, across = [spread * (size - 1) for size, spread in zip(kernel, dilation, strict=True)]
        return across // 2, across - across // 2, down // 2, down - down // 2
    down, across = _pair(padding)
    return across, across, down, down
