"""Winograd kernels: fused F(2 × 2, 3 × 3) with transforms in registers. Imports Triton.

Names are as in `direct_kernels`; `u` are transformed weights. A tile has 4 × 4 input pixels and
gives 2 × 2 outputs. Each product covers a tile's 16 elements at a time. G, Bᵀ and Aᵀ are the
transforms of kernels, data and products.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from perfexp.convolution.kernels.launch import INT32, Launch, LaunchPlan, TensorConvolution

#: Sizes and strides are not specialized, so that a new shape needs a new launch but no compilation.
_SIZES = (
    "tiles", "per_image", "per_row", "height", "width", "rows", "columns", "in_group", "out_group",
    "groups", "blocks", "elements", "outputs", "xn", "xc", "xh", "xw", "wo", "wc", "wh", "ww", "yn",
    "yo", "yh", "yw", "top", "left",
)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _of_kernel(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tuple:
    """Multiply G by a column."""
    outer = 0.5 * (a + c)
    inner = 0.5 * b
    return a, outer + inner, outer - inner, c


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _of_data(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tuple:
    """Multiply Bᵀ by a column."""
    return a - c, b + c, c - b, b - d


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _of_products(four: tl.tensor) -> tl.tuple:
    """Multiply Aᵀ by elements along the last two dimensions, the two bits of an element's index.

    The result has two tensors, one per output row or column.
    """
    even, odd = tl.split(four)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a + b + c, b - c - d


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _joined(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """Join four tensors along two new dimensions, the two bits of an element's index."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _column(
    source: tl.tensor, xh: tl.tensor, first: tl.tensor, second: tl.tensor, third: tl.tensor,
    fourth: tl.tensor,
    inside: tl.tensor, SUM: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Load a column of the data tiles and multiply Bᵀ by it.

    Args:
        source: addresses of the column's first elements.
        xh: stride along the height.
        first: mask of tiles whose first row lies inside the image; the other three are alike.
        inside: mask of tiles and channels whose column lies inside.
    """
    return _of_data(
        tl.load(source, mask=first & inside, other=0.0).to(SUM),
        tl.load(source + xh, mask=second & inside, other=0.0).to(SUM),
        tl.load(source + 2 * xh, mask=third & inside, other=0.0).to(SUM),
        tl.load(source + 3 * xh, mask=fourth & inside, other=0.0).to(SUM),
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _row(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """Multiply a row of the tiles by B, with its elements along two new dimensions."""
    first, second, third, fourth = _of_data(a, b, c, d)
    return _joined(first, second, third, fourth)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel_column(
    source: tl.tensor, wh: tl.tensor, inside: tl.tensor, SUM: tl.constexpr
) -> tl.tuple:
    """Load a column of the 3 × 3 kernels and multiply G by it."""
    return _of_kernel(
        tl.load(source, mask=inside, other=0.0).to(SUM),
        tl.load(source + wh, mask=inside, other=0.0).to(SUM),
        tl.load(source + 2 * wh, mask=inside, other=0.0).to(SUM),
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _store_row(
    target: tl.tensor,
    elements: tl.tensor,
    inside: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
) -> None:
    """Store a row of the kernels times Gᵀ at its four elements."""
    first, second, third, fourth = _of_kernel(a, b, c)
    tl.store(target, first.to(target.dtype.element_ty), mask=inside)
    tl.store(target + elements, second.to(target.dtype.element_ty), mask=inside)
    tl.store(target + 2 * elements, third.to(target.dtype.element_ty), mask=inside)
    tl.store(target + 3 * elements, fourth.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["w", *_SIZES])  # type: ignore[untyped-decorator,unused-ignore]
def transformed(
    w: tl.tensor, u: tl.tensor, elements: tl.tensor, in_group: tl.tensor, wo: tl.tensor,
    wc: tl.tensor, wh: tl.tensor,
    ww: tl.tensor, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr,
    SUM: tl.constexpr,
) -> None:  # fmt: skip
    """Compute G g Gᵀ for all kernels g: (16, O, C / G rounded up to CHANNELS), zero-padded.

    Args:
        w: kernels.
        u: transformed kernels.
        elements: transformed kernels per element, O times the rounded C / G.
    """
    program = tl.program_id(0)
    if WIDE:
        program, elements = program.to(tl.int64), elements.to(tl.int64)
    element = program * BLOCK + tl.arange(0, BLOCK)
    padded = (in_group + CHANNELS - 1) // CHANNELS * CHANNELS
    o, c = element // padded, element % padded
    within = element < elements
    inside = within & (c < in_group)
    source = w + o * wo + c * wc
    a0, a1, a2, a3 = _kernel_column(source, wh, inside, SUM)
    b0, b1, b2, b3 = _kernel_column(source + ww, wh, inside, SUM)
    c0, c1, c2, c3 = _kernel_column(source + 2 * ww, wh, inside, SUM)
    _store_row(u + element, elements, within, a0, b0, c0)
    _store_row(u + 4 * elements + element, elements, within, a1, b1, c1)
    _store_row(u + 8 * elements + element, elements, within, a2, b2, c2)
    _store_row(u + 12 * elements + element, elements, within, a3, b3, c3)


@triton.jit(do_not_specialize=["x", "y", *_SIZES])  # type: ignore[untyped-decorator,unused-ignore]
def convolved(
    x: tl.tensor, u: tl.tensor, y: tl.tensor, tiles: tl.tensor, per_image: tl.tensor,
    per_row: tl.tensor,
    height: tl.tensor, width: tl.tensor, rows: tl.tensor, columns: tl.tensor, in_group: tl.tensor,
    out_group: tl.tensor,
    groups: tl.tensor, blocks: tl.tensor, xn: tl.tensor, xc: tl.tensor, xh: tl.tensor,
    xw: tl.tensor, yn: tl.tensor,
    yo: tl.tensor, yh: tl.tensor, yw: tl.tensor, top: tl.tensor, left: tl.tensor,
    OUTPUTS: tl.constexpr,
    TILES: tl.constexpr, CHANNELS: tl.constexpr, LAST: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr, SUM: tl.constexpr,
) -> None:  # fmt: skip
    """Compute Aᵀ [Σ U ⊙ (Bᵀ d B)] A for OUTPUTS outputs of TILES tiles d.

    The products of a tile's 16 elements are a single batched `tl.dot`; Triton distributes its
    elements over the warps. Their sums stay in registers until they are transformed. Of two
    dimensions, neighboring threads read and write along the first: tiles, or (LAST) channels.
    WIDEN: widen bfloat16 products for the interpreter. WIDE: compute addresses with 64 bits.

    Args:
        tiles: tiles in all images; `per_image` and `per_row` are those in one image and one row.
        height: input height; `rows` and `columns` are the output's.
        blocks: programs along the output channels of a group.
    """
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
        xc, xh, xw = xc.to(tl.int64), xh.to(tl.int64), xw.to(tl.int64)
    # tiles and outputs of this program
    group, block = program // blocks % groups, program % blocks
    tile = program // (blocks * groups) * TILES + tl.arange(0, TILES)
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    channel = tl.arange(0, CHANNELS)
    element = tl.arange(0, 16)

    # addresses of the transformed weights, one plane per element
    padded = (in_group + CHANNELS - 1) // CHANNELS * CHANNELS
    plane = groups * out_group * padded
    if WIDE:
        plane = plane.to(tl.int64)
    factor = u + (element * plane)[:, None, None]
    factor += ((group * out_group + output) * padded)[None, :, None] + channel[None, None, :]
    is_output = (output < out_group)[None, :, None]

    # addresses of the tiles, and which rows and columns lie inside the images
    if LAST:
        tile, channel, output = tile[None, :], channel[:, None], output[:, None]
    else:
        tile, channel, output = tile[:, None], channel[None, :], output[None, :]
    image, position = tile // per_image, tile % per_image
    row, column = position // per_row * 2, position % per_row * 2
    y0, x0 = row - top, column - left
    is_tile = tile < tiles
    in_row0 = is_tile & (y0 >= 0) & (y0 < height)
    in_row1 = is_tile & (y0 + 1 >= 0) & (y0 + 1 < height)
    in_row2 = is_tile & (y0 + 2 >= 0) & (y0 + 2 < height)
    in_row3 = is_tile & (y0 + 3 >= 0) & (y0 + 3 < height)
    in_column0 = (x0 >= 0) & (x0 < width)
    in_column1 = (x0 + 1 >= 0) & (x0 + 1 < width)
    in_column2 = (x0 + 2 >= 0) & (x0 + 2 < width)
    in_column3 = (x0 + 3 >= 0) & (x0 + 3 < width)
    source = x + (image * xn + y0 * xh + x0 * xw) + (group * in_group + channel) * xc

    total = tl.zeros((16, OUTPUTS, TILES), SUM)
    for first in range(0, in_group, CHANNELS):
        is_channel = first + channel < in_group
        factors = tl.load(factor, mask=is_output, other=0.0)
        a0, a1, a2, a3 = _column(
            source, xh, in_row0, in_row1, in_row2, in_row3, in_column0 & is_channel, SUM
        )
        b0, b1, b2, b3 = _column(
            source + xw, xh, in_row0, in_row1, in_row2, in_row3, in_column1 & is_channel, SUM
        )
        c0, c1, c2, c3 = _column(
            source + 2 * xw, xh, in_row0, in_row1, in_row2, in_row3, in_column2 & is_channel, SUM
        )
        d0, d1, d2, d3 = _column(
            source + 3 * xw, xh, in_row0, in_row1, in_row2, in_row3, in_column3 & is_channel, SUM
        )
        data = _joined(
            _row(a0, b0, c0, d0), _row(a1, b1, c1, d1), _row(a2, b2, c2, d2), _row(a3, b3, c3, d3)
        )
        # (channel, tile, …) or (tile, channel, …) to (element, channel, tile)
        data = (
            tl.permute(data, (4, 5, 2, 3, 0, 1)) if LAST else tl.permute(data, (4, 5, 2, 3, 1, 0))
        )
        data = tl.reshape(data, (16, CHANNELS, TILES)).to(u.dtype.element_ty)
        if WIDEN:
            total = tl.dot(
                factors.to(SUM), data.to(SUM), total, input_precision=PRECISION, out_dtype=SUM
            )
        else:
            total = tl.dot(factors, data, total, input_precision=PRECISION, out_dtype=SUM)
        source += CHANNELS * xc
        factor += CHANNELS

    if LAST:  # (element, output, tile) to (output, tile, …)
        sums = tl.reshape(tl.permute(total, (1, 2, 0)), (OUTPUTS, TILES, 2, 2, 2, 2))
    else:
        sums = tl.reshape(tl.permute(total, (2, 1, 0)), (TILES, OUTPUTS, 2, 2, 2, 2))
    # four outputs per tile, the last ones perhaps outside the image
    left_sums, right_sums = _of_products(sums)
    y00, y10 = _of_products(left_sums)
    y01, y11 = _of_products(right_sums)
    is_stored = is_tile & (output < out_group)
    in_right, in_bottom = column + 1 < columns, row + 1 < rows
    target = y + (image * yn + row * yh + column * yw) + (group * out_group + output) * yo
    tl.store(target, y00.to(y.dtype.element_ty), mask=is_stored)
    tl.store(target + yw, y01.to(y.dtype.element_ty), mask=is_stored & in_right)
    tl.store(target + yh, y10.to(y.dtype.element_ty), mask=is_stored & in_bottom)
    tl.store(target + (yh + yw), y11.to(y.dtype.element_ty), mask=is_stored & in_right & in_bottom)


#: Outputs and tiles per program with sums that fit into registers, found by compiling for sm_80 and
#: sm_90.
_WIDE_TILINGS: tuple[tuple[int, int], ...] = ((32, 32), (64, 16), (32, 16))
_NARROW_TILINGS: tuple[tuple[int, int], ...] = ((16, 32), (16, 16))
_DOUBLE_TILINGS: tuple[tuple[int, int], ...] = ((16, 16),)
_WARPS, _CHANNELS, _BLOCK = 8, 16, 128


def plans(problem: TensorConvolution) -> list[LaunchPlan]:
    """Return ways to compute a 3 × 3 convolution, the likeliest to be fast first.

    Stride and dilation must be 1.
    """
    out_group = problem.convolution.out_group
    if problem.dtype == torch.float64:
        tilings = _DOUBLE_TILINGS
    elif out_group <= _NARROW_TILINGS[0][0]:
        tilings = _NARROW_TILINGS
    else:
        tilings = tuple(tiling for tiling in _WIDE_TILINGS if tiling[0] < 2 * out_group)
    busy = [tiling for tiling in tilings if _programs(problem, *tiling) >= problem.processors]
    idle = sorted(set(tilings) - set(busy), key=lambda tiling: -_programs(problem, *tiling))
    return [_tiled(problem, *tiling) for tiling in (*busy, *idle)]


def _programs(problem: TensorConvolution, outputs: int, tiles: int) -> int:
    """Return the number of programs that cover the problem.

    Args:
        outputs: output channels per program.
        tiles: tiles per program.
    """
    images, rows, columns = problem.outputs.images
    num_tiles = images * -(-rows // 2) * -(-columns // 2)
    along_outputs = -(-problem.convolution.out_group // outputs)
    return -(-num_tiles // tiles) * along_outputs * problem.convolution.groups


def _tiled(problem: TensorConvolution, outputs: int, tiles: int) -> LaunchPlan:
    """Return the plan for a tiling: transform the weights, then compute.

    The numbers and constants are the arguments of `transformed` and `convolved`, in their order.
    """
    convolution = problem.convolution
    in_group, out_group = convolution.in_group, convolution.out_group
    elements = convolution.out_channels * -(-in_group // _CHANNELS) * _CHANNELS
    wide, sums = problem.wide or 16 * elements > INT32, _sum(problem.dtype)
    sizes = (elements, in_group, *problem.weight.strides)
    grid = (-(-elements // _BLOCK), 1, 1)
    transform = Launch(
        kernel=transformed, grid=grid, numbers=sizes, constants=(_BLOCK, _CHANNELS, wide, sums)
    )
    images, rows, columns = problem.outputs.images
    down, across = -(-rows // 2), -(-columns // 2)
    left, _, top, _ = convolution.padding
    places = (images * down * across, down * across, across, *problem.inputs.images[1:])
    counts = (in_group, out_group, convolution.groups, -(-out_group // outputs))
    strides = (*problem.inputs.strides, *problem.outputs.strides)
    numbers = (*places, rows, columns, *counts, *strides, top, left)
    precision = "tf32" if problem.tf32 else "ieee"
    widens = problem.interpreted and problem.dtype == torch.bfloat16
    constants = (outputs, tiles, _CHANNELS, problem.last, wide, precision, widens, sums)
    stages = 2 if problem.dtype in (torch.float16, torch.bfloat16) else 1
    grid = (_programs(problem, outputs, tiles), 1, 1)
    launch = Launch(
        kernel=convolved,
        grid=grid,
        numbers=numbers,
        constants=constants,
        warps=_WARPS,
        stages=stages,
    )
    size, dtype = 16 * elements, problem.dtype
    return LaunchPlan(
        outputs=problem.outputs, launch=launch, prepare=transform, size=size, dtype=dtype
    )


def _sum(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's data type for sums."""
    return tl.float64 if dtype == torch.float64 else tl.float32
