"""Follow the memory of calls on tensors without memory: live bytes by category, and their peak."""

from __future__ import annotations

import inspect
import weakref
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

from perfexp.work.caching_allocator import Block, CachingAllocator
from perfexp.work.operator_calls import OperatorCall
from perfexp.work.tensors import tensors_in
from perfexp.work.trial import replace_tensors

PARAMETERS, BUFFERS, INPUTS, GRADIENTS = "parameters", "buffers", "inputs", "gradients"
WORKSPACES = "workspaces"
#: Categories of allocations by the segment of the call that makes them.
_OF_SEGMENT = {
    "forward": "activations",
    "loss": "activations",
    "backward": "temporaries of backward",
    "optimizer": "optimizer",
    "data": INPUTS,
}
#: Operators whose libraries take workspaces that depend on the device.
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
#: Operators of cuBLAS, which takes a workspace for each thread that calls it, also in place (`addmm_`).
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
#: Fused attention of a CPU. Its stand-in has the layout of the queries, as have CUDA's in half precision.
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

_SUM = "aten::add"


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MULTI_HEAD_ARGUMENTS = tuple(
    inspect.signature(torch.nn.functional.multi_head_attention_forward).parameters
)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Largest number of live bytes, and the categories that they belong to.

    Attributes:
        convolutions: the distinct calls of convolutions.
        multiplying_threads: number of threads that multiply matrices; autograd has its own.
    """

    total_bytes: int
    categories: Mapping[str, int]
    convolutions: Collection[OperatorCall] = ()
    multiplying_threads: int = 0


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, follows the storages that operators make, each until nothing refers to it.

    Memory that libraries take for themselves (workspaces, contexts) makes no tensors and is not seen.

    Args:
        workspaces: memory that convolutions take while they run, in bytes.
    """

    def __init__(self, workspaces: Mapping[OperatorCall, int] = MappingProxyType({})) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._category = "activations"
        self._allocator = CachingAllocator()
        self._live: dict[int, tuple[Block, str]] = {}
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
        name = func._schema.name
        if (
            name == _SUM
            and self._category == _OF_SEGMENT["backward"]
            and _is_accumulated(*args[:2])
        ):
            return args[0]
        returned = func(*args, **(kwargs or {}))
        if name == _ATTENTION and returned[0].dtype is torch.float32:
            returned = (_joined(returned[0]), *returned[1:])
        self.add(tensors_in(returned), self._category)
        if name in _CONVOLUTIONS:
            call = OperatorCall.of(func, args)
            self._convolutions[call] = None
            self._take(self._workspaces.get(call, 0))
        if name.removesuffix("_") in _PRODUCTS:
            self._multiplying.add(self._category == _OF_SEGMENT["backward"])
        return returned

    def _take(self, workspace: int) -> None:
        """Take a workspace beside what is live, and give it back."""
        if workspace:
            block = self._allocator.allocate(workspace)
            self._bytes[WORKSPACES] += block.size
            self._update()
            self._bytes[WORKSPACES] -= block.size
            self._allocator.release(block)

    def _update(self) -> None:
        if self._bytes.total() > self._peak.total_bytes:
            self._peak = self._now()

    def _now(self) -> Peak:
        categories = {name: size for name, size in self._bytes.items() if size}
        return Peak(total_bytes=self._bytes.total(), categories=categories)

    def add(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """Follow the storages of tensors that are not followed yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._live:
                block = self._allocator.allocate(storage.nbytes())
                self._live[storage._cdata] = block, category
                self._bytes[category] += block.size
                weakref.finalize(storage, self._remove, storage._cdata)
        self._update()

    def move(self, tensor: torch.Tensor, category: str) -> None:
        """Count the storage of a tensor in another category from now on."""
        identity = tensor.untyped_storage()._cdata
        if identity in self._live:
            block, before = self._live[identity]
            self._live[identity] = block, category
            self._bytes[before] -= block.size
            self._bytes[category] += block.size

    def _remove(self, identity: int) -> None:
        block, category = self._live.pop(identity)
        self._bytes[category] -= block.size
        self._allocator.release(block)

    @contextmanager
    def segment(self, name: str) -> Iterator[None]:
        """While entered, new storages belong to a segment of a call (`forward`, `backward`, …)."""
        before, self._category = self._category, _OF_SEGMENT.get(name, name)
        try:
            yield
        finally:
            self._category = before

    def restart(self) -> None:
        """Begin a new peak with what is live now."""
        self._peak = self._now()
        self._convolutions.clear()

    @property
    def peak(self) -> Peak:
        """The peak since the start, or since `restart`."""
        return replace(
            self._peak,
            convolutions=tuple(self._convolutions),
            multiplying_threads=len(self._multiplying),
        )


def _is_accumulated(total: Any, other: Any) -> bool:
    """Whether autograd adds a gradient to this one in place on a device: where nothing else refers to it.

    It never does for stand-ins. The other gradient has been computed just now, so that only the call refers to it.
    """
    if not isinstance(other, torch.Tensor) or total is other or total.shape != other.shape:
        return False
    storage = total.untyped_storage()
    is_alone = (
        torch._C._storage_Use_Count(storage._cdata) == 2
    )  # of the tensor and of the object above
    return bool(is_alone and total._use_count() <= other._use_count())  # type: ignore[attr-defined]


def _joined(attended: torch.Tensor) -> torch.Tensor:
    """Return the output of an attention, (batch, heads, length, width), with the heads of a position side by side.

    So do CUDA's memory-efficient kernels, which torch takes for float32.
    """
    batch, heads, length, width = attended.shape
    return attended.new_empty((batch, length, heads, width)).transpose(1, 2)


@contextmanager
def without_memory(module: torch.nn.Module) -> Iterator[None]:
    """While entered, new tensors are stand-ins, and those of the module from now on; only in an isolated function."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replace_tensors(module, mode)
    torch.backends.mha.set_fastpath_enabled(False)  # the memory of its operators is seen one by one
    with mode, _DeviceKernels():
        yield


@contextmanager
def by_operators() -> Iterator[None]:
    """While entered, an inference is seen as the operators that torch runs; inference mode leaves some of them whole.

    As in inference mode, casts of autocast are not cached.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _DeviceKernels(TorchFunctionMode):
    """While entered, functions take the memory of CUDA's kernels where a CPU or a stand-in takes other ones.

    Attention is without dropout, for which a CPU has no fused kernels; CUDA's take no more memory. The normalization by
    the root mean square is fused, as that by mean and variance is. A bias is added in place.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        functions = torch.nn.functional
        if func is functions.scaled_dot_product_attention:
            return func(**_named(_ATTENTION_ARGUMENTS, args, kwargs, dropout_p=0.0))
        if func is functions.multi_head_attention_forward:
            return func(**_named(_MULTI_HEAD_ARGUMENTS, args, kwargs, dropout_p=0.0))
        if func in (functions.rms_norm, torch.rms_norm):
            names = ("input", "normalized_shape", "weight", "eps")
            return functions.layer_norm(**_named(names, args, kwargs, eps=1e-5))
        if func is functions.linear:
            given = _named(("input", "weight", "bias"), args, kwargs)
            bias = given.pop("bias", None)
            if bias is not None and given["input"].dim() > 2 and not given["input"].is_contiguous():
                return func(**given).add_(bias)
        return func(*args, **(kwargs or {}))


def _named(
    names: Iterable[str], args: Iterable[Any], kwargs: Mapping[str, Any] | None, **settings: Any
) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **(kwargs or {}), **settings}


def peak_of_calls(
    module: torch.nn.Module,
    prepare: Callable[[Allocations], Mapping[str, Callable[[], object]]],
    *,
    calls: int = 3,
    workspaces: Mapping[OperatorCall, int] = MappingProxyType({}),
) -> Peak:
    """Return the peak of the last of several equal calls.

    Args:
        module: model whose parameters and buffers are stand-ins.
        prepare: returns the segments of a call by name, after adding what exists before it.
        calls: number of calls; the optimizer's state exists from the second one on.
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
    hooks = [
        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        for parameter in trained
    ]
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
