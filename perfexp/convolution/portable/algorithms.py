"""Portable: differentiable convolution algorithms in torch operations, for any torch device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import conv2d as conv2d_of_torch

from perfexp.convolution.portable.fourier import TILE, fft, fft_tiling
from perfexp.convolution.portable.gemm import gemm, implicit_gemm, implicit_precomp_gemm
from perfexp.convolution.portable.geometry import Convolution, Pair, wide
from perfexp.convolution.portable.winograd import winograd, winograd_nonfused
from perfexp.errors import UserError, did_you_mean

#: Maps inputs (N, C, H, W), weights and convolution to (N, O, height, width), without bias.
Compute = Callable[[torch.Tensor, torch.Tensor, Convolution], torch.Tensor]

_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)
#: Maximum number of products that `direct` holds, unless one channel alone has more: they stay in
#: the CPU cache.
_PRODUCTS = 2**20


@dataclass(frozen=True, kw_only=True)
class Portable:
    """An algorithm in torch operations, and its limits.

    Attributes:
        spectral: whether it uses an FFT, which excludes half precision.
        strided: whether it takes strides and dilations other than 1.
        kernel: the only kernel size that it takes; None for any.
        largest: largest kernel side; None for any.
    """

    compute: Compute
    spectral: bool = False
    strided: bool = True
    kernel: Pair | None = None
    largest: int | None = None

    def supports(self, convolution: Convolution, dtype: torch.dtype) -> str | None:
        """Return why the algorithm cannot compute a convolution, e.g. `the stride is 2×2, not 1`.

        The result is None if it can.

        Args:
            dtype: data type after autocast.
        """
        kernel = convolution.kernel
        if dtype not in _FLOATING:
            return f"the data type is {_bare(dtype)}"
        if dtype in _HALF and self.spectral:
            return f"torch's FFT does not take {_bare(dtype)}"
        if self.kernel is not None and kernel != self.kernel:
            return f"the kernel is {_times(kernel)}, not {_times(self.kernel)}"
        if self.largest is not None and max(kernel) > self.largest:
            return (
                f"the kernel is {_times(kernel)}, larger than a tile of "
                f"{_times((self.largest, self.largest))}"
            )
        if not self.strided and convolution.stride != (1, 1):
            return f"the stride is {_times(convolution.stride)}, not 1"
        if not self.strided and convolution.dilation != (1, 1):
            return f"the dilation is {_times(convolution.dilation)}, not 1"
        return None


def as_torch_does(
    compute: Compute,
    convolution: Convolution,
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Apply `compute` with all side tasks of `torch.nn.functional.conv2d`.

    They are casts under autocast, inputs without a batch dimension (C, H, W), empty batches and the
    bias (O,). The result has torch's data type and memory format.
    """
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            cast = None if bias is None else _cast(bias, dtype)
            return as_torch_does(
                compute, convolution, _cast(inputs, dtype), _cast(weight, dtype), cast
            )
    batched = inputs if inputs.ndim == 4 else inputs.unsqueeze(0)
    if batched.shape[0] == 0:  # not all operations take an empty batch
        settings = (convolution.stride, 0, convolution.dilation, convolution.groups)
        return conv2d_of_torch(convolution.padded(batched), weight, bias, *settings)
    outputs = compute(batched, weight, convolution)
    if bias is not None:
        outputs = outputs + bias[:, None, None]
    last = any(is_channels_last(tensor.shape, tensor.stride()) for tensor in (batched, weight))
    layout = torch.channels_last if last else torch.contiguous_format
    outputs = outputs.to(inputs.dtype).contiguous(memory_format=layout)
    return outputs if inputs.ndim == 4 else outputs.squeeze(0)


def direct(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Sum shifted inputs times weights, over kernel positions and blocks of channels.

    These are elementwise products, broadcast over output channels, and sums: an einsum or a matmul
    would be a GEMM in disguise. Nothing is gathered: each kernel position reads a strided view of
    the inputs. Half precisions are multiplied in float32, and the result has the data type of the
    sums.
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
        seen = grouped[
            ...,
            top : top + (rows - 1) * down + 1 : down,
            left : left + (columns - 1) * across + 1 : across,
        ]
        factors = kernels[..., row, column, None, None]
        for first in range(0, in_group, block):
            channels = slice(first, first + block)
            part = (seen[:, :, :, channels] * factors[:, :, :, channels]).sum(3)
            total = part if total is None else total.add_(part)
    assert total is not None
    return total.flatten(1, 2)


#: All algorithms by name.
ALGORITHMS = {
    "direct": Portable(compute=direct),
    "gemm": Portable(compute=gemm),
    "implicit_gemm": Portable(compute=implicit_gemm),
    "implicit_precomp_gemm": Portable(compute=implicit_precomp_gemm),
    "fft": Portable(compute=fft, spectral=True, strided=False),
    "fft_tiling": Portable(compute=fft_tiling, spectral=True, strided=False, largest=TILE),
    "winograd": Portable(compute=winograd, strided=False, kernel=(3, 3)),
    "winograd_nonfused": Portable(compute=winograd_nonfused, strided=False, kernel=(3, 3)),
}


def canonical(
    name: str, valid: Sequence[str] | dict[str, Portable], kind: str = "convolution algorithm"
) -> str:
    """Return an algorithm's canonical name; for example, `Implicit-GEMM` is understood.

    Raises:
        UserError: there is no such name.
    """
    normalized = "_".join(name.lower().replace("-", " ").replace("_", " ").split())
    if normalized not in valid:
        raise UserError(f"There is no {kind} {name!r}. {did_you_mean(normalized, valid)}")
    return normalized


def misfit(convolution: Convolution, shape: Sequence[int]) -> str | None:
    """Return why no algorithm can take inputs with this shape; None if they fit."""
    if len(shape) not in (3, 4):
        return f"the inputs have {len(shape)} dimensions"
    if shape[-3] != convolution.in_channels:
        return f"the inputs have {shape[-3]} channels, not {convolution.in_channels}"
    if min(convolution.output_size(*shape[-2:])) < 1:
        return f"a kernel of {_times(convolution.kernel)} does not fit into {_times(shape[-2:])}"
    return None


def effective_dtype(inputs: torch.Tensor) -> torch.dtype:
    """Return the data type that `torch.nn.functional.conv2d` would compute in, under autocast."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        return _cast_type(inputs.dtype, torch.get_autocast_dtype(kind))
    return inputs.dtype


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether torch treats strides of (N, C, H, W) as NHWC.

    The rule is c10's `is_channels_last_strides_2d`.
    """
    least = 0
    for axis in (1, 3, 2, 0):
        if shape[axis] == 0 or strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(1, shape[axis])
    return True


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(_cast_type(tensor.dtype, dtype))


def _cast_type(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """Return the data type after autocast.

    Autocast leaves float64 and non-floating-point types unchanged.
    """
    return wanted if dtype in (torch.float32, *_HALF) else dtype


def _bare(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _times(numbers: Sequence[int]) -> str:
    return "×".join(map(str, numbers))
