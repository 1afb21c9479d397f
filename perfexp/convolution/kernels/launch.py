"""Launches of convolution kernels, prepared once per shape.

A program is one block of threads; the grid is the number of programs in three dimensions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from perfexp.convolution.portable.geometry import Convolution
from perfexp.devices.cuda import CudaDevice
from perfexp.host.cache import cache_folder
from perfexp.timing.turns import Turn

#: Limit for 32-bit offsets, with room for the last tile's overhang.
INT32 = 2**31 - 2**20
#: A later plan must take less than this fraction of the best time; repeated timings differ by less.
_FASTER = 0.95
#: Number of turns per plan.
_TURNS = 2


@dataclass(frozen=True)
class Layout:
    """Shape and strides of a four-dimensional tensor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride())

    @property
    def images(self) -> tuple[int, int, int]:
        """Return the number, height and width of the images."""
        return self.shape[0], self.shape[2], self.shape[3]

    def reach(self, height: int = 0, width: int = 0) -> int:
        """Return the number of elements from first to last.

        Args:
            height: padding rows to add to each image.
            width: padding columns to add to each image.
        """
        batch, channels, rows, columns = self.shape
        sizes = (batch, channels, rows + height, columns + width)
        return sum(size * stride for size, stride in zip(sizes, self.strides, strict=True))


@dataclass(frozen=True, kw_only=True)
class TensorConvolution:
    """A convolution on given tensors.

    Attributes:
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).
        outputs: (N, O, height, width).
        last: whether inputs and outputs are stored as NHWC.
        processors: number of multiprocessors on the device; each needs a program.
        tf32: whether float32 may be multiplied as TF32.
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
        """Return the number of output pixels per channel, over all images."""
        images, rows, columns = self.outputs.images
        return images * rows * columns

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        """Return output pixels in all images, an image and a row, then input height and width."""
        _, rows, columns = self.outputs.images
        return (self.pixels, rows * columns, columns, *self.inputs.images[1:])

    @property
    def wide(self) -> bool:
        """Return whether element offsets need 64 bits."""
        left, right, top, bottom = self.convolution.padding
        reaches = (
            self.inputs.reach(top + bottom, left + right),
            self.weight.reach(),
            self.outputs.reach(),
            self.pixels,
        )
        return max(reaches) > INT32


class Launch:
    """A Triton kernel with all arguments except tensors, which come first.

    The first call compiles it; later calls skip Triton's lookup.

    Args:
        grid: number of programs in three dimensions.
        numbers: integer arguments.
        constants: arguments that are compiled into the kernel.
        warps: warps of 32 threads per program.
        stages: stages of Triton's software pipeline.
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
        self.constants, self.warps = constants, warps
        self._kernel, self._grid, self._rest = kernel, grid, (*numbers, *constants)
        self._options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        self._compiled: Any = None

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch the kernel on the current stream; tensors must be aligned as in the first call."""
        if self._compiled is not None:
            self._compiled(*tensors, *self._rest)
            return
        compiled = self._kernel[self._grid](*tensors, *self._rest, **self._options)
        if compiled is not None:  # the interpreter returns None
            self._compiled = compiled[self._grid]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Computes convolutions with a given shape.

    Attributes:
        launch: function of inputs, weights and outputs; None for empty outputs.
        prepare: function of the weights and a buffer for prepared weights; None if `launch` takes
            the original weights.
        size: number of prepared weights, in data type `dtype`.
    """

    outputs: Layout
    launch: Launch | None = None
    prepare: Launch | None = None
    size: int = 0
    dtype: torch.dtype = torch.float32

    def __call__(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the outputs, (N, O, height, width), for inputs (N, C, H, W).

        Args:
            weight: (O, C / G, kernel height, kernel width).
        """
        layout = self.outputs
        outputs = torch.empty_strided(
            layout.shape, layout.strides, dtype=inputs.dtype, device=inputs.device
        )
        if self.prepare is not None:
            prepared = torch.empty(self.size, dtype=self.dtype, device=weight.device)
            self.prepare(weight, prepared)
            weight = prepared
        if self.launch is not None:
            self.launch(inputs, weight, outputs)
        return outputs


class Choices:
    """The fastest plans by shape, as all processes of this user have found them so far.

    A process reads them once, from lines of a file in the user's cache, and appends its own: a
    model has hundreds, for each of which a `JsonCache` would write the whole file.

    Args:
        software: device and versions, for which the choices hold.
    """

    def __init__(self, software: object) -> None:
        self.path = cache_folder("kernels") / f"{_digest(software)}.jsonl"
        self._places: dict[str, int] = {}
        with suppress(OSError):
            for line in self.path.read_bytes().splitlines():
                with suppress(ValueError, TypeError, OverflowError):  # a damaged line
                    key, place = json.loads(line)
                    self._places[key] = int(place)

    def fastest(
        self, shape: object, plans: Sequence[LaunchPlan], time: Callable[[], LaunchPlan] | None
    ) -> LaunchPlan | None:
        """Return the plan that was the fastest before; without one, time them.

        Args:
            shape: algorithm, layouts and data types, on which the plans depend.
            time: returns the fastest plan; None if timing is impossible now.
        """
        launches = [launch for plan in plans if (launch := plan.launch)]
        key = _digest((shape, [(launch.constants, launch.warps) for launch in launches]))
        place = self._places.get(key, -1)
        if not 0 <= place < len(plans):
            if time is None:
                return None
            place = self._places[key] = plans.index(time())
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps([key, place]) + "\n")
        return plans[place]


def _digest(value: object) -> str:
    """Return a short hash of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def fastest(plans: Sequence[LaunchPlan], inputs: torch.Tensor, weight: torch.Tensor) -> LaunchPlan:
    """Return the fastest working plan; an earlier plan wins a near tie.

    If all plans fail, the last error is raised.
    """
    best, least, failure = None, float("inf"), None
    for plan in plans:
        try:
            seconds = _seconds(plan, inputs, weight)
        except Exception as error:  # a compiler error, or too little memory on this device
            failure = error
            continue
        if best is None or seconds < _FASTER * least:
            best, least = plan, seconds
    if best is None:
        assert failure is not None
        raise failure
    return best


def _seconds(plan: LaunchPlan, inputs: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the shorter of two timed turns, in seconds per call, after a first call."""
    plan(inputs, weight)
    turn = Turn(partial(plan, inputs, weight), _device(inputs.device.index), is_short=True)
    return min(turn() for _ in range(_TURNS))


@cache
def _device(index: int) -> CudaDevice:
    """Return the device for timing, opened once."""
    return CudaDevice(index=index)
