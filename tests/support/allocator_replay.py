"""Replay what torch's allocator did on a device by the rules that traces of memory follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perfexp.cost.allocations import CachingAllocator, MemoryBlock


class OutOfMemory(Exception):
    """No room for a segment, even without the free ones."""


class LimitedAllocator(CachingAllocator):
    """Returns free segments to the device before it gives up, as torch's does.

    Args:
        limit_bytes: memory that segments may take.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self._limit, self._address = limit_bytes, 0

    def _segment(self, size: int, is_small: bool) -> MemoryBlock:
        block = self._next_segment(size, is_small)
        if self.reserved_bytes > self._limit:
            self.reserved_bytes -= block.size
            self.return_segments()
            block = self._next_segment(size, is_small)
            if self.reserved_bytes > self._limit:
                raise OutOfMemory
        return block

    def _next_segment(self, size: int, is_small: bool) -> MemoryBlock:
        block = super()._segment(size, is_small)
        block.address, self._address = self._address, self._address + block.size
        return block

    def return_segments(self) -> None:
        """Give segments without a tensor back to the device."""
        for is_small, free in self._free.items():
            self.reserved_bytes -= sum(block.size for block in free if _is_whole(block))
            self._free[is_small] = [block for block in free if not _is_whole(block)]


def _is_whole(block: MemoryBlock) -> bool:
    return block.before is None and block.after is None


def replay(events: Iterable[dict[str, Any]], limit_bytes: int) -> tuple[int, int, str]:
    """Return the largest difference of reserved memory in bytes, the number of allocations, and how it ended."""
    allocator, live, reserved, most, count = (
        LimitedAllocator(limit_bytes),
        dict[int, MemoryBlock](),
        0,
        0,
        0,
    )
    for event in events:
        action, size = event["action"], event["size"]
        if action in ("segment_alloc", "segment_free"):
            reserved += size if action == "segment_alloc" else -size
        elif action == "alloc":
            count += 1
            try:
                live[event["addr"]] = allocator.allocate(size)
            except OutOfMemory:
                return most, count, "out of memory"
            most = max(most, abs(reserved - allocator.reserved_bytes))
        elif action == "free_completed" and event["addr"] in live:
            allocator.release(live.pop(event["addr"]))
        elif action == "oom":  # cuDNN may go on with another engine
            allocator.return_segments()
    return most, count, "end"
