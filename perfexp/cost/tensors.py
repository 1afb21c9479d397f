"""Locate tensors in their storages, and count distinct bytes.

A storage is the memory that a tensor shares with its views. Stand-ins have storages, too, so that
reads and writes can be counted without memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from perfexp.cost import Inconclusive, Shape


@dataclasses.dataclass(frozen=True)
class Region:
    """The part of a storage that a tensor covers.

    Attributes:
        storage: address, unique among live storages.
        span: offset in elements, sizes, and strides in elements.
        nbytes: bytes of the distinct elements.
        limit: bytes of the whole storage.
    """

    storage: int
    span: tuple[int, Shape, Shape]
    nbytes: int
    limit: int


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, shared with its views and unique while it lives.

    The counter distinguishes reads, writes and weights by it.

    Raises:
        Inconclusive: the tensor is sparse and has several storages.
    """
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise Inconclusive(
            f"it has tensors of the layout {layout}, whose work depends on the values that they "
            "hold"
        )
    return int(tensor.untyped_storage()._cdata)


def is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has real or complex floating-point numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def region_of(tensor: torch.Tensor) -> Region:
    """Return the part of its storage that a tensor covers.

    Elements that an expanded dimension repeats (stride 0) count once. Each operator's reads and
    writes are such regions.
    """
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    elements = 1
    for size, stride in zip(sizes, strides, strict=True):
        elements *= size if stride or not size else 1
    return Region(
        storage=storage_of(tensor),
        span=(int(tensor.storage_offset()), sizes, strides),
        nbytes=elements * tensor.element_size(),
        limit=int(tensor.untyped_storage().nbytes()),
    )


def distinct_bytes(regions: Iterable[Region]) -> int:
    """Return the bytes of the distinct regions, at most the size of each storage.

    Equal regions count once. Regions that overlap partly count separately. A row's bytes are
    computed by it.
    """
    sizes, limits = Counter[int](), dict[int, int]()
    for region in set(regions):
        sizes[region.storage] += region.nbytes
        limits[region.storage] = max(region.limit, limits.get(region.storage, 0))
    return sum(min(sizes[storage], limit) for storage, limit in limits.items())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested tuples, lists, sets, mappings and dataclasses.

    These may contain themselves. Arguments and results of modules and operators are searched by it.
    """
    pending, seen = [value], set[int]()
    while pending:
        current = pending.pop()
        if isinstance(current, torch.Tensor):
            yield current
            continue
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, Mapping):
            pending += reversed(list(current.values()))
        elif isinstance(current, (tuple, list)):
            pending += reversed(current)
        elif isinstance(current, (set, frozenset)):
            pending += current
        elif dataclasses.is_dataclass(current) and not isinstance(current, type):
            pending += reversed(
                [getattr(current, field.name) for field in dataclasses.fields(current)]
            )
