"""cuDNN as torch has loaded it, by its v7 interface, in which algorithms have names; torch does not offer it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch

from perfexp.algorithms.codes import DATA_TYPES, Math
from perfexp.algorithms.passes import Pass
from perfexp.errors import PerfexpError

_NCHW, _NHWC = 0, 1
_CROSS_CORRELATION = 1
#: Choices of the heuristic that are asked for: more than there are algorithms.
_CHOICES = 10

#: What cuDNN calls the passes.
ENTRY = {Pass.forward: "Forward", Pass.backward_data: "BackwardData", Pass.backward_filter: "BackwardFilter"}

_SIGNATURES: dict[str, list[Any]] = {
    "cudnnCreate": [POINTER(c_void_p)],
    "cudnnSetStream": [c_void_p, c_void_p],
    "cudnnCreateTensorDescriptor": [POINTER(c_void_p)],
    "cudnnSetTensor4dDescriptor": [c_void_p, *[c_int] * 6],
    "cudnnCreateFilterDescriptor": [POINTER(c_void_p)],
    "cudnnSetFilter4dDescriptor": [c_void_p, *[c_int] * 6],
    "cudnnCreateConvolutionDescriptor": [POINTER(c_void_p)],
    "cudnnSetConvolution2dDescriptor": [c_void_p, *[c_int] * 8],
    "cudnnSetConvolutionMathType": [c_void_p, c_int],
    "cudnnSetConvolutionGroupCount": [c_void_p, c_int],
    **{
        f"cudnnGetConvolution{name}WorkspaceSize": [c_void_p] * 5 + [c_int, POINTER(c_size_t)]
        for name in ENTRY.values()
    },
    **{
        f"cudnnGetConvolution{name}Algorithm_v7": [c_void_p] * 5 + [c_int, POINTER(c_int), c_void_p]
        for name in ENTRY.values()
    },
    **{
        f"cudnnConvolution{name}": [c_void_p] * 7 + [c_int, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p]
        for name in ENTRY.values()
    },
}


class CudnnError(PerfexpError):
    """cuDNN refused a call."""


class _Choice(ctypes.Structure):
    """cudnnConvolutionFwdAlgoPerf_t and its two sisters, which are laid out alike."""

    _fields_ = (
        ("algo", c_int),
        ("status", c_int),
        ("time", c_float),
        ("memory", c_size_t),
        ("determinism", c_int),
        ("math_type", c_int),
        ("reserved", c_int * 3),
    )


class Library:
    """cuDNN's functions, checked: a status other than success is a `CudnnError`.

    Args:
        functions: what has them as attributes.

    Attributes:
        run: the convolution of each pass.

    Raises:
        CudnnError: it lacks some.
    """

    def __init__(self, functions: Any) -> None:
        missing = [name for name in _SIGNATURES if not hasattr(functions, name)]
        if missing:
            raise CudnnError(f"this cuDNN has no v7 interface: {missing[0]} and {len(missing) - 1} more are missing")
        for name, types in _SIGNATURES.items():
            getattr(functions, name).argtypes = types
        functions.cudnnGetErrorString.restype = c_char_p
        self._functions = functions
        self._handles: dict[tuple[int, int], _Handle] = {}
        self.run = {each: getattr(functions, f"cudnnConvolution{name}") for each, name in ENTRY.items()}
        self._constants = {kind: (byref(kind(1)), byref(kind(0))) for kind in (c_float, c_double)}

    def check(self, status: int) -> None:
        """Nothing, if a call went well.

        Args:
            status: that it returned.

        Raises:
            CudnnError: it did not.
        """
        if status:
            text = self._functions.cudnnGetErrorString(status)
            raise CudnnError(text.decode().removeprefix("CUDNN_STATUS_"))

    def call(self, name: str, *arguments: Any) -> None:
        """A function by its name.

        Args:
            name: of the function.
            arguments: its own.

        Raises:
            CudnnError: it refused.
        """
        self.check(getattr(self._functions, name)(*arguments))

    def handle(self, device: int) -> int:
        """The handle for a device in this thread, at work on torch's current stream there.

        A handle may be used by one thread at a time, and the backward pass has a thread of its own.

        Args:
            device: index.
        """
        key = (device, threading.get_ident())
        handle = self._handles.get(key)
        if handle is None:
            made = c_void_p()
            with nullcontext() if device == current_device() else torch.cuda.device(device):
                self.call("cudnnCreate", byref(made))
            assert made.value is not None
            handle = self._handles[key] = _Handle(made.value)
        stream = current_stream(device)
        if stream != handle.stream:
            self.call("cudnnSetStream", handle.address, stream)
            handle.stream = stream
        return handle.address

    def one_and_zero(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """By how much a result is multiplied, and what was there before: float64 for float64, otherwise float32."""
        return self._constants[c_double if dtype is torch.float64 else c_float]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, channels_last: bool) -> int:
        """A descriptor of a dense tensor.

        Args:
            shape: (N, C, H, W).
            dtype: of its numbers.
            channels_last: whether it lies in memory as NHWC.
        """
        descriptor = self._new("Tensor")
        layout = _NHWC if channels_last else _NCHW
        self.call("cudnnSetTensor4dDescriptor", descriptor, layout, DATA_TYPES[dtype], *shape)
        return descriptor

    def filter(self, shape: Sequence[int], dtype: torch.dtype, *, channels_last: bool) -> int:
        """A descriptor of dense weights.

        Args:
            shape: (O, C / G, kernel height, kernel width).
            dtype: of their numbers.
            channels_last: whether they lie in memory as OHWC.
        """
        descriptor = self._new("Filter")
        layout = _NHWC if channels_last else _NCHW
        self.call("cudnnSetFilter4dDescriptor", descriptor, DATA_TYPES[dtype], layout, *shape)
        return descriptor

    def convolution(
        self,
        padding: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        dtype: torch.dtype,
        math: Math,
    ) -> int:
        """A descriptor of a convolution; sums are kept in float32, those of float64 in float64.

        Args:
            padding: zeros down and across.
            stride: down and across.
            dilation: likewise.
            groups: G.
            dtype: of the tensors.
            math: in which numbers products may be taken.
        """
        descriptor = self._new("Convolution")
        compute = DATA_TYPES[torch.float64 if dtype is torch.float64 else torch.float32]
        self.call(
            "cudnnSetConvolution2dDescriptor", descriptor, *padding, *stride, *dilation, _CROSS_CORRELATION, compute
        )
        self.call("cudnnSetConvolutionGroupCount", descriptor, groups)
        self.call("cudnnSetConvolutionMathType", descriptor, math)
        return descriptor

    def workspace_bytes(self, which: Pass, handle: int, descriptors: Sequence[int], code: int) -> int:
        """How much memory an algorithm wants beside what it reads and writes.

        Args:
            which: pass.
            handle: of the device.
            descriptors: of the two tensors that are read, the convolution, and the tensor that is written.
            code: of the algorithm.

        Raises:
            CudnnError: the algorithm can't compute it.
        """
        size = c_size_t()
        self.call(f"cudnnGetConvolution{ENTRY[which]}WorkspaceSize", handle, *descriptors, code, byref(size))
        return size.value

    def guesses(self, which: Pass, handle: int, descriptors: Sequence[int]) -> list[tuple[int, int]]:
        """Algorithms as cuDNN's heuristic ranks them, the best first, with the bytes of workspace that each wants.

        Args:
            which: pass.
            handle: of the device.
            descriptors: of the two tensors that are read, the convolution, and the tensor that is written.
        """
        count, choices = c_int(), (_Choice * _CHOICES)()
        name = f"cudnnGetConvolution{ENTRY[which]}Algorithm_v7"
        self.call(name, handle, *descriptors, _CHOICES, byref(count), ctypes.addressof(choices))
        return [(each.algo, each.memory) for each in choices[: count.value] if each.status == 0]

    def _new(self, kind: str) -> int:
        made = c_void_p()
        self.call(f"cudnnCreate{kind}Descriptor", byref(made))
        assert made.value is not None
        return made.value


class _Handle:
    """A handle, and the stream on which it works."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.stream: int | None = None


#: The index of torch's current device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
#: Whether torch's current stream is being captured.
capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False


def current_stream(device: int) -> int:
    """The address of torch's current stream.

    Args:
        device: index.
    """
    address: int = torch._C._cuda_getCurrentRawStream(device)
    return address


def why_no_cudnn(device: torch.device) -> str | None:
    """Why no algorithm of cuDNN can be named on a device; None if it can.

    Args:
        device: where to compute.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "cuDNN is for NVIDIA GPUs"
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "this torch has no cuDNN"
    if not torch.backends.cudnn.enabled:
        return "torch.backends.cudnn.enabled is off"
    try:
        library()
    except CudnnError as error:
        return str(error)
    return None


@cache
def library() -> Library:
    """The cuDNN that torch has loaded.

    Raises:
        CudnnError: there is none, or it has no v7 interface.
    """
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if version is None:
        raise CudnnError("this torch has no cuDNN")
    # since 9.0 the version is major * 10000 + minor * 100 + patch, before it was major * 1000
    major = version // 10000 if version >= 90000 else version // 1000
    try:
        return Library(ctypes.CDLL(f"libcudnn.so.{major}"))
    except OSError as error:
        raise CudnnError(f"the cuDNN that torch uses can't be opened: {error}") from error
