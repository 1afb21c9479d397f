"""Blocks of the allocator, against the rules of torch's: sizes, splitting, joining, and segments that are returned."""

import random
from itertools import pairwise

import pytest
import torch

from perfexp.cost.allocations import Allocations, CachingAllocator, without_memory
from perfexp.cost.trial import isolated
from tests.support.allocator_replay import replay

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
def test_block_has_its_allocation_size_or_the_segments_rest(size, taken, reserved):
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


def test_blocks_never_overlap_and_the_bytes_add_up():
    generator, allocator, used = random.Random(1), CachingAllocator(), []
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
    reserved = allocator.reserved_bytes
    assert reserved > 40 * MIB
    allocator.allocate(20 * MIB - 512)  # for which the blocks of a segment have to be one again
    assert allocator.reserved_bytes == reserved


@isolated
def attended(dtype, dropout=0.0):
    """Peak of an attention with heads side by side in its inputs, and whether two layouts of its output are dense."""
    with without_memory(torch.nn.Identity()), Allocations() as allocations:
        query = torch.empty(50, 2 * 4, 64, dtype=dtype).view(50, 2, 4, 64).permute(1, 2, 0, 3)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, query, query, dropout_p=dropout
        )
    layouts = output.transpose(1, 2), output.permute(2, 0, 1, 3)
    return allocations.peak.total_bytes, [layout.is_contiguous() for layout in layouts]


@pytest.mark.parametrize(
    ("dtype", "efficient"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_fused_attention_output_has_the_layout_of_cuda_kernels(dtype, efficient):
    """The memory-efficient kernel, for float32, has its own, and joining the heads costs a copy."""
    assert attended(dtype)[1] == [efficient, not efficient]


def test_attention_with_dropout_takes_the_memory_of_one_without():
    assert attended(torch.float32, dropout=0.5)[0] == attended(torch.float32)[0]


def test_a_transformer_layer_in_inference_has_its_inner_tensors():
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).eval()

    @isolated
    def peak():
        with without_memory(layer), Allocations() as allocations, torch.inference_mode():
            layer(torch.empty(8, 128, 64))
        return allocations.peak.total_bytes

    assert peak() >= 8 * 128 * 256 * 4  # of the perceptron, four times as wide
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_history_of_a_device_with_a_limit_is_replayed():
    """What a request needs that finds no room, or fails, is given back first; the device has 40 MiB."""
    steps = [
        ("segment_alloc", 0, 30), ("alloc", 1, 30), ("free_completed", 1, 30),
        ("segment_free", 0, 30), ("segment_alloc", 0, 36), ("alloc", 2, 35), ("free_completed", 2, 35),
        ("segment_free", 0, 36), ("oom", 0, 50), ("segment_alloc", 0, 20), ("alloc", 3, 5),
    ]  # fmt: skip
    events = [
        {"action": action, "addr": address, "size": size << 20} for action, address, size in steps
    ]
    assert replay(events, 40 << 20) == (0, 3, "end")
    assert replay(events[:6], 34 << 20)[2] == "out of memory"
    assert replay([events[0], events[1], {**events[5], "size": 5 << 20}], 60 << 20)[0] == 20 << 20
