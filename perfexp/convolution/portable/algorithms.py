"""Portable: differentiable convolution algorithms in torch operations, for any torch device.

Inputs are (N, C, H, W), weights (O, C / G, kernel height, kernel width), outputs (N, O, height,
width). `ALGORITHMS` has them by name. The matrix products (`gemm` and its variants) differ in how
they copy the inputs. Winograd's minimal filtering for 3 × 3 kernels follows Lavin and Gray, "Fast
Algorithms for …", CVPR 2016; `fourier` has the algorithms with spectra.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt

import torch
from torch.nn.functional import conv2d as conv2d_of_torch
from torch.nn.functional import unfold

from perfexp.convolution.portable.fourier import TILE, fft, fft_tiling
from perfexp.convolution.portable.geometry import Convolution, Pair, constant, wide
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
        compute: function of inputs, weights and convolution, without bias.
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
            tile = _times((self.largest, self.largest))
            return f"the kernel is {_times(kernel)}, larger than a tile of {tile}"
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
    bias (O,). The result has torch's data type and memory format. `Engines.compute` wraps each
    engine in it.
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


def gemm(inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution) -> torch.Tensor:
    """Compute by explicit im2col and a single product.

    See Chellapilla et al., "High Performance Convolutional Neural Networks", 2006.
    """
    size = convolution.output_size(*inputs.shape[2:])
    padded = convolution.padded(inputs)
    columns = unfold(
        padded, convolution.kernel, dilation=convolution.dilation, stride=convolution.stride
    )
    return torch.unflatten(_grouped_product(weight.flatten(1), columns, convolution), 2, size)


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
        product = _grouped_product(weight[:, :, row, column], image.flatten(2), convolution)
        product = torch.unflatten(product, 2, image.shape[2:])
        top, left = y // down, x // across
        shifted = product[:, :, top : top + rows, left : left + columns]
        total = shifted.to(dtype, copy=True) if total is None else total.add_(shifted)
    assert total is not None
    return total


def implicit_precomp_gemm(
    inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Gather by indices that are cached per input size, then compute a single product.

    It is `gemm` with a table of indices instead of `unfold`.
    """
    rows, columns = convolution.output_size(*inputs.shape[2:])
    padded = convolution.padded(inputs)
    width, device = padded.shape[3], padded.device
    key = ("indices", convolution, rows, columns, width, device)
    indices = constant(key, lambda: _gather_indices(convolution, rows, columns, width, device))
    gathered = padded.flatten(2).index_select(2, indices).flatten(1)
    taps = convolution.kernel[0] * convolution.kernel[1]
    matrix = gathered.reshape(inputs.shape[0], convolution.in_channels * taps, rows * columns)
    return torch.unflatten(
        _grouped_product(weight.flatten(1), matrix, convolution), 2, (rows, columns)
    )


def _gather_indices(
    convolution: Convolution, rows: int, columns: int, width: int, device: torch.device
) -> torch.Tensor:
    """Return the indices into a flattened image that each kernel position reads.

    The shape is (positions · rows · columns,).

    Args:
        rows: output height.
        columns: output width.
        width: width of the padded image.
    """
    axes = []
    for axis, count in enumerate((rows, columns)):
        taps = torch.arange(convolution.kernel[axis], device=device) * convolution.dilation[axis]
        outputs = torch.arange(count, device=device) * convolution.stride[axis]
        axes.append(taps[:, None] + outputs)
    return (axes[0][:, None, :, None] * width + axes[1][None, :, None, :]).flatten()


def _grouped_product(
    weight: torch.Tensor, columns: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Multiply weights (O, K / G) by columns (N, K, L), group by group, to (N, O, L).

    K counts input channels times kernel positions, L output pixels.
    """
    groups = convolution.groups
    if groups == 1:
        return weight @ columns
    grouped = torch.unflatten(columns, 1, (groups, columns.shape[1] // groups))
    return (torch.unflatten(weight, 0, (groups, convolution.out_group)) @ grouped).flatten(1, 2)


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
        partial(_in_one_pass, _transform_matrix("F2", rows, inputs, kronecker=True)) for rows in _F2
    ]
    return _winograd(inputs, weight, convolution, 2, transforms)


def winograd_nonfused(
    inputs: torch.Tensor, weight: torch.Tensor, convolution: Convolution
) -> torch.Tensor:
    """Compute by F(4 × 4, 3 × 3): 36 multiplications instead of 144 for 16 outputs.

    Each transform takes two stages. The transforms' constants make it less exact than F(2 × 2, 3 ×
    3).
    """
    transforms = [
        partial(_in_two_stages, _transform_matrix("F4", rows, inputs, kronecker=False))
        for rows in _F4
    ]
    return _winograd(inputs, weight, convolution, 4, transforms)


def _in_one_pass(matrix: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Transform tiles (rows, columns, …) in both directions, with a Kronecker product as matrix."""
    length = isqrt(len(matrix))
    return (matrix @ tiles.flatten(0, 1).flatten(1)).reshape(length, length, *tiles.shape[2:])


def _in_two_stages(matrix: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Transform tiles (rows, columns, …) by the matrix, first down, then across."""
    for _ in ("down", "across"):
        tiles = (matrix @ tiles.flatten(1)).reshape(len(matrix), *tiles.shape[1:]).transpose(0, 1)
    return tiles


def _transform_matrix(
    name: str, rows: tuple[tuple[float, ...], ...], inputs: torch.Tensor, *, kronecker: bool
) -> torch.Tensor:
    """Return a transform's matrix, in the data type of the sums, on the inputs' device.

    Args:
        name: part of the cache key.
        kronecker: whether to return its Kronecker product with itself, for both directions at once.
    """
    dtype, device = wide(inputs.dtype), inputs.device

    def make() -> torch.Tensor:
        matrix = torch.tensor(rows, dtype=torch.float64, device="cpu")
        if kronecker:
            matrix = torch.kron(matrix, matrix)
        return matrix.to(dtype).to(device)

    return constant((name, rows, kronecker, dtype, device), make)


def _winograd(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    convolution: Convolution,
    step: int,
    transforms: Sequence[_Transform],
) -> torch.Tensor:
    """Compute Y = Aᵀ [Σ (G g Gᵀ) ⊙ (Bᵀ d B)] A for all tiles d at once.

    There is a matrix product per tile element. Half precisions are transformed in float32 and
    multiplied in half precision. The result has the data type of the sums.

    Args:
        step: outputs per tile in each direction.
        transforms: Bᵀ for data, G for kernels and Aᵀ for outputs, applied in both directions.
    """
    of_data, of_kernels, of_outputs = transforms
    rows, columns = convolution.output_size(*inputs.shape[2:])
    down, across = -(-rows // step), -(-columns // step)
    batch, groups, dtype = inputs.shape[0], convolution.groups, wide(inputs.dtype)
    padded = convolution.padded(inputs, down * step + 2, across * step + 2).to(dtype)
    tiles = padded.unfold(2, step + 2, step).unfold(3, step + 2, step)[:, :, :down, :across]
    data = of_data(tiles.permute(4, 5, 1, 0, 2, 3))
    data = torch.unflatten(data, 2, (groups, convolution.in_group)).flatten(4)
    kernels = of_kernels(weight.to(dtype).permute(2, 3, 0, 1))
    kernels = torch.unflatten(kernels, 2, (groups, convolution.out_group))
    products = kernels.to(inputs.dtype) @ data.to(inputs.dtype)  # (tile, tile, G, O / G, N · tiles)
    outputs = of_outputs(products.to(dtype).flatten(2, 3))
    outputs = torch.unflatten(outputs, 3, (batch, down, across)).permute(3, 2, 4, 0, 5, 1)
    padded_outputs = outputs.reshape(batch, convolution.out_channels, down * step, across * step)
    return padded_outputs[:, :, :rows, :columns]


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

    Names in settings pass through it.

    Raises:
        UserError: there is no such name.
    """
    normalized = "_".join(name.lower().replace("-", " ").replace("_", " ").split())
    if normalized not in valid:
        raise UserError(f"There is no {kind} {name!r}. {did_you_mean(normalized, valid)}")
    return normalized


def misfit(convolution: Convolution, shape: Sequence[int]) -> str | None:
    """Return why no algorithm can take inputs with this shape; None if they fit.

    Layers leave such inputs to torch, which raises its own error.
    """
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

    The rule is c10's `is_channels_last_strides_2d`. Results get the memory format that torch would
    give them.
    """
    least = 0
    for axis in (1, 3, 2, 0):
        if shape[axis] == 0 or strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(1, shape[axis])
    return True


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor after autocast."""
    return tensor.to(_cast_type(tensor.dtype, dtype))


def _cast_type(dtype: torch.dtype, autocast_dtype: torch.dtype) -> torch.dtype:
    """Return the data type after autocast.

    Autocast leaves float64 and non-floating-point types unchanged.
    """
    return autocast_dtype if dtype in (torch.float32, *_HALF) else dtype


def _bare(dtype: torch.dtype) -> str:
    """Return a data type's name, for example `float16`."""
    return str(dtype).removeprefix("torch.")


def _times(numbers: Sequence[int]) -> str:
    """Return sizes for a message, for example `3×3`."""
    return "×".join(map(str, numbers))
