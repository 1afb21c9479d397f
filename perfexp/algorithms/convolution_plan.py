"""Plan: one pass of one convolution by one of cuDNN's algorithms, with everything made that its calls need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from perfexp.algorithms.codes import CODES, Math
from perfexp.algorithms.cudnn import CudnnError, Library, current_device, library
from perfexp.algorithms.passes import Pass
from perfexp.algorithms.replays import Replays
from perfexp.convolutions.convolution import Convolution, Pair


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan is for.

    Attributes:
        inputs: (N, C, H, W).
        weight: (O, C / G, kernel height, kernel width).
        stride: down and across.
        padding: zeros down and across, the same on both sides.
        dilation: down and across.
        groups: G.
        dtype: of all tensors.
        channels_last: whether they lie in memory as NHWC.
        math: in which numbers products may be taken.
        device: index.
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
        """(N, O, height, width)."""
        convolution = Convolution.of(self.weight, self.stride, self.padding, self.dilation, self.groups)
        return (self.inputs[0], self.weight[0], *convolution.output_size(*self.inputs[-2:]))


#: Told of every call of a plan, and how to make it; set while somebody watches.
watcher: Callable[[Plan, Callable[[], torch.Tensor]], torch.Tensor] | None = None


class Plan:
    """Computes one pass. The tensors that it takes are dense and lie as the shape says.

    Args:
        which: pass.
        algorithm: of cuDNN's for that pass.
        shape: what to compute.

    Attributes:
        which: pass.
        algorithm: of cuDNN's.
        workspace_bytes: memory that it takes from torch's allocator during the call.

    Raises:
        CudnnError: cuDNN can't compute it so.
    """

    def __init__(self, which: Pass, algorithm: str, shape: Shape) -> None:
        self.which, self.algorithm = which, algorithm
        self._cudnn = cudnn = library()
        self._code = CODES[which][algorithm]
        self._call = cudnn.run[which]
        self._shape, self._device, self._dtype = shape, shape.device, shape.dtype
        self._replays = Replays(self._enqueue, shape.device)
        self._format = torch.channels_last if shape.channels_last else torch.contiguous_format
        self._result = {Pass.forward: shape.outputs, Pass.backward_data: shape.inputs}.get(which, shape.weight)
        self._first, self._second, self._how, self._out = self._descriptors = descriptors_of(which, shape, cudnn)
        self._one, self._zero = cudnn.one_and_zero(shape.dtype)
        handle = cudnn.handle(shape.device)
        self.workspace_bytes = cudnn.workspace_bytes(which, handle, self._descriptors, self._code)

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The result of the pass, on the current stream.

        Args:
            first: the inputs; for the gradient of the inputs the weights.
            second: the weights; in the backward passes the gradient of the outputs.
        """
        if current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(first, second)
        return self._run(first, second) if watcher is None else watcher(self, partial(self._run, first, second))

    def _run(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self._result, dtype=self._dtype, device=first.device, memory_format=self._format)
        size = self.workspace_bytes
        # given back once the call has been enqueued: whoever gets it next is behind it on the stream
        workspace = torch.empty(size, dtype=torch.uint8, device=first.device) if size else None
        where = 0 if workspace is None else workspace.data_ptr()
        addresses = (first.data_ptr(), second.data_ptr(), out.data_ptr(), where)
        self._replays(addresses)
        return out

    def _enqueue(self, first: int, second: int, out: int, workspace: int) -> None:
        """On the current stream, by the addresses of everything."""
        handle = self._cudnn.handle(self._device)
        status = self._call(
            handle, self._one, self._first, first, self._second, second, self._how, self._code,
            workspace or None, self.workspace_bytes, self._zero, self._out, out,
        )  # fmt: skip
        if status:
            self._cudnn.check(status)


def descriptors_of(which: Pass, shape: Shape, cudnn: Library) -> tuple[int, int, int, int]:
    """Of the two tensors that a pass reads, the convolution, and the tensor that it writes.

    Args:
        which: pass.
        shape: what to compute.
        cudnn: makes them.
    """
    inputs = cudnn.tensor(shape.inputs, shape.dtype, channels_last=shape.channels_last)
    weight = cudnn.filter(shape.weight, shape.dtype, channels_last=shape.channels_last)
    outputs = cudnn.tensor(shape.outputs, shape.dtype, channels_last=shape.channels_last)
    how = cudnn.convolution(shape.padding, shape.stride, shape.dilation, shape.groups, shape.dtype, shape.math)
    if which is Pass.forward:
        return inputs, weight, how, outputs
    if which is Pass.backward_data:
        return weight, outputs, how, inputs
    return inputs, outputs, how, weight


#: Plans, and why there is none.
_plans: dict[Any, Plan | str] = {}


def plan(which: Pass, algorithm: str, shape: Shape) -> Plan:
    """The plan for a shape, made once; so is the answer that there is none.

    Args:
        which: pass.
        algorithm: of cuDNN's for that pass.
        shape: what to compute.

    Raises:
        CudnnError: cuDNN can't compute it so.
    """
    key = (which, algorithm, shape)
    found = _plans.get(key)
    if found is None:
        try:
            found = Plan(which, algorithm, shape)
        except CudnnError as error:
            found = str(error)
        _plans[key] = found
    if isinstance(found, str):
        raise CudnnError(found)
    return found


def guess(which: Pass, shape: Shape, limit: int | None) -> str:
    """The algorithm that cuDNN's heuristic ranks first, of those within the limit.

    Args:
        which: pass.
        shape: what to compute.
        limit: bytes of workspace, or None for any.

    Raises:
        CudnnError: it has none.
    """
    cudnn, names = library(), {code: name for name, code in CODES[which].items()}
    ranked = cudnn.guesses(which, cudnn.handle(shape.device), descriptors_of(which, shape, cudnn))
    for code, size in ranked:
        if limit is None or size <= limit:
            return names[code]
    raise CudnnError("the heuristic has no choice within the limit" if ranked else "the heuristic has no choice")
