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
#: Sizes of segments: of small allocations, of those below the limit, and of others a multiple.
_SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE_LIMIT, _LARGE_MULTIPLE = 2 << 20, 20 << 20, 10 << 20, 2 << 20


@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment, between its neighbours there."""

    address: int
    size: int
    is_small: bool
    is_free: bool = True
    before: Block | None = None
    after: Block | None = None

    @property
    def is_segment(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.after is None

    def place(self) -> tuple[int, int]:
        """Its order among free blocks."""
        return self.size, self.address


class CachingAllocator:
    """Segments of a device: the smallest free block that suffices is taken, else a new segment.

    A block of a large segment that is at most 1 MiB larger than the allocation is taken whole, which torch counts as
    allocated. A segment beyond the capacity has those returned first in which nothing is allocated.

    Attributes:
        reserved_bytes: size of all segments.
        exceeded: whether the segments were larger than the capacity, which goes on here and ends a call of torch.

    Args:
        capacity_bytes: memory for segments; None for no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.reserved_bytes, self.exceeded = 0, False
        self._capacity, self._end = capacity_bytes, 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Return the block of an allocation in bytes, above 0."""
        block = self.try_to_allocate(size, beyond=True)
        assert block is not None
        return block

    def try_to_allocate(self, size: int, *, beyond: bool = False) -> Block | None:
        """Return the block of an allocation in bytes, above 0; None if there is no room, or one beyond the capacity."""
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        place = bisect_left(free, (size, 0), key=Block.place)
        block = free.pop(place) if place < len(free) else self._segment(size, is_small, beyond=beyond)
        if block is None:
            return None
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

    def _segment(self, size: int, is_small: bool, *, beyond: bool) -> Block | None:
        large = _LARGE_SEGMENT if size < _LARGE_LIMIT else -(-size // _LARGE_MULTIPLE) * _LARGE_MULTIPLE
        block = Block(self._end, _SMALL_SEGMENT if is_small else large, is_small)
        if self._exceeds(block):
            for blocks in self._free.values():
                self.reserved_bytes -= sum(one.size for one in blocks if one.is_segment)
                blocks[:] = [one for one in blocks if not one.is_segment]
            if self._exceeds(block) and not beyond:
                return None
            self.exceeded |= self._exceeds(block)
        self._end += block.size
        self.reserved_bytes += block.size
        return block

    def _exceeds(self, block: Block) -> bool:
        return self._capacity is not None and self.reserved_bytes + block.size > self._capacity
