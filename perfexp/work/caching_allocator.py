"""Blocks of torch's caching allocator of CUDA devices, without a device: how much of them each allocation takes.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` of torch 2.11 without settings in PYTORCH_ALLOC_CONF.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

#: Sizes of allocations are multiples of this.
BLOCK_BYTES = 512
#: Largest allocation from small segments, and least rest of a block of a large segment that becomes a block.
_SMALL_BYTES = 1 << 20
#: Sizes of segments: of small allocations, of large ones below the limit, and of others the least multiple.
_SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE_LIMIT, _LARGE_MULTIPLE = 2 << 20, 20 << 20, 10 << 20, 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment, between its neighbours there; address and size are in bytes."""

    address: int
    size: int
    is_small: bool
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None

    def place(self) -> tuple[int, int]:
        """Its order among free blocks."""
        return self.size, self.address


class CachingAllocator:
    """Segments of a device without a limit: the smallest free block that suffices is taken, else a new segment.

    A block of a large segment that is at most 1 MiB larger than the allocation is taken whole, which torch counts as
    allocated.

    Attributes:
        reserved_bytes: size of all segments.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Return the block of an allocation in bytes, above 0."""
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size, 0), key=Block.place)
        block = free.pop(place) if place < len(free) else self._segment(size, is_small)
        block.is_free = False
        rest = block.size - size
        if rest >= BLOCK_BYTES if is_small else rest > _SMALL_BYTES:
            after = Block(block.address + size, rest, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            insort(free, after, key=Block.place)
        return block

    def release(self, block: Block) -> None:
        """Free a block, and join it with free neighbours."""
        free = self._free[block.is_small]
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                del free[bisect_left(free, other.place(), key=Block.place)]
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
        insort(free, block, key=Block.place)

    def _segment(self, size: int, is_small: bool) -> Block:
        large = (
            _LARGE_SEGMENT if size < _LARGE_LIMIT else -(-size // _LARGE_MULTIPLE) * _LARGE_MULTIPLE
        )
        block = Block(self.reserved_bytes, _SMALL_SEGMENT if is_small else large, is_small)
        self.reserved_bytes += block.size
        return block
