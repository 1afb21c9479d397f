"""Blocks of the allocator, against the rules of torch's: sizes, splitting, joining, and segments that are returned."""

import random
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.work.allocations import Allocations, peak_of_calls
from perfexp.work.caching_allocator import CachingAllocator

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "taken", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_a_block_has_the_size_of_its_allocation_or_of_the_rest_of_a_segment(size, taken, reserved):
    allocator = CachingAllocator()
    assert allocator.allocate(size).size == taken
    assert allocator.reserved_bytes == reserved


def test_a_block_that_is_up_to_a_mebibyte_larger_is_taken_whole():
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(14 * MIB))
    assert allocator.allocate(13 * MIB).size == 14 * MIB
    assert allocator.reserved_bytes == 14 * MIB


def test_the_smallest_free_block_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 20)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(25 * MIB) is blocks[1]
    assert allocator.reserved_bytes == 90 * MIB


def test_free_neighbours_become_one_block():
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(5 * MIB) for _ in range(3))
    for block in (first, third, second):
        allocator.release(block)
    whole = allocator.allocate(20 * MIB - 512)
    assert (whole.size, allocator.reserved_bytes) == (20 * MIB, 20 * MIB)


def test_at_the_capacity_free_segments_are_returned_and_used_ones_are_not():
    allocator = CachingAllocator(100 * MIB)
    free, used = allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)
    allocator.release(free)
    assert allocator.allocate(50 * MIB).size == 50 * MIB
    assert (allocator.reserved_bytes, allocator.exceeded) == (90 * MIB, False)
    assert used.size == 40 * MIB
    allocator.allocate(12 * MIB)
    assert allocator.exceeded


def test_gaps_between_blocks_take_memory_that_no_segment_gets():
    allocator = CachingAllocator(100 * MIB)
    blocks = [allocator.allocate(9 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.release(block)
    allocator.allocate(40 * MIB)  # 45 MiB are not allocated, none of them in a segment of their own
    assert allocator.exceeded


def test_blocks_never_overlap_and_the_bytes_add_up():
    generator, allocator, used = random.Random(1), CachingAllocator(2**32), []
    for _ in range(3000):
        if used and generator.random() < 0.5:
            allocator.release(used.pop(generator.randrange(len(used))))
        else:
            used.append(allocator.allocate(generator.choice((300, 40_000, MIB, 3 * MIB, 15 * MIB))))
        ends = sorted((block.address, block.address + block.size) for block in used)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert all(not block.is_free for block in used)
    for block in used:
        allocator.release(block)
    assert 0 < allocator.reserved_bytes < 2**32
    allocator.allocate(2**32)  # for which every segment is returned, each of one free block
    assert (allocator.reserved_bytes, allocator.exceeded) == (2**32, False)


def test_a_trace_that_exceeds_its_capacity_does_not_fit():
    def traced(capacity):
        with FakeTensorMode():
            module = torch.nn.Linear(2048, 2048)
            state = {"inputs": torch.empty(64, 2048)}
            segments = {"forward": lambda: state.update(outputs=module(state["inputs"]))}
            return peak_of_calls(module, lambda _: segments, capacity_bytes=capacity)

    assert traced(None).fits
    assert traced(40 * MIB).fits
    assert not traced(17 * MIB).fits


def test_fused_attention_leaves_the_heads_of_a_position_side_by_side():
    """As CUDA's kernels do, so that joining the heads costs a copy; on a CPU it may not."""
    with FakeTensorMode(), Allocations():
        query = torch.empty(50, 2 * 4, 64).view(50, 2, 4, 64).permute(1, 2, 0, 3)
        attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert attended.transpose(1, 2).is_contiguous()
    assert not attended.permute(2, 0, 1, 3).is_contiguous()
