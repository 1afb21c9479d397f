"""Caching allocator: the blocks that torch would take for each CUDA allocation, without a device.

The rules follow `c10/cuda/CUDACachingAllocator.cpp` in torch 2.11, without settings in
PYTORCH_ALLOC_CONF.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

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
    """Part of a segment, between its neighbors; address and size are in bytes."""

    address: int
    size: int
    is_small: bool
    is_free: bool = True
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None

    def place(self) -> tuple[int, int]:
        """Return the block's sort key among free blocks."""
        return self.size, self.address


class CachingAllocator:
    """Segments on a device without a memory limit.

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
        """Return the block for an allocation in bytes, above 0."""
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size, 0), key=MemoryBlock.place)
        block = free.pop(place) if place < len(free) else self._segment(size, is_small)
        block.is_free = False
        rest = block.size - size
        if rest >= BLOCK_BYTES if is_small else rest > _SMALL_BYTES:
            after = MemoryBlock(
                block.address + size, rest, is_small, before=block, after=block.after
            )
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            insort(free, after, key=MemoryBlock.place)
        return block

    def release(self, block: MemoryBlock) -> None:
        """Free a block, and join it with free neighbors."""
        free = self._free[block.is_small]
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                del free[bisect_left(free, other.place(), key=MemoryBlock.place)]
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
        insort(free, block, key=MemoryBlock.place)

    def _segment(self, size: int, is_small: bool) -> MemoryBlock:
        large = (
            _LARGE_SEGMENT if size < _LARGE_LIMIT else -(-size // _LARGE_MULTIPLE) * _LARGE_MULTIPLE
        )
        block = MemoryBlock(self.reserved_bytes, _SMALL_SEGMENT if is_small else large, is_small)
        self.reserved_bytes += block.size
        return block
