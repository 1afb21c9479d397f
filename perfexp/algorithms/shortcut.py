"""Shortcut: cuDNN's own execution plan behind one of its v7 algorithms, which costs the host less to run.

A call of the v7 interface builds a plan, runs it and throws it away: 25 to 50 µs of the host's time on an H200's,
against 10 µs of `torch.nn.functional.conv2d`. cuDNN's graph interface keeps plans, but names engines, not algorithms.
So engines are tried until one enqueues what the algorithm enqueues: the same kernels with the same grids and blocks, as
two captured graphs tell, nothing being taken for granted. Where there is none, the v7 call stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import addressof, byref, c_float, c_int, c_int64, c_void_p
from dataclasses import replace
from itertools import islice, product
from typing import Any, NamedTuple

import torch

from perfexp.algorithms.captured import CaptureError, Node
from perfexp.algorithms.codes import DATA_TYPES
from perfexp.algorithms.cudnn import CudnnError, Library

# cudnnBackendDescriptorType_t, cudnnBackendAttributeName_t and cudnnBackendAttributeType_t (cudnn_graph.h, 9.19)
_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTIC, _PLAN, _CHOICE, _KNOB = 1, 2, 3, 4, 5, 7, 8
_FORWARD, _GRAPH, _PACK, _TENSOR = 10, 15, 16, 17
_AS_HANDLE, _AS_TYPE, _AS_INT64, _AS_FLOAT, _AS_POINTER, _AS_MODE, _AS_HEURISTIC, _AS_KNOB, _AS_DESCRIPTOR = (
    0, 1, 3, 4, 6, 7, 8, 9, 15,
)  # fmt: skip
_CROSS_CORRELATION = 1
#: CUDNN_HEUR_MODE_FALLBACK, what nearly always works, and _A, what it would take; either with how many are of interest:
#: some are compiled when they are made.
_HEURISTICS = {2: 8, 3: 6}
#: Engines that are tried first, and with all settings of their knobs last: so they were found on an H200, cuDNN 9.19.
_USUAL = {
    "implicit_gemm": (28, 0),
    "implicit_precomp_gemm": (70, 1),
    "gemm": (2, 0),
    "fft": (3,),
    "fft_tiling": (4,),
    "winograd_nonfused": (6,),
}
#: Knobs that an engine is asked for, and settings of them all that are tried.
_KNOBS, _SETTINGS = 16, 48
#: What torch's allocator aligns to at least, and what plans may count on, bytes.
_ALIGNMENT = 16
#: Sets of addresses that are kept ready; a model's calls find the same ones again and again.
_MOST_PACKS = 64


class Shortcut:
    """A plan of cuDNN's graph interface for a forward pass.

    Args:
        cudnn: that makes it.
        handle: with which it runs.
        config: an engine's configuration.

    Attributes:
        workspace_bytes: that it needs.

    Raises:
        CudnnError: the engine can't compute it.
    """

    def __init__(self, cudnn: Library, handle: int, config: int) -> None:
        self._handle = handle
        assert cudnn.execute is not None
        self._cudnn, self._execute = cudnn, cudnn.execute
        self._plan = _made(cudnn, _PLAN, (401, _AS_DESCRIPTOR, [config]), (400, _AS_HANDLE, [handle]))
        size = c_int64()
        cudnn.call("cudnnBackendGetAttribute", self._plan, 402, _AS_INT64, 1, byref(c_int64()), byref(size))
        self.workspace_bytes = size.value
        self._packs: dict[tuple[int, ...], int | None] = {}

    def __call__(self, handle: int, *addresses: int) -> bool:
        """Compute on the handle's stream; false if another thread's handle or these addresses don't suit it.

        Args:
            handle: of the thread that calls.
            addresses: of the inputs, the weights, the outputs, and the workspace or 0.
        """
        if handle != self._handle:
            return False
        try:
            pack = self._packs[addresses]
        except KeyError:
            pack = self._pack(addresses)
        if pack is None:
            return False
        status = self._execute(handle, self._plan, pack)
        if status:
            self._cudnn.check(status)
        return True

    def destroy(self) -> None:
        """Give back what it holds; it can't be called any more."""
        self._forget_packs()
        self._cudnn.call("cudnnBackendDestroyDescriptor", self._plan)

    def _forget_packs(self) -> None:
        for old in self._packs.values():
            if old is not None:
                self._cudnn.call("cudnnBackendDestroyDescriptor", old)
        self._packs.clear()

    def _pack(self, addresses: tuple[int, ...]) -> int | None:
        """The addresses as cuDNN wants them, kept for the next call that has the same."""
        if len(self._packs) >= _MOST_PACKS:
            self._forget_packs()
        pack = None
        if not any(address % _ALIGNMENT for address in addresses):
            *tensors, workspace = addresses
            pack = _made(
                self._cudnn,
                _PACK,
                (1000, _AS_INT64, range(1, len(tensors) + 1)),
                (1001, _AS_POINTER, tensors),
                (1003, _AS_POINTER, [workspace]),
            )
        self._packs[addresses] = pack
        return pack


def find(
    cudnn: Library,
    handle: int,
    algorithm: str,
    shape: Any,
    wanted: Sequence[Node],
    enqueued: Callable[[Shortcut], Sequence[Node]],
) -> Shortcut | None:
    """The plan that enqueues what is wanted, or None.

    Args:
        cudnn: that makes it.
        handle: with which it is to run.
        algorithm: of cuDNN's for the forward pass.
        shape: what to compute.
        wanted: what the algorithm enqueues.
        enqueued: what a plan enqueues.
    """
    if cudnn.execute is None or shape.dtype is torch.float64:
        return None
    graph, layer = _Graph(cudnn, handle, shape), (algorithm, replace(shape, inputs=()))
    for way in _ways(graph, algorithm, layer, cudnn.fitted):
        with suppress(CudnnError):
            shortcut = Shortcut(cudnn, handle, graph.configuration(way))
            with suppress(CudnnError, CaptureError):
                if list(enqueued(shortcut)) == list(wanted):
                    cudnn.fitted[layer] = way
                    return shortcut
            shortcut.destroy()
    cudnn.fitted.setdefault(layer, None)
    return None


class _Way(NamedTuple):
    """How a configuration is come by, for whatever graph.

    Attributes:
        engine: its number, or …
        mode: … the heuristic that names it, …
        place: … and where in its answer.
        settings: of the engine's knobs, each a type and a value.
    """

    engine: int | None = None
    mode: int = 0
    place: int = 0
    settings: tuple[tuple[int, int], ...] = ()


def _ways(graph: _Graph, algorithm: str, layer: Any, fitted: dict[Any, _Way | None]) -> Iterator[_Way]:
    """What is tried, in its order: a plan takes 2 ms to make, and a model has its layers in many sizes.

    First what fitted the layer at another size or batch, and what fitted other layers; then, unless that was in vain at
    another size, the usual engines as they are, what the heuristics name, and the usual engines with their knobs set.
    """
    others = (way for (name, _), way in reversed(fitted.items()) if name == algorithm)
    known = {way: None for way in (fitted.get(layer), *others) if way is not None}
    yield from known
    if layer not in fitted or fitted[layer] is not None:
        yield from (way for way in _unknown_ways(graph, algorithm) if way not in known)


def _unknown_ways(graph: _Graph, algorithm: str) -> Iterator[_Way]:
    usual = _USUAL.get(algorithm, ())
    yield from (_Way(engine) for engine in usual)
    for mode in _HEURISTICS:
        with suppress(CudnnError):
            yield from (_Way(mode=mode, place=place) for place in range(len(graph.answers(mode))))
    for engine in usual:
        with suppress(CudnnError):
            knobs = graph.knobs(engine)
            every = islice(product(*knobs), _SETTINGS if knobs else 0)
            yield from (_Way(engine, settings=settings) for settings in every)


class _Graph:
    """A forward convolution as a graph of one operation, and what computes it.

    Args:
        cudnn: whose graph it is.
        handle: with which it is to run.
        shape: what to compute.
    """

    def __init__(self, cudnn: Library, handle: int, shape: Any) -> None:
        self._cudnn, self._graph = cudnn, _graph(cudnn, handle, shape)
        self._answers: dict[int, list[int]] = {}

    def configuration(self, way: _Way) -> int:
        """A descriptor of an engine's configuration.

        Args:
            way: how it is come by.

        Raises:
            CudnnError: there is none for this graph.
        """
        if way.engine is None:
            answers = self.answers(way.mode)
            if way.place >= len(answers):
                raise CudnnError(f"heuristic {way.mode} has no answer {way.place}")
            return answers[way.place]
        choices = [
            _made(self._cudnn, _CHOICE, (600, _AS_KNOB, [knob]), (601, _AS_INT64, [value]))
            for knob, value in way.settings
        ]
        chosen = [(302, _AS_DESCRIPTOR, choices)] if choices else []
        return _made(self._cudnn, _CONFIG, (300, _AS_DESCRIPTOR, [self._engine(way.engine)]), *chosen)

    def answers(self, mode: int) -> list[int]:
        """The configurations that a heuristic names.

        Args:
            mode: of `_HEURISTICS`.
        """
        if mode not in self._answers:
            how = (201, _AS_DESCRIPTOR, [self._graph]), (200, _AS_HEURISTIC, [mode])
            asked = _made(self._cudnn, _HEURISTIC, *how)
            self._answers[mode] = _several(self._cudnn, asked, 202, _CONFIG, _HEURISTICS[mode])
        return self._answers[mode]

    def knobs(self, engine: int) -> list[list[tuple[int, int]]]:
        """For each knob of an engine all settings: its type and a value.

        Args:
            engine: its number.
        """
        knobs = []
        for knob in _several(self._cudnn, self._engine(engine), 1302, _KNOB, _KNOBS):
            kind, values = c_int(), []
            self._get(knob, 1200, _AS_KNOB, kind)
            for attribute in (1202, 1201, 1203):
                value = c_int64()
                self._get(knob, attribute, _AS_INT64, value)
                values.append(value.value)
            least, most, step = values
            knobs.append([(kind.value, value) for value in range(least, most + 1, max(step, 1))])
        return knobs

    def _engine(self, index: int) -> int:
        return _made(self._cudnn, _ENGINE, (1300, _AS_DESCRIPTOR, [self._graph]), (1301, _AS_INT64, [index]))

    def _get(self, descriptor: int, attribute: int, as_type: int, value: Any) -> None:
        self._cudnn.call("cudnnBackendGetAttribute", descriptor, attribute, as_type, 1, byref(c_int64()), byref(value))


def _several(cudnn: Library, of: int, attribute: int, kind: int, most: int) -> list[int]:
    """Descriptors that a descriptor has."""
    found, count = (c_void_p * most)(*(_new(cudnn, kind) for _ in range(most))), c_int64()
    cudnn.call("cudnnBackendGetAttribute", of, attribute, _AS_DESCRIPTOR, most, byref(count), addressof(found))
    return [each for each in found[: count.value] if each]


def _graph(cudnn: Library, handle: int, shape: Any) -> int:
    """The forward convolution as a graph of one operation."""
    layout = torch.channels_last if shape.channels_last else torch.contiguous_format
    x, w, y = (
        _made(
            cudnn,
            _TENSOR,
            (901, _AS_TYPE, [DATA_TYPES[shape.dtype]]),
            (902, _AS_INT64, size),
            (903, _AS_INT64, torch.empty(size, device="meta", memory_format=layout).stride()),
            (906, _AS_INT64, [number]),
            (900, _AS_INT64, [_ALIGNMENT]),
        )
        for number, size in enumerate((shape.inputs, shape.weight, shape.outputs), 1)
    )
    how = _made(
        cudnn,
        _CONVOLUTION,
        (106, _AS_INT64, [2]),
        (100, _AS_TYPE, [DATA_TYPES[torch.float32]]),
        (101, _AS_MODE, [_CROSS_CORRELATION]),
        (105, _AS_INT64, shape.padding),
        (104, _AS_INT64, shape.padding),
        (102, _AS_INT64, shape.dilation),
        (103, _AS_INT64, shape.stride),
    )
    operation = _made(
        cudnn,
        _FORWARD,
        *((attribute, _AS_DESCRIPTOR, [each]) for attribute, each in ((704, x), (703, w), (705, y), (702, how))),
        (700, _AS_FLOAT, [1.0]),
        (701, _AS_FLOAT, [0.0]),
    )
    return _made(cudnn, _GRAPH, (801, _AS_DESCRIPTOR, [operation]), (800, _AS_HANDLE, [handle]))


#: How values of a type are handed over.
_C_TYPES: dict[int, Any] = {
    _AS_TYPE: c_int,
    _AS_MODE: c_int,
    _AS_HEURISTIC: c_int,
    _AS_INT64: c_int64,
    _AS_FLOAT: c_float,
}


def _new(cudnn: Library, kind: int) -> int:
    made = c_void_p()
    cudnn.call("cudnnBackendCreateDescriptor", kind, byref(made))
    assert made.value is not None
    return made.value


def _made(cudnn: Library, kind: int, *attributes: tuple[int, int, Sequence[Any]]) -> int:
    """A finished descriptor.

    Raises:
        CudnnError: cuDNN refuses it.
    """
    made = _new(cudnn, kind)
    for name, as_type, values in attributes:
        array = (_C_TYPES.get(as_type, c_void_p) * len(values))(*values)
        cudnn.call("cudnnBackendSetAttribute", made, name, as_type, len(values), addressof(array))
    cudnn.call("cudnnBackendFinalize", made)
    return made
