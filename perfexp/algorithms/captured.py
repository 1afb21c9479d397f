"""Captured: what work enqueues on a CUDA device, as a graph: to be looked at, or to be launched again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from perfexp.errors import PerfexpError

#: CU_STREAM_CAPTURE_MODE_RELAXED: a library may load its kernels and ask for memory meanwhile.
_RELAXED = 2
#: CU_GRAPH_NODE_TYPE_KERNEL.
_KERNEL = 0


class CaptureError(PerfexpError):
    """The driver could not capture."""


class Node(NamedTuple):
    """One piece of work of a captured graph.

    Attributes:
        kind: CUgraphNodeType.
        function: which kernel: the driver's own address of it; 0 for other work.
        grid: blocks across, down and deep.
        block: threads likewise.
        shared_bytes: of memory that the blocks share, beside what the kernel itself declares.
    """

    kind: int
    function: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    shared_bytes: int = 0


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("kernel_params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


_SIGNATURES: dict[str, list[Any]] = {
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, POINTER(c_void_p)],
    "cuGraphGetNodes": [c_void_p, c_void_p, POINTER(c_size_t)],
    "cuGraphNodeGetType": [c_void_p, POINTER(c_int)],
    "cuGraphKernelNodeGetParams_v2": [c_void_p, POINTER(_KernelParams)],
    "cuGraphDestroy": [c_void_p],
    "cuGraphInstantiateWithFlags": [POINTER(c_void_p), c_void_p, c_ulonglong],
    "cuGraphExecDestroy": [c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
}


@contextmanager
def _captured(enqueue: Callable[[], object], device: torch.device) -> Iterator[c_void_p]:
    """The graph of what is put on torch's current stream, which is one of its own meanwhile; nothing of it runs.

    Raises:
        CaptureError: the driver can't.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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


def nodes_of(enqueue: Callable[[], object], device: torch.device) -> list[Node]:
    """What `enqueue` puts on torch's current stream, sorted, since their order says nothing.

    Args:
        enqueue: is called once, with a stream of its own as the current one; what it needs is in memory already.
        device: a CUDA device.

    Raises:
        CaptureError: the driver can't.
    """
    driver, count = _driver(), c_size_t()
    with _captured(enqueue, device) as graph:
        _check(driver.cuGraphGetNodes(graph, None, byref(count)))
        nodes = (c_void_p * count.value)()
        _check(driver.cuGraphGetNodes(graph, nodes, byref(count)))
        return sorted(_node(driver, node or 0) for node in nodes)


class Launch:
    """What was captured, launched at once however many kernels it is: at the same addresses each time.

    Args:
        enqueue: is called once, with a stream of its own as the current one; what it needs is in memory already.
        device: a CUDA device.

    Raises:
        CaptureError: the driver can't.
    """

    def __init__(self, enqueue: Callable[[], object], device: torch.device) -> None:
        # the runtime's function, since torch's profiler does not see the driver's
        self._launch, self._graph = _runtime().cudaGraphLaunch, c_void_p()
        with _captured(enqueue, device) as graph:
            _check(_driver().cuGraphInstantiateWithFlags(byref(self._graph), graph, 0))

    def __call__(self, stream: int) -> None:
        """Put it on a stream.

        Args:
            stream: its address.
        """
        status = self._launch(self._graph, stream)
        if status:
            _check(status)

    def destroy(self) -> None:
        """Give back what it holds, when the device is done with it; it can't be launched any more."""
        _check(_driver().cuGraphExecDestroy(self._graph))


def _node(driver: Any, node: int) -> Node:
    kind, params = c_int(), _KernelParams()
    _check(driver.cuGraphNodeGetType(node, byref(kind)))
    if kind.value != _KERNEL:
        return Node(kind.value)
    _check(driver.cuGraphKernelNodeGetParams_v2(node, byref(params)))
    grid, block = tuple(params.grid), tuple(params.block)
    return Node(_KERNEL, params.func or params.kern or 0, grid, block, params.shared_bytes)


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
        raise CaptureError(f"there is no driver: {error}") from error
    missing = [name for name in _SIGNATURES if not hasattr(driver, name)]
    if missing:
        raise CaptureError(f"the driver is too old: it has no {missing[0]}")
    for name, types in _SIGNATURES.items():
        getattr(driver, name).argtypes = types
    return driver


@cache
def _runtime() -> Any:
    """The runtime that torch has loaded; statuses that both have are the driver's."""
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError as error:
        raise CaptureError(f"the runtime that torch uses can't be opened: {error}") from error
    runtime.cudaGraphLaunch.argtypes = [c_void_p, c_void_p]
    return runtime
