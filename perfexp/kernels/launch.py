"""Launch: what a convolution looks like to a kernel, and the launches that compute it, made once for a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from perfexp.convolutions.convolution import Convolution

#: Numbers of elements up to here are counted in 32 bits; what a last tile counts beyond fits above.
INT32 = 2**31 - 2**20
#: How much faster than the one before it a way must be to be chosen: timing the same twice differs by less.
_FASTER = 0.95
#: Calls that are timed, and how often.
_CALLS, _ROUNDS = 3, 2


@dataclass(frozen=True)
class Layout:
    """Shape and strides of a tensor of four dimensions."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride())

    @property
    def images(self) -> tuple[int, int, int]:
        """How many, their height and width."""
        return self.shape[0], self.shape[2], self.shape[3]

    def reach(self, height: int = 0, width: int = 0) -> int:
        """Elements from the first to the last, images being larger by zeros around them.

        Args:
            height: of the zeros, above and below.
            width: of the zeros, left and right.
        """
        batch, channels, rows, columns = self.shape
        sizes = (batch, channels, rows + height, columns + width)
        return sum(size * stride for size, stride in zip(sizes, self.strides, strict=True))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A convolution of tensors.

    Attributes:
        convolution: what to compute.
        dtype: of all tensors.
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).
        outputs: (N, O, height, width).
        last: whether the channels of inputs and outputs are next to each other in memory.
        processors: of the device, each of which wants a program.
        tf32: whether float32 may be multiplied as TF32.
        interpreted: whether Triton's interpreter runs the kernels.
    """

    convolution: Convolution
    dtype: torch.dtype
    inputs: Layout
    weight: Layout
    outputs: Layout
    last: bool
    processors: int
    tf32: bool = False
    interpreted: bool = False

    @property
    def pixels(self) -> int:
        """Of all outputs of a channel."""
        images, rows, columns = self.outputs.images
        return images * rows * columns

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        """Pixels of all images, of an image and of a row of the outputs; height and width of the inputs."""
        _, rows, columns = self.outputs.images
        return (self.pixels, rows * columns, columns, *self.inputs.images[1:])

    @property
    def wide(self) -> bool:
        """Whether elements are to be counted in 64 bits."""
        left, right, top, bottom = self.convolution.padding
        reaches = self.inputs.reach(top + bottom, left + right), self.weight.reach(), self.outputs.reach(), self.pixels
        return max(reaches) > INT32


class Launch:
    """A kernel with all of its arguments but tensors. The first call compiles it, later calls skip Triton's search.

    Args:
        kernel: what `triton.jit` made; takes tensors, numbers and constants in this order.
        grid: how many programs.
        numbers: sizes and strides.
        constants: what the kernel is compiled for.
        warps: of 32 threads.
        stages: of the loop's loads.
    """

    def __init__(
        self,
        *,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int = 4,
        stages: int = 1,
    ) -> None:
        self.constants = constants
        self._kernel, self._grid, self._rest = kernel, grid, (*numbers, *constants)
        self._options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        self._compiled: Any = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch it on the current stream.

        Args:
            tensors: aligned as those of the first call where the kernel is compiled for that.
        """
        if self._compiled is not None:
            self._compiled(*tensors, *self._rest)
            return
        compiled = self._kernel[self._grid](*tensors, *self._rest, **self._options)
        if compiled is not None:  # as the interpreter returns
            self._compiled = compiled[self._grid]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to compute a convolution.

    Attributes:
        launch: takes inputs, weights and outputs.
        prepare: takes the weights and what `launch` is to have instead of them; None if it has them as they are.
        size: of what it is to have, in elements.
        dtype: likewise.
    """

    launch: Launch
    prepare: Launch | None = None
    size: int = 0
    dtype: torch.dtype = torch.float32


class Plan:
    """Computes the convolutions of a shape by a recipe.

    Args:
        recipe: None where there is nothing to compute.
        outputs: a tensor like those that are returned; its device does not matter.
    """

    def __init__(self, recipe: Recipe | None, outputs: torch.Tensor) -> None:
        self._recipe, self._shape, self._strides = recipe, tuple(outputs.shape), outputs.stride()

    @property
    def constants(self) -> tuple[Any, ...]:
        """What its kernel is compiled for: the tile first."""
        return self._recipe.launch.constants if self._recipe else ()

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The outputs.

        Args:
            inputs: (N, C, H, W).
            weight: (O, C / G, kernel height, kernel width).
        """
        outputs = torch.empty_strided(self._shape, self._strides, dtype=inputs.dtype, device=inputs.device)
        recipe = self._recipe
        if recipe is None:
            return outputs
        if recipe.prepare is not None:
            prepared = torch.empty(recipe.size, dtype=recipe.dtype, device=weight.device)
            recipe.prepare(weight, prepared)
            weight = prepared
        recipe.launch(inputs, weight, outputs)
        return outputs


def fastest(plans: Sequence[Plan], inputs: torch.Tensor, weight: torch.Tensor) -> Plan:
    """The plan that takes the least time, an earlier one if it is about the same; one that fails is none.

    Args:
        plans: one or more, for a CUDA device that nothing is captured on.
        inputs: to try them with.
        weight: likewise.
    """
    best, least, failure = None, float("inf"), None
    for plan in plans:
        try:
            seconds = _seconds(plan, inputs, weight)
        except Exception as error:  # of the compiler, or too much memory for this device
            failure = error
            continue
        if best is None or seconds < _FASTER * least:
            best, least = plan, seconds
    if best is None:
        assert failure is not None
        raise failure
    return best


def _seconds(plan: Plan, inputs: torch.Tensor, weight: torch.Tensor) -> float:
    plan(inputs, weight)
    times: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "12")  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_CALLS):
            plan(inputs, weight)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _CALLS)
    return min(times)


def power_of_two(number: int) -> int:
    """The least that is not less.

    Args:
        number: one or more.
    """
    return 1 << (number - 1).bit_length()
