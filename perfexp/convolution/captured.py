"""Captured work: CUDA graphs captured with the driver API and launched instead of the work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_ulonglong, c_void_p
from functools import cache
from typing import Any

import torch

from perfexp.errors import PerfexpError

#: CU_STREAM_CAPTURE_MODE_RELAXED: a library may load kernels and allocate memory during capture.
_RELAXED = 2


class CaptureError(PerfexpError):
    """The driver could not capture or launch a graph."""


_SIGNATURES: dict[str, list[Any]] = {
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, POINTER(c_void_p)],
    "cuGraphDestroy": [c_void_p],
    "cuGraphInstantiateWithFlags": [POINTER(c_void_p), c_void_p, c_ulonglong],
    "cuGraphUpload": [c_void_p, c_void_p],
    "cuGraphExecDestroy": [c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


class GraphLaunch:
    """A captured graph, launched as a unit on the same addresses each time.

    Args:
        enqueue: puts the work on torch's current stream. It is called once, with everything in
            memory already.

    Raises:
        CaptureError: the work cannot be captured.
    """

    def __init__(self, enqueue: Callable[[], object], device: torch.device) -> None:
        # torch's profiler sees the runtime's function but not the driver's
        self._launch, self._graph = _runtime().cudaGraphLaunch, c_void_p()
        driver = _driver()
        with _captured(enqueue, device) as graph:
            _check(driver.cuGraphInstantiateWithFlags(byref(self._graph), graph, 0))
        try:  # allocate now, not on the first launch
            _check(driver.cuGraphUpload(self._graph, torch.cuda.current_stream(device).cuda_stream))
        except CaptureError:
            self.destroy()
            raise

    def __call__(self, stream: int) -> None:
        """Launch the graph on the stream with this address.

        Raises:
            CaptureError: the device failed.
        """
        status = self._launch(self._graph, stream)
        if status:
            _check(status)

    def destroy(self) -> None:
        """Free the graph after the device has finished with it; it cannot be launched again."""
        _check(_driver().cuGraphExecDestroy(self._graph))


@contextmanager
def _captured(enqueue: Callable[[], object], device: torch.device) -> Iterator[c_void_p]:
    """Yield a graph of the work enqueued on a separate stream, without running it.

    Raises:
        CaptureError: the work cannot be captured.
    """
    stream = torch.cuda.Stream(device)
    driver, address, graph = _driver(), c_void_p(stream.cuda_stream), c_void_p()
    with torch.cuda.stream(stream):
        _check(driver.cuStreamBeginCapture_v2(address, _RELAXED))
        try:
            enqueue()
        except BaseException:
            if driver.cuStreamEndCapture(address, byref(graph)) == 0 and graph:
                driver.cuGraphDestroy(graph)
            raise
        status = driver.cuStreamEndCapture(address, byref(graph))
    _check(status)
    try:
        yield graph
    finally:
        driver.cuGraphDestroy(graph)


def _check(status: int) -> None:
    if status:
        name = c_char_p()
        _driver().cuGetErrorName(status, byref(name))
        raise CaptureError((name.value or b"an unknown error").decode().removeprefix("CUDA_ERROR_"))


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CaptureError(f"no CUDA driver: {error}") from error
    missing = [name for name in _SIGNATURES if not hasattr(driver, name)]
    if missing:
        raise CaptureError(f"the CUDA driver is too old: {missing[0]} is missing")
    for name, types in _SIGNATURES.items():
        getattr(driver, name).argtypes = types
    return driver


@cache
def _runtime() -> Any:
    """Return the CUDA runtime that torch has loaded; its status codes equal the driver's."""
    version = str(torch.version.cuda)
    for name in (version.partition(".")[0], version):  # CUDA 11's is libcudart.so.11.0
        with suppress(OSError):
            runtime = ctypes.CDLL(f"libcudart.so.{name}")
            break
    else:
        raise CaptureError(f"cannot open torch's CUDA runtime: libcudart.so of CUDA {version}")
    runtime.cudaGraphLaunch.argtypes = [c_void_p, c_void_p]
    return runtime
