"""Replays: repeated work on the same addresses is launched as a captured graph.

A call of cuDNN's v7 interface builds a plan, enqueues its kernels one by one and discards the plan.
That takes 24 to 148 µs of host time on an H200. Launching a CUDA graph takes 2 to 7 µs for any
number of kernels. The graphs are captured with CUDA's driver API.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, byref, c_char_p, c_int, c_ulonglong, c_void_p
from functools import cache, partial
from typing import Any

import torch

from perfexp.convolution.cudnn import CudnnError, capturing, current_stream
from perfexp.errors import PerfexpError

#: Maximum number of cached launches, at about 0.1 MB of device memory each. Work on further
#: addresses is enqueued, because evicting launches would cause repeated captures.
_MOST_LAUNCHES = 4096
#: Maximum number of first-time addresses that each `Replays` remembers.
_MOST_ONCE = 256
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
    """Raise `CaptureError` with CUDA's name for the status, unless it is success."""
    if status:
        name = c_char_p()
        _driver().cuGetErrorName(status, byref(name))
        raise CaptureError((name.value or b"an unknown error").decode().removeprefix("CUDA_ERROR_"))


@cache
def _driver() -> Any:
    """Return the CUDA driver library with the functions above; raise `CaptureError` without it."""
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
    """Return the CUDA runtime that torch has loaded; its status codes equal the driver's.

    Raises `CaptureError` if it cannot be opened.
    """
    version = str(torch.version.cuda)
    for name in (version.partition(".")[0], version):  # CUDA 11's is libcudart.so.11.0
        with suppress(OSError):
            runtime = ctypes.CDLL(f"libcudart.so.{name}")
            break
    else:
        raise CaptureError(f"cannot open torch's CUDA runtime: libcudart.so of CUDA {version}")
    runtime.cudaGraphLaunch.argtypes = [c_void_p, c_void_p]
    return runtime


class Replays:
    """Captured work by address; torch's allocator repeats addresses from model call to model call.

    It is not thread-safe, and need not be: autograd's thread works while its caller waits.

    Args:
        enqueue: puts the work for these addresses on torch's current stream.
    """

    def __init__(self, enqueue: Callable[..., None], device: int) -> None:
        self._enqueue, self._device = enqueue, device
        self._launches: dict[tuple[int, ...], GraphLaunch] = {}
        self._once: dict[tuple[int, ...], None] = {}
        self._possible = True

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Put the work on torch's current stream, as a launch if possible.

        Work is enqueued kernel by kernel if it comes for the first time, can't be captured, or is
        being captured.

        Args:
            addresses: memory of all tensors that the work reads and writes.

        Raises:
            CaptureError: the device failed.
            CudnnError: cuDNN refused.
        """
        if _is_eager:
            self._enqueue(*addresses)
            return
        launch = None
        if not capturing():
            launch = self._launches.get(addresses) or self._new(addresses)
        if launch is None:
            _tally.enqueued += 1
            self._enqueue(*addresses)
        else:
            _tally.launched += 1
            launch(current_stream(self._device))

    def _new(self, addresses: tuple[int, ...]) -> GraphLaunch | None:
        """Return a new launch for addresses that come for the second time; None otherwise.

        Addresses that never repeat are not worth a capture.
        """
        _tally.used[self] = None
        if addresses not in self._once:
            if len(self._once) >= _MOST_ONCE:
                self._once.clear()
            self._once[addresses] = None
            return None
        if not self._possible or _tally.cached >= _MOST_LAUNCHES:
            return None
        try:
            launch = GraphLaunch(
                partial(self._enqueue, *addresses), torch.device("cuda", self._device)
            )
        # work that can't be enqueued at all raises its error when it is enqueued
        except (CaptureError, CudnnError):
            self._possible = False
            return None
        _tally.cached += 1
        self._launches[addresses] = launch
        return launch

    def forget(self) -> None:
        """Free all launches."""
        for launch in self._launches.values():
            with suppress(CaptureError):  # a lost device holds nothing
                launch.destroy()
        self._launches.clear()
        self._once.clear()
        self._possible = True


class _Tally:
    """Counts of all work since the last `forget`: cached launches, launched and enqueued passes."""

    def __init__(self) -> None:
        self.used: dict[Replays, None] = {}
        self.cached = self.launched = self.enqueued = 0


_tally = _Tally()
_is_eager = False


@contextmanager
def eager() -> Iterator[None]:
    """Enqueue all work in this process kernel by kernel while entered, as torch does.

    Races and baselines run like this. The work is not counted.
    """
    global _is_eager
    before, _is_eager = _is_eager, True
    try:
        yield
    finally:
        _is_eager = before


def forget() -> None:
    """Free all launches, because another input size has other addresses.

    Each point starts with it.
    """
    global _tally
    for replays in _tally.used:
        replays.forget()
    _tally = _Tally()


def launched_share() -> float | None:
    """Return the share of work launched as graphs since the last `forget`; None without work."""
    everything = _tally.launched + _tally.enqueued
    return _tally.launched / everything if everything else None
