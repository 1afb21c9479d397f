"""Trace a call's allocations: live bytes by category and their peak, without a device.

`worker.peak_memory` runs a model's training step or prediction on stand-ins (fake tensors without
memory), to predict its peak memory and to find the largest batch. `Allocations` records when each
tensor's storage begins and ends. `CachingAllocator` computes the block that torch would take for it
on CUDA; its rules follow `c10/cuda/CUDACachingAllocator.cpp` in torch 2.11, without settings in
PYTORCH_ALLOC_CONF.
"""

from __future__ import annotations

import inspect
import weakref
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from perfexp.cost.operator_calls import OperatorCall
from perfexp.cost.tensors import tensors_in
from perfexp.cost.trial import replace_tensors

PARAMETERS, BUFFERS, INPUTS, GRADIENTS = "parameters", "buffers", "inputs", "gradients"
WORKSPACES = "workspaces"
#: Categories of allocations, by the segment (part of a training step) that makes them.
_OF_SEGMENT = {
    "forward": "activations",
    "loss": "activations",
    "backward": "temporaries of backward",
    "optimizer": "optimizer",
    "data": INPUTS,
}
#: Operators with device-dependent library workspaces.
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
#: cuBLAS operators, also in place (`addmm_`). Each thread that calls cuBLAS gets a workspace.
_PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "addbmm",
            "mv",
            "addmv",
            "dot",
            "vdot",
            "_trilinear",
            "_euclidean_dist",
        ),
        *("_addmm_activation", "_grouped_mm", "_scaled_mm", "_int_mm"),
    )
)
#: Fused attention on a CPU. Its stand-in has the layout of the queries, like CUDA's in half
#: precision.
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

#: Operator that autograd calls to sum two gradients of a tensor.
_SUM = "aten::add"


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MULTI_HEAD_ARGUMENTS = tuple(
    inspect.signature(torch.nn.functional.multi_head_attention_forward).parameters
)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Largest number of live bytes, in all and by category.

    Attributes:
        categories: bytes by category, such as `parameters` or `activations`.
        convolutions: the distinct convolution calls.
        multiplying_threads: number of threads that multiply matrices; autograd has its own.
    """

    total_bytes: int
    categories: Mapping[str, int]
    convolutions: Collection[OperatorCall] = ()
    multiplying_threads: int = 0


class Allocations(TorchDispatchMode):
    """Track, while entered, the storages that operators make, each until its last reference goes.

    Memory that libraries take for themselves (workspaces, contexts) makes no tensors and stays
    unseen, except the given workspaces.

    Args:
        workspaces: memory that convolutions take while they run, in bytes.
    """

    def __init__(self, workspaces: Mapping[OperatorCall, int] = MappingProxyType({})) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._category = "activations"
        self._allocator = CachingAllocator()
        self._live: dict[int, tuple[MemoryBlock, str]] = {}
        self._bytes: Counter[str] = Counter()
        self._peak = Peak(total_bytes=0, categories={})
        self._workspaces, self._convolutions = workspaces, dict[OperatorCall, None]()
        self._multiplying = set[bool]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and track what it allocates; torch calls this for each operator."""
        name = func._schema.name
        # on a device autograd adds such a gradient in place, without an allocation
        if (
            name == _SUM
            and self._category == _OF_SEGMENT["backward"]
            and _is_accumulated(*args[:2])
        ):
            return args[0]
        returned = func(*args, **(kwargs or {}))
        if name == _ATTENTION and returned[0].dtype is torch.float32:
            returned = (_with_adjacent_heads(returned[0]), *returned[1:])
        self.add(tensors_in(returned), self._category)
        if name in _CONVOLUTIONS:
            call = OperatorCall.of(func, args)
            self._convolutions[call] = None
            self._take(self._workspaces.get(call, 0))
        if name.removesuffix("_") in _PRODUCTS:
            self._multiplying.add(self._category == _OF_SEGMENT["backward"])
        return returned

    def _take(self, workspace: int) -> None:
        """Take a convolution's workspace (bytes) next to the live storages, and release it."""
        if workspace:
            block = self._allocator.allocate(workspace)
            self._bytes[WORKSPACES] += block.size
            self._update()
            self._bytes[WORKSPACES] -= block.size
            self._allocator.release(block)

    def _update(self) -> None:
        """Store the live bytes as the peak if they exceed it."""
        if self._bytes.total() > self._peak.total_bytes:
            self._peak = self._now()

    def _now(self) -> Peak:
        """Return the live bytes at this moment."""
        categories = {name: size for name, size in self._bytes.items() if size}
        return Peak(total_bytes=self._bytes.total(), categories=categories)

    def add(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Track the storages of tensors, unless they are tracked already, and update the peak.

        Callers add tensors that exist before a call, such as parameters.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._live:
                block = self._allocator.allocate(storage.nbytes())
                self._live[storage._cdata] = block, category
                self._bytes[category] += block.size
                weakref.finalize(storage, self._remove, storage._cdata)
        self._update()

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count a tensor's storage in another category from now on.

        `peak_of_calls` moves gradients there once autograd has accumulated them.
        """
        identity = tensor.untyped_storage()._cdata
        if identity in self._live:
            block, before = self._live[identity]
            self._live[identity] = block, category
            self._bytes[before] -= block.size
            self._bytes[category] += block.size

    def _remove(self, identity: int) -> None:
        """Release a storage's block; called when the storage is garbage."""
        block, category = self._live.pop(identity)
        self._bytes[category] -= block.size
        self._allocator.release(block)

    @contextmanager
    def segment(self, name: str) -> Iterator[None]:
        """Assign new storages to a segment of a call, for example `backward`, while entered.

        `peak_of_calls` enters one for each part of a call.
        """
        before, self._category = self._category, _OF_SEGMENT.get(name, name)
        try:
            yield
        finally:
            self._category = before

    def restart(self) -> None:
        """Begin a new peak with the live storages, at the beginning of a call."""
        self._peak = self._now()
        self._convolutions.clear()

    @property
    def peak(self) -> Peak:
        """Return the peak since the start, or since `restart`.

        `peak_of_calls` reads it after the last call.
        """
        return replace(
            self._peak,
            convolutions=tuple(self._convolutions),
            multiplying_threads=len(self._multiplying),
        )


def _is_accumulated(total: Any, other: Any) -> bool:
    """Return whether autograd on a device would add a gradient to this tensor in place.

    It does if nothing else refers to the tensor; for stand-ins it never does. The other gradient
    was just computed, so only the call refers to it.
    """
    if not isinstance(other, torch.Tensor) or total is other or total.shape != other.shape:
        return False
    storage = total.untyped_storage()
    # two references: the tensor, and the storage object in this function
    is_alone = torch._C._storage_Use_Count(storage._cdata) == 2
    return bool(is_alone and total._use_count() <= other._use_count())  # type: ignore[attr-defined]


def _with_adjacent_heads(attended: torch.Tensor) -> torch.Tensor:
    """Return an attention output, (batch, heads, length, width), in the layout of CUDA kernels.

    CUDA's memory-efficient kernels, which torch uses for float32, store the heads of a position
    next to each other.
    """
    batch, heads, length, width = attended.shape
    return attended.new_empty((batch, length, heads, width)).transpose(1, 2)


@contextmanager
def without_memory(module: torch.nn.Module) -> Iterator[None]:
    """Make new tensors stand-ins while entered; the module's own tensors stay stand-ins afterwards.

    Use it only in a function from `trial.isolated`. `worker.peak_memory` enters it around the
    traced calls.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replace_tensors(module, mode)
    # the fast path is one operator, which would hide the memory of its parts
    torch.backends.mha.set_fastpath_enabled(False)
    with mode, _DeviceKernels():
        yield


@contextmanager
def by_operators() -> Iterator[None]:
    """Run inference as its elementary operators, while entered, so that each one's memory is seen.

    Inference mode would leave composite operators whole. As in inference mode, autocast does not
    cache its casts. `worker.peak_memory` enters it around a traced prediction.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _DeviceKernels(TorchFunctionMode):
    """Replace functions that take other memory on a CPU or on stand-ins than as CUDA kernels.

    Attention runs without dropout, because a CPU has no fused kernels with dropout; CUDA's take no
    more memory. RMS normalization is fused, like layer normalization. A bias is added in place.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, or the one with the memory of its CUDA kernel."""
        functions = torch.nn.functional
        if func is functions.scaled_dot_product_attention:
            return func(**_named(_ATTENTION_ARGUMENTS, args, kwargs, dropout_p=0.0))
        if func is functions.multi_head_attention_forward:
            return func(**_named(_MULTI_HEAD_ARGUMENTS, args, kwargs, dropout_p=0.0))
        if func in (functions.rms_norm, torch.rms_norm):
            names = ("input", "normalized_shape", "weight", "eps")
            return functions.layer_norm(**_named(names, args, kwargs, eps=1e-5))
        if func is functions.linear:
            arguments = _named(("input", "weight", "bias"), args, kwargs)
            bias = arguments.pop("bias", None)
            if (
                bias is not None
                and arguments["input"].dim() > 2
                and not arguments["input"].is_contiguous()
            ):
                return func(**arguments).add_(bias)
        return func(*args, **(kwargs or {}))


def _named(
    names: Iterable[str], args: Iterable[Any], kwargs: Mapping[str, Any] | None, **settings: Any
) -> dict[str, Any]:
    """Return a call's arguments by name, with some replaced by `settings`."""
    return {**dict(zip(names, args, strict=False)), **(kwargs or {}), **settings}


def peak_of_calls(
    module: torch.nn.Module,
    prepare: Callable[[Allocations], Mapping[str, Callable[[], object]]],
    *,
    calls: int = 3,
    workspaces: Mapping[OperatorCall, int] = MappingProxyType({}),
) -> Peak:
    """Return the peak of the last of several equal calls.

    `worker.peak_memory` predicts a point's peak with it.

    Args:
        module: model with stand-ins as parameters and buffers.
        prepare: adds tensors that exist before a call, and returns the call's segments by name.
        calls: number of calls; the optimizer state exists from the second call on.
        workspaces: memory that convolutions take while they run, in bytes.
    """
    allocations = Allocations(workspaces)
    allocations.add(module.parameters(), PARAMETERS)
    allocations.add(module.buffers(), BUFFERS)

    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            allocations.move(parameter.grad, GRADIENTS)

    trained = [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
    # gradients of leaves appear during the backward pass; their memory counts as gradients
    hooks = [parameter.register_post_accumulate_grad_hook(accumulated) for parameter in trained]
    try:
        segments = prepare(allocations)
        with allocations:
            for _ in range(calls):
                allocations.restart()
                for name, segment in segments.items():
                    with allocations.segment(name):
                        segment()
    finally:
        for hook in hooks:
            hook.remove()
    return allocations.peak


#: Allocation sizes are multiples of this.
BLOCK_BYTES = 512
#: Largest allocation from small segments; also, a large block is split only if more than this
#: remains.
_SMALL_BYTES = 1 << 20
#: Segment sizes: for small allocations; for large allocations below the limit; others are rounded
#: up to the multiple.
_SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE_LIMIT, _LARGE_MULTIPLE = 2 << 20, 20 << 20, 10 << 20, 2 << 20


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """Part of a segment, between its neighbors in the segment; address and size are in bytes.

    A segment is memory that torch takes from CUDA at once.
    """

    address: int
    size: int
    is_small: bool
    is_free: bool = True
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None

    def sort_key(self) -> tuple[int, int]:
        """Return the block's sort key among free blocks."""
        return self.size, self.address


class CachingAllocator:
    """torch's allocator on a device without a memory limit.

    An allocation takes the smallest free block that suffices, or else a new segment. If a block in
    a large segment is at most 1 MiB too large, it is taken whole, and torch counts all of it as
    allocated.

    Attributes:
        reserved_bytes: total segment size.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free: dict[bool, list[MemoryBlock]] = {True: [], False: []}

    def allocate(self, size: int) -> MemoryBlock:
        """Return the block for an allocation of `size` bytes, above 0.

        The size is rounded up to 512 bytes. The rest of a larger block becomes a free block.
        """
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        index = bisect_left(free, (size, 0), key=MemoryBlock.sort_key)
        block = free.pop(index) if index < len(free) else self._segment(size, is_small)
        block.is_free = False
        spare_bytes = block.size - size
        if spare_bytes >= BLOCK_BYTES if is_small else spare_bytes > _SMALL_BYTES:
            after = MemoryBlock(
                block.address + size, spare_bytes, is_small, before=block, after=block.after
            )
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            insort(free, after, key=MemoryBlock.sort_key)
        return block

    def release(self, block: MemoryBlock) -> None:
        """Free a block, and join it with its free neighbors.

        `Allocations` calls it when a storage is freed.
        """
        free = self._free[block.is_small]
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                del free[bisect_left(free, other.sort_key(), key=MemoryBlock.sort_key)]
        if (before := block.before) is not None and before.is_free:
            before.size += block.size
            before.after = block.after
            if block.after is not None:
                block.after.before = before
            block = before
        if (after := block.after) is not None and after.is_free:
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        block.is_free = True
        insort(free, block, key=MemoryBlock.sort_key)

    def _segment(self, size: int, is_small: bool) -> MemoryBlock:
        """Return a new segment as one block of at least `size` bytes."""
        if is_small:
            size = _SMALL_SEGMENT
        elif size < _LARGE_LIMIT:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // _LARGE_MULTIPLE) * _LARGE_MULTIPLE
        block = MemoryBlock(self.reserved_bytes, size, is_small)
        self.reserved_bytes += size
        return block
