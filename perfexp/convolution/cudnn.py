"""cuDNN as loaded by torch, called through its v7 interface.

That interface has named algorithms, which torch does not expose. The codes for algorithms, math
types and data types come from cudnn_ops.h and cudnn_graph.h, version 9.19. Descriptors and handles
are addresses, held as integers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_size_t, c_void_p
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from perfexp.convolution.coverage import Pass
from perfexp.errors import PerfexpError
from perfexp.models import tf32


class Math(IntEnum):
    """Precision of products (cudnnMathType_t). For float32, all but `fma` permit TF32."""

    default = 0
    tensor_op = 1
    fma = 3


#: cudnnConvolutionFwdAlgo_t, cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdFilterAlgo_t, in
#: code order.
_NAMES = {
    Pass.forward: "implicit_gemm implicit_precomp_gemm gemm direct fft fft_tiling winograd "
    "winograd_nonfused",
    Pass.backward_data: "algo_0 algo_1 fft fft_tiling winograd winograd_nonfused",
    Pass.backward_filter: "algo_0 algo_1 fft algo_3 winograd winograd_nonfused fft_tiling",
}
CODES = {
    pass_type: {name: code for code, name in enumerate(names.split())}
    for pass_type, names in _NAMES.items()
}

#: Closest backward algorithms (data, filter) by forward name. All GEMMs map to the algorithm with a
#: fixed summation order and tensor-core support.
BACKWARD = {
    **dict.fromkeys(
        ("implicit_gemm", "implicit_precomp_gemm", "gemm", "direct"), ("algo_1", "algo_1")
    ),
    "fft": ("fft", "fft"),
    "fft_tiling": ("fft_tiling", "fft_tiling"),
    "winograd": ("winograd", "winograd_nonfused"),
    "winograd_nonfused": ("winograd_nonfused", "winograd_nonfused"),
}

#: Algorithms with a summation order that differs from call to call (NVIDIA's documentation of the
#: enumerations).
UNREPEATABLE = {
    (Pass.backward_data, "algo_0"),
    (Pass.backward_filter, "algo_0"),
    (Pass.backward_filter, "algo_3"),
}

#: cudnnDataType_t.
DATA_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}


def math_of(dtype: torch.dtype) -> Math:
    """Return the math type that torch permits.

    For float32 torch's TF32 flag for convolutions decides; half precisions use tensor cores. Plans
    get it, so that cuDNN rounds as torch does.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return Math.tensor_op
    return Math.fma if dtype is torch.float32 and not tf32.allowed()[1] else Math.default


_NCHW, _NHWC = 0, 1
_CROSS_CORRELATION = 1
#: Number of choices requested from the heuristic: more than there are algorithms.
_CHOICES = 10

#: cuDNN's names of the passes.
ENTRY = {
    Pass.forward: "Forward",
    Pass.backward_data: "BackwardData",
    Pass.backward_filter: "BackwardFilter",
}

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
}
for _entry in ENTRY.values():
    _descriptors = [c_void_p] * 5  # handle, two tensors that are read, convolution, result
    _SIGNATURES |= {
        f"cudnnGetConvolution{_entry}WorkspaceSize": [*_descriptors, c_int, POINTER(c_size_t)],
        f"cudnnGetConvolution{_entry}Algorithm_v7": [
            *_descriptors,
            c_int,
            POINTER(c_int),
            c_void_p,
        ],
        # factors, descriptors with addresses, algorithm, workspace
        f"cudnnConvolution{_entry}": [
            *[c_void_p] * 7,
            c_int,
            c_void_p,
            c_size_t,
            *[c_void_p] * 3,
        ],
    }


class CudnnError(PerfexpError):
    """cuDNN refused a call."""


class _Choice(ctypes.Structure):
    """cudnnConvolutionFwdAlgoPerf_t; the structures for backward passes have the same layout."""

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
    """cuDNN's functions, called with ctypes.

    Args:
        functions: the loaded library; tests pass a scripted one.

    Raises:
        CudnnError: a function is missing; methods raise it for any status other than success.
    """

    def __init__(self, functions: Any) -> None:
        missing = [name for name in _SIGNATURES if not hasattr(functions, name)]
        if missing:
            raise CudnnError(
                f"this cuDNN has no v7 interface: {missing[0]} and {len(missing) - 1} more are "
                "missing"
            )
        for name, types in _SIGNATURES.items():
            getattr(functions, name).argtypes = types
        functions.cudnnGetErrorString.restype = c_char_p
        self._functions = functions
        self._handles: dict[tuple[int, int], int] = {}
        self._streams: dict[int, int] = {}
        self.run = {
            pass_type: getattr(functions, f"cudnnConvolution{name}")
            for pass_type, name in ENTRY.items()
        }
        self._constants = {kind: (byref(kind(1)), byref(kind(0))) for kind in (c_float, c_double)}

    def check(self, status: int) -> None:
        """Raise `CudnnError` unless the status is success."""
        if status:
            text = self._functions.cudnnGetErrorString(status)
            raise CudnnError(text.decode().removeprefix("CUDNN_STATUS_"))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by name.

        Raises:
            CudnnError: the function fails.
        """
        self.check(getattr(self._functions, name)(*arguments))

    def handle(self, device: int) -> int:
        """Return this thread's handle for a device index, bound to torch's current stream there.

        Two threads must not use a handle at a time, and the backward pass has its own thread.
        """
        key = (device, threading.get_ident())
        handle = self._handles.get(key)
        if handle is None:
            pointer = c_void_p()
            with nullcontext() if device == current_device() else torch.cuda.device(device):
                self.call("cudnnCreate", byref(pointer))
            assert pointer.value is not None
            handle = self._handles[key] = pointer.value
        stream = current_stream(device)
        if stream != self._streams.get(handle):
            self.call("cudnnSetStream", handle, stream)
            self._streams[handle] = stream
        return handle

    def one_and_zero(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Return scaling factors for the result and its previous value.

        They are float64 for float64, otherwise float32.
        """
        return self._constants[c_double if dtype is torch.float64 else c_float]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, *, channels_last: bool) -> int:
        """Return a descriptor for a dense tensor (N, C, H, W), as NHWC if `channels_last`."""
        descriptor = self._new("Tensor")
        layout = _NHWC if channels_last else _NCHW
        self.call("cudnnSetTensor4dDescriptor", descriptor, layout, DATA_TYPES[dtype], *shape)
        return descriptor

    def filter(self, shape: Sequence[int], dtype: torch.dtype, *, channels_last: bool) -> int:
        """Return a descriptor for dense weights (O, C / G, kernel height, kernel width).

        They are stored as OHWC if `channels_last`.
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
        """Return a convolution descriptor; pairs are (down, across).

        Sums are float32, or float64 for float64. A plan makes one.
        """
        descriptor = self._new("Convolution")
        compute = DATA_TYPES[torch.float64 if dtype is torch.float64 else torch.float32]
        self.call(
            "cudnnSetConvolution2dDescriptor",
            descriptor,
            *padding,
            *stride,
            *dilation,
            _CROSS_CORRELATION,
            compute,
        )
        self.call("cudnnSetConvolutionGroupCount", descriptor, groups)
        self.call("cudnnSetConvolutionMathType", descriptor, math)
        return descriptor

    def workspace_bytes(
        self, pass_type: Pass, handle: int, descriptors: Sequence[int], code: int
    ) -> int:
        """Return the memory that an algorithm needs beyond its tensors.

        Args:
            descriptors: as returned by `descriptors_of`.

        Raises:
            CudnnError: the algorithm cannot compute the pass.
        """
        size = c_size_t()
        self.call(
            f"cudnnGetConvolution{ENTRY[pass_type]}WorkspaceSize",
            handle,
            *descriptors,
            code,
            byref(size),
        )
        return size.value

    def guesses(
        self, pass_type: Pass, handle: int, descriptors: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return algorithm codes and workspace bytes, ranked by cuDNN's heuristic, best first."""
        count, choices = c_int(), (_Choice * _CHOICES)()
        name = f"cudnnGetConvolution{ENTRY[pass_type]}Algorithm_v7"
        self.call(name, handle, *descriptors, _CHOICES, byref(count), ctypes.addressof(choices))
        ranked = choices[: count.value]
        return [(choice.algo, choice.memory) for choice in ranked if choice.status == 0]

    def _new(self, kind: str) -> int:
        """Return a new descriptor: `Tensor`, `Filter` or `Convolution`. It is never freed."""
        pointer = c_void_p()
        self.call(f"cudnnCreate{kind}Descriptor", byref(pointer))
        assert pointer.value is not None
        return pointer.value


#: The index of torch's current device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
#: Whether torch's current stream is being captured.
capturing: Callable[[], bool] = (
    torch.cuda.is_current_stream_capturing if torch.version.cuda else lambda: False
)


def current_stream(device: int) -> int:
    """Return the address of torch's current stream on a device."""
    address: int = torch._C._cuda_getCurrentRawStream(device)
    return address


def why_no_cudnn(device: torch.device) -> str | None:
    """Return why cuDNN's algorithms cannot be chosen on a device; None if they can.

    The text completes a message, for example `cuDNN is for NVIDIA GPUs`.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "cuDNN is for NVIDIA GPUs"
    if not torch.backends.cudnn.is_available():
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
    """Return the cuDNN library that torch has loaded.

    Raises:
        CudnnError: there is no cuDNN, or it lacks the v7 interface.
    """
    version = torch.backends.cudnn.version()
    if version is None:
        raise CudnnError("this torch has no cuDNN")
    # since 9.0 the version is major * 10000 + minor * 100 + patch, before it was major * 1000
    major = version // 10000 if version >= 90000 else version // 1000
    try:
        return Library(ctypes.CDLL(f"libcudnn.so.{major}"))
    except OSError as error:
        raise CudnnError(f"cannot open torch's cuDNN: {error}") from error
