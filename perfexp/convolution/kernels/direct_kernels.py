"""Direct kernels: every output is a sum of products, in register tiles. Imports Triton.

Names in the kernels: `x` inputs, `w` weights, `p` rearranged weights, `y` outputs. `xn`, `xc`, `xh`
and `xw` are strides of `x` along batch, channel, height and width, in elements; the other tensors'
are alike. A quad is four neighboring output channels, a tap one position in the filter.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from perfexp.convolution.kernels.launch import INT32, Launch, LaunchPlan, TensorConvolution
from perfexp.convolution.portable.geometry import wide as wide_type

#: Sizes and strides are not specialized, so that a new shape needs a new launch but no compilation.
_SIZES = (
    "pixels", "plane", "columns", "height", "width", "in_group", "out_group", "groups", "quads",
    "blocks", "xn", "xc", "xh", "xw", "wo", "wc", "wh", "ww", "yn", "yo", "yh", "yw", "down",
    "across", "top", "left", "high", "wide", "kernel_height", "kernel_width", "outputs", "taps",
    "multiple",
)  # fmt: skip


@triton.jit(do_not_specialize=["w", *_SIZES])  # type: ignore[untyped-decorator,unused-ignore]
def packed(
    w: tl.tensor, p: tl.tensor, in_group: tl.tensor, out_group: tl.tensor, quads: tl.tensor,
    blocks: tl.tensor,
    kernel_width: tl.tensor, taps: tl.tensor, wo: tl.tensor, wc: tl.tensor, wh: tl.tensor,
    ww: tl.tensor,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Arrange weights for `convolved`, zero-padded.

    The layout is (G, kernel position, C / G, O / G rounded up to quads).

    Args:
        blocks: programs along the output channels of a group.
        taps: kernel positions.
    """
    program, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if WIDE:
        program, row = program.to(tl.int64), row.to(tl.int64)
    group, o = program // blocks, program % blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    c, tap = row // taps, row % taps  # as the weights lie in memory
    inside = (row < in_group * taps)[:, None]
    offsets = c * wc + (tap // kernel_width) * wh + (tap % kernel_width) * ww
    source = w + offsets[:, None] + ((group * out_group + o) * wo)[None, :]
    values = tl.load(source, mask=inside & (o < out_group)[None, :], other=0.0)
    target = p + ((group * taps + tap) * in_group + c)[:, None] * (quads * 4) + o[None, :]
    tl.store(target, values.to(p.dtype.element_ty), mask=inside & (o < quads * 4)[None, :])


@triton.jit(do_not_specialize=["x", "y", *_SIZES])  # type: ignore[untyped-decorator,unused-ignore]
def convolved(
    x: tl.tensor, p: tl.tensor, y: tl.tensor, pixels: tl.tensor, plane: tl.tensor,
    columns: tl.tensor,
    height: tl.tensor, width: tl.tensor, in_group: tl.tensor, out_group: tl.tensor,
    groups: tl.tensor, quads: tl.tensor,
    blocks: tl.tensor, xn: tl.tensor, xc: tl.tensor, xh: tl.tensor, xw: tl.tensor, yn: tl.tensor,
    yo: tl.tensor,
    yh: tl.tensor, yw: tl.tensor, down: tl.tensor, across: tl.tensor, top: tl.tensor,
    left: tl.tensor, high: tl.tensor,
    wide: tl.tensor, kernel_height: tl.tensor, kernel_width: tl.tensor, PIXEL_THREADS: tl.constexpr,
    QUAD_THREADS: tl.constexpr, SPLIT: tl.constexpr, PIXELS: tl.constexpr, QUADS: tl.constexpr,
    UNROLL: tl.constexpr,
    LAST: tl.constexpr, WIDE: tl.constexpr, SUM: tl.constexpr,
) -> None:  # fmt: skip
    """Compute PIXELS pixels of 4 · QUADS outputs per thread; SPLIT threads share their channels.

    The first dimension of all tensors is the thread. So Triton keeps a thread's numbers in
    registers, and neighbors read neighboring pixels (LAST: outputs). Kernel positions are the outer
    loop, channels the inner.

    Args:
        pixels: output pixels in all images; `plane` and `columns` are those in one image and one
            row.
        height: input height.
        blocks: programs along the quads of a group.
        down: stride of the convolution along the height; `across` along the width.
        high: dilation along the height; `wide` along the width.
    """
    program = tl.program_id(0)
    if WIDE:
        program, quads = program.to(tl.int64), quads.to(tl.int64)
        xc, xh, xw = xc.to(tl.int64), xh.to(tl.int64), xw.to(tl.int64)
    # pixels and output quads of each thread
    group, block = program // blocks % groups, program % blocks
    thread = tl.arange(0, PIXEL_THREADS * QUAD_THREADS)[:, None, None, None]
    if LAST:
        of_pixel, of_quad = thread // QUAD_THREADS, thread % QUAD_THREADS
    else:
        of_pixel, of_quad = thread % PIXEL_THREADS, thread // PIXEL_THREADS
    more_pixels = tl.arange(0, PIXELS)[None, :, None, None] * PIXEL_THREADS
    more_quads = tl.arange(0, QUADS)[None, None, :, None] * QUAD_THREADS
    pixel = program // (blocks * groups) * (PIXELS * PIXEL_THREADS) + more_pixels + of_pixel
    quad = block * (QUADS * QUAD_THREADS) + more_quads + of_quad
    four = tl.arange(0, 4)[None, None, None, :]

    # addresses of the first input element and weight that each thread reads
    image, position = pixel // plane, pixel % plane
    row, column = position // columns, position % columns
    y_first, x_first = row * down - top, column * across - left
    is_pixel = pixel < pixels
    channels = in_group // SPLIT
    first = tl.arange(0, SPLIT)[None, :, None, None, None] * channels
    corner = image * xn + y_first * xh + x_first * xw
    sources = x + tl.expand_dims(corner, 1) + (group * in_group + first) * xc
    taps = kernel_height * kernel_width
    # beyond the last quad, threads read it again and store nothing
    weights = group * taps * in_group * quads + tl.minimum(quad, quads - 1)
    factors = p + (tl.expand_dims(weights, 1) + first * quads) * 4 + tl.expand_dims(four, 1)

    total = tl.zeros((PIXEL_THREADS * QUAD_THREADS, SPLIT, PIXELS, QUADS, 4), SUM)
    for kernel_row in range(kernel_height):
        y_seen = y_first + kernel_row * high
        in_rows = is_pixel & (y_seen >= 0) & (y_seen < height)
        for kernel_column in range(kernel_width):
            x_seen = x_first + kernel_column * wide
            inside = tl.expand_dims(in_rows & (x_seen >= 0) & (x_seen < width), 1)
            source = sources + (kernel_row * high * xh + kernel_column * wide * xw)
            factor = factors + (kernel_row * kernel_width + kernel_column) * in_group * quads * 4
            for _ in range(0, channels, UNROLL):
                for step in tl.static_range(UNROLL):
                    value = tl.load(source + step * xc, mask=inside, other=0.0).to(SUM)
                    total += value * tl.load(factor + step * quads * 4).to(SUM)
                source += UNROLL * xc
                factor += UNROLL * quads * 4

    output = quad * 4 + four
    target = y + (group * out_group + output) * yo + (image * yn + row * yh + column * yw)
    tl.store(
        target, tl.sum(total, axis=1).to(y.dtype.element_ty), mask=is_pixel & (output < out_group)
    )


@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize=["x", "w", "y", *_SIZES]
)
def convolved_by_channel(
    x: tl.tensor, w: tl.tensor, y: tl.tensor, pixels: tl.tensor, plane: tl.tensor,
    columns: tl.tensor,
    height: tl.tensor, width: tl.tensor, outputs: tl.tensor, multiple: tl.tensor,
    blocks: tl.tensor, xn: tl.tensor,
    xc: tl.tensor, xh: tl.tensor, xw: tl.tensor, wo: tl.tensor, wh: tl.tensor, ww: tl.tensor,
    yn: tl.tensor,
    yo: tl.tensor, yh: tl.tensor, yw: tl.tensor, down: tl.tensor, across: tl.tensor,
    top: tl.tensor, left: tl.tensor,
    high: tl.tensor, wide: tl.tensor, kernel_height: tl.tensor, KERNEL_WIDTH: tl.constexpr,
    PIXEL_THREADS: tl.constexpr,
    OUTPUT_THREADS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr, WIDE: tl.constexpr,
    SUM: tl.constexpr,
) -> None:  # fmt: skip
    """Compute PIXELS pixels of one output per thread, for depthwise convolutions.

    There an output reads a single channel.

    Args:
        outputs: output channels.
        multiple: output channels per input channel.
        blocks: programs along the output channels.
    """
    program = tl.program_id(0)
    if WIDE:
        program, xh, xw = program.to(tl.int64), xh.to(tl.int64), xw.to(tl.int64)
    # pixels and output of each thread
    thread = tl.arange(0, PIXEL_THREADS * OUTPUT_THREADS)[:, None]
    if LAST:
        of_pixel, of_output = thread // OUTPUT_THREADS, thread % OUTPUT_THREADS
    else:
        of_pixel, of_output = thread % PIXEL_THREADS, thread // PIXEL_THREADS
    more_pixels = tl.arange(0, PIXELS)[None, :] * PIXEL_THREADS
    pixel = (program // blocks) * (PIXELS * PIXEL_THREADS) + more_pixels + of_pixel
    output = (program % blocks) * OUTPUT_THREADS + of_output

    # addresses of the first input element and weight that each thread reads
    image, position = pixel // plane, pixel % plane
    row, column = position // columns, position % columns
    y_first, x_first = row * down - top, column * across - left
    is_output = output < outputs
    is_stored = is_output & (pixel < pixels)
    sources = x + (image * xn + y_first * xh + x_first * xw) + (output // multiple) * xc
    factors = w + output * wo

    total = tl.zeros((PIXEL_THREADS * OUTPUT_THREADS, PIXELS), SUM)
    for kernel_row in range(kernel_height):
        y_seen = y_first + kernel_row * high
        in_rows = is_stored & (y_seen >= 0) & (y_seen < height)
        for kernel_column in tl.static_range(KERNEL_WIDTH):
            x_seen = x_first + kernel_column * wide
            inside = in_rows & (x_seen >= 0) & (x_seen < width)
            source = sources + (kernel_row * high * xh + kernel_column * wide * xw)
            factor = factors + (kernel_row * wh + kernel_column * ww)
            value = tl.load(source, mask=inside, other=0.0).to(SUM)
            total += value * tl.load(factor, mask=is_output, other=0.0).to(SUM)

    target = y + output * yo + (image * yn + row * yh + column * yw)
    tl.store(target, total.to(y.dtype.element_ty), mask=is_stored)


@dataclass(frozen=True)
class _Tiling:
    """How a program divides its work.

    Attributes:
        pixel_threads: threads along pixels.
        quad_threads: threads along quads of output channels.
        split: threads that share the input channels of an output.
        pixels: pixels per thread.
        quads: quads per thread.
    """

    pixel_threads: int
    quad_threads: int
    split: int
    pixels: int
    quads: int

    def fitted(self, problem: TensorConvolution) -> _Tiling:
        """Return the tiling narrowed to a group's outputs.

        Freed threads move to pixels, and channels are shared evenly.
        """
        quads = triton.next_power_of_2(-(-problem.convolution.out_group // 4))
        width, along_quads = min(self.quads, quads), min(self.quad_threads, quads)
        while width * along_quads > quads:
            if width > 1:
                width //= 2
            else:
                along_quads //= 2
        split = self.split
        while problem.convolution.in_group % split:
            split //= 2
        threads = self.pixel_threads * self.quad_threads // along_quads
        return replace(
            self, pixel_threads=threads, quad_threads=along_quads, split=split, quads=width
        )

    def programs(self, problem: TensorConvolution) -> int:
        """Return the number of programs that cover the problem."""
        along_outputs = -(-problem.convolution.out_group // (4 * self.quad_threads * self.quads))
        along_pixels = -(-problem.pixels // (self.pixel_threads * self.pixels))
        return along_pixels * along_outputs * problem.convolution.groups


#: From the most work per byte to the most programs, by whether neighboring threads have neighboring
#: outputs.
_TILINGS = {
    False: (
        _Tiling(16, 8, 1, 8, 2),
        _Tiling(32, 4, 1, 4, 2),
        _Tiling(16, 4, 4, 2, 1),
        _Tiling(8, 4, 8, 2, 1),
    ),
    True: (
        _Tiling(8, 16, 1, 8, 2),
        _Tiling(8, 16, 1, 4, 1),
        _Tiling(8, 8, 4, 2, 1),
        _Tiling(4, 8, 8, 2, 1),
    ),
}
#: Minimum number of outputs per channel that share channel reads.
_SHARING = 4
#: Widest kernel with unrolled columns.
_WIDEST = 16
_THREADS, _ROWS, _OUTPUTS = 128, 64, 64


def plans(problem: TensorConvolution) -> list[LaunchPlan]:
    """Return ways to compute a convolution, the likeliest to be fast first.

    Large tiles reuse more data, but a device with more processors than programs stays partly idle.
    """
    convolution = problem.convolution
    if (
        convolution.in_group == 1
        and convolution.out_group < _SHARING
        and convolution.kernel[1] <= _WIDEST
    ):
        return [_by_channel(problem)]
    large, medium, small, least = (tiling.fitted(problem) for tiling in _TILINGS[problem.last])
    if problem.dtype != torch.float64 and large.programs(problem) >= 2 * problem.processors:
        chosen = [large, medium]
    elif medium.programs(problem) >= problem.processors:
        chosen = [medium, small]
    else:
        chosen = [small, least] if small.programs(problem) >= problem.processors else [least, small]
    return [_tiled(problem, tiling) for tiling in dict.fromkeys(chosen)]


def _tiled(problem: TensorConvolution, tiling: _Tiling) -> LaunchPlan:
    """Return the plan for a tiling: rearrange the weights, then compute.

    The numbers and constants are the arguments of `packed` and `convolved`, in their order.
    """
    convolution = problem.convolution
    kernel_height, kernel_width = convolution.kernel
    in_group, out_group = convolution.in_group, convolution.out_group
    taps, quads, groups = kernel_height * kernel_width, -(-out_group // 4), convolution.groups
    size = groups * taps * in_group * quads * 4
    wide, sums = problem.wide or size > INT32, wide_type(problem.dtype)
    # programs that rearrange the weights
    columns_of_outputs = -(-quads * 4 // _OUTPUTS)
    counts = (in_group, out_group, quads, columns_of_outputs)
    sizes = (*counts, kernel_width, taps, *problem.weight.strides)
    grid = (groups * columns_of_outputs, -(-in_group * taps // _ROWS), 1)
    pack = Launch(kernel=packed, grid=grid, numbers=sizes, constants=(_ROWS, _OUTPUTS, wide))
    # programs that compute
    channels = in_group // tiling.split
    unroll = next(count for count in (4, 3, 2, 1) if channels % count == 0)
    constants = (*astuple(tiling), unroll, problem.last, wide, _sum(problem.dtype))
    blocks = -(-quads // (tiling.quad_threads * tiling.quads))
    group_counts = (in_group, out_group, groups, quads, blocks)
    numbers = (*problem.places, *group_counts, *_window(problem), *convolution.kernel)
    warps = tiling.pixel_threads * tiling.quad_threads * tiling.split // 32
    grid = (tiling.programs(problem), 1, 1)
    launch = Launch(kernel=convolved, grid=grid, numbers=numbers, constants=constants, warps=warps)
    return LaunchPlan(outputs=problem.outputs, launch=launch, prepare=pack, size=size, dtype=sums)


def _by_channel(problem: TensorConvolution) -> LaunchPlan:
    """Return the plan for depthwise convolutions, which takes the weights as they are.

    The numbers and constants are the arguments of `convolved_by_channel`, in their order.
    """
    convolution = problem.convolution
    outputs = convolution.out_channels
    # channels last: neighboring threads read neighboring channels, otherwise neighboring pixels
    output_threads = min(32, triton.next_power_of_2(outputs)) if problem.last else 1
    pixel_threads = _THREADS // output_threads
    # few pixels are spread over more threads
    pixels = 4 if problem.pixels > pixel_threads else 1
    blocks = -(-outputs // output_threads)
    grid = (-(-problem.pixels // (pixel_threads * pixels)) * blocks, 1, 1)
    along_outputs, _, down, across = problem.weight.strides
    weight_strides = (along_outputs, down, across)
    window = _window(problem)
    kernel_height, kernel_width = convolution.kernel
    counts = (outputs, convolution.out_group, blocks)
    # the kernel takes the weights' strides between those of inputs and outputs
    numbers = (
        *problem.places,
        *counts,
        *window[:4],
        *weight_strides,
        *window[4:],
        kernel_height,
    )
    tile = (kernel_width, pixel_threads, output_threads, pixels)
    constants = (*tile, problem.last, problem.wide, _sum(problem.dtype))
    launch = Launch(kernel=convolved_by_channel, grid=grid, numbers=numbers, constants=constants)
    return LaunchPlan(outputs=problem.outputs, launch=launch)


def _window(problem: TensorConvolution) -> tuple[int, ...]:
    """Return input and output strides, then the kernel's stride, padding and dilation."""
    convolution = problem.convolution
    left, _, top, _ = convolution.padding
    strides = (*problem.inputs.strides, *problem.outputs.strides)
    return *strides, *convolution.stride, top, left, *convolution.dilation


def _sum(dtype: torch.dtype) -> tl.dtype:
    """Return Triton's data type for sums."""
    return tl.float64 if dtype == torch.float64 else tl.float32
