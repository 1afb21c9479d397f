"""Plans: a single convolution pass by a cuDNN algorithm, with all descriptors made in advance.

A cuDNN descriptor describes a tensor or a convolution to the library. `plan` caches plans by shape,
so that a model's calls only pass addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES, CudnnError, Library, Math, current_device, library
from perfexp.convolution.portable.geometry import Convolution, Pair
from perfexp.convolution.replays import Replays


@dataclass(frozen=True, slots=True)
class Shape:
    """The problem that a plan solves; pairs are (down, across).

    Attributes:
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).
        padding: zeros on each side.
        channels_last: whether the tensors are stored as NHWC.
    """

    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    dtype: torch.dtype
    channels_last: bool
    math: Math
    device: int

    @property
    def outputs(self) -> tuple[int, int, int, int]:
        """Return the output shape, (N, O, height, width)."""
        convolution = Convolution.of(
            self.weight, self.stride, self.padding, self.dilation, self.groups
        )
        return (self.inputs[0], self.weight[0], *convolution.output_size(*self.inputs[-2:]))


#: Called with every plan and its run function instead of the run; set while kernels are recorded.
watcher: Callable[[ConvolutionPlan, Callable[[], torch.Tensor]], torch.Tensor] | None = None


class ConvolutionPlan:
    """Computes a pass for dense tensors in the shape's memory format.

    `workspace_bytes` is the memory that a call takes from torch's allocator. Repeated addresses are
    launched as a CUDA graph, see `replays`.

    Raises:
        CudnnError: cuDNN cannot compute the pass by this algorithm.
    """

    def __init__(self, pass_type: Pass, algorithm: str, shape: Shape) -> None:
        self.which, self.algorithm = pass_type, algorithm
        self._cudnn = cudnn = library()
        self._code = CODES[pass_type][algorithm]
        self._call = cudnn.run[pass_type]
        self._shape, self._device, self._dtype = shape, shape.device, shape.dtype
        self._replays = Replays(self._enqueue, shape.device)
        self._format = torch.channels_last if shape.channels_last else torch.contiguous_format
        results = {Pass.forward: shape.outputs, Pass.backward_data: shape.inputs}
        self._result = results.get(pass_type, shape.weight)
        self._descriptors = descriptors_of(pass_type, shape, cudnn)
        self._first, self._second, self._convolution, self._out = self._descriptors
        self._one, self._zero = cudnn.one_and_zero(shape.dtype)
        handle = cudnn.handle(shape.device)
        self.workspace_bytes = cudnn.workspace_bytes(
            pass_type, handle, self._descriptors, self._code
        )

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return the pass's result, computed on the current stream.

        Args:
            first: the inputs; for the input gradient, the weights.
            second: the weights; for a gradient, the output gradient.
        """
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(first, second)
        if watcher is None:
            return self._run(first, second)
        return watcher(self, partial(self._run, first, second))

    def _run(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Allocate result and workspace, enqueue the pass, and return the result.

        The arguments are as for `__call__`.
        """
        out = torch.empty(
            self._result, dtype=self._dtype, device=first.device, memory_format=self._format
        )
        size = self.workspace_bytes
        # freed after enqueueing; stream order protects it from its next user
        workspace = torch.empty(size, dtype=torch.uint8, device=first.device) if size else None
        workspace_address = 0 if workspace is None else workspace.data_ptr()
        self._replays((first.data_ptr(), second.data_ptr(), out.data_ptr(), workspace_address))
        return out

    def _enqueue(self, first: int, second: int, out: int, workspace: int) -> None:
        """Call cuDNN with the addresses of tensors and workspace.

        Raises `CudnnError` if cuDNN refuses.
        """
        handle = self._cudnn.handle(self._device)
        status = self._call(
            handle, self._one, self._first, first, self._second, second, self._convolution,
            self._code, workspace or None, self.workspace_bytes, self._zero, self._out, out,
        )  # fmt: skip
        if status:
            self._cudnn.check(status)


def descriptors_of(pass_type: Pass, shape: Shape, cudnn: Library) -> tuple[int, int, int, int]:
    """Return four cuDNN descriptors: two tensors that a pass reads, the convolution, the result.

    cuDNN's functions for all passes take them in this order.
    """
    inputs = cudnn.tensor(shape.inputs, shape.dtype, channels_last=shape.channels_last)
    weight = cudnn.filter(shape.weight, shape.dtype, channels_last=shape.channels_last)
    outputs = cudnn.tensor(shape.outputs, shape.dtype, channels_last=shape.channels_last)
    convolution = cudnn.convolution(
        shape.padding, shape.stride, shape.dilation, shape.groups, shape.dtype, shape.math
    )
    if pass_type is Pass.forward:
        return inputs, weight, convolution, outputs
    if pass_type is Pass.backward_data:
        return weight, outputs, convolution, inputs
    return inputs, outputs, convolution, weight


#: Plans, or the reason for a refusal.
_plans: dict[Any, ConvolutionPlan | str] = {}


def plan(pass_type: Pass, algorithm: str, shape: Shape) -> ConvolutionPlan:
    """Return the plan for a shape, from the cache if possible; refusals are cached, too.

    Raises:
        CudnnError: cuDNN refuses.
    """
    key = (pass_type, algorithm, shape)
    cached = _plans.get(key)
    if cached is None:
        try:
            cached = ConvolutionPlan(pass_type, algorithm, shape)
        except CudnnError as error:
            cached = str(error)
        _plans[key] = cached
    if isinstance(cached, str):
        raise CudnnError(cached)
    return cached


def guess(pass_type: Pass, shape: Shape, limit: int | None) -> str:
    """Return the name of the algorithm that cuDNN's heuristic ranks first.

    `algorithm=guess` uses it.

    Args:
        limit: maximum workspace in bytes; None for no limit.

    Raises:
        CudnnError: the heuristic has no choice within the limit.
    """
    cudnn, names = library(), {code: name for name, code in CODES[pass_type].items()}
    ranked = cudnn.guesses(
        pass_type, cudnn.handle(shape.device), descriptors_of(pass_type, shape, cudnn)
    )
    for code, size in ranked:
        if limit is None or size <= limit:
            return names[code]
    condition = " within the limit" if ranked else ""
    raise CudnnError(f"the heuristic has no choice{condition}")
