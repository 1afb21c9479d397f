"""Replay what torch's allocator did on a device by the rules that traces of memory follow.

`python benchmarks/allocator_history.py MODEL BATCH` runs four training steps on the GPU of this machine, by default in
float32 at 224 pixels, and prints how far the reserved memory of the replay is from it, and the measured and the traced
peak. Further arguments are settings: `precision=amp_bf16 input_size=320`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from perfexp.cli.composition import compose
from perfexp.host import gpu_sheets, installation
from perfexp.host.forked import Forked
from perfexp.plan import config
from perfexp.records import units
from perfexp.work.caching_allocator import Block, CachingAllocator
from perfexp.worker.peak_memory import MemoryTrace

STEPS = 4


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

    def _segment(self, size: int, is_small: bool) -> Block:
        block = self._next_segment(size, is_small)
        if self.reserved_bytes > self._limit:
            self.reserved_bytes -= block.size
            self.return_segments()
            block = self._next_segment(size, is_small)
            if self.reserved_bytes > self._limit:
                raise OutOfMemory
        return block

    def _next_segment(self, size: int, is_small: bool) -> Block:
        block = super()._segment(size, is_small)
        block.address, self._address = self._address, self._address + block.size
        return block

    def return_segments(self) -> None:
        """Give segments without a tensor back to the device."""
        for is_small, free in self._free.items():
            self.reserved_bytes -= sum(block.size for block in free if _is_whole(block))
            self._free[is_small] = [block for block in free if not _is_whole(block)]


def _is_whole(block: Block) -> bool:
    return block.before is None and block.after is None


def steps(plan: config.Plan, batch_size: int) -> str:
    """Take training steps on the device; returns how they ended."""
    device, data, mode = (config.build(node) for node in (plan.gpu, plan.data, plan.mode.train))
    device.start()
    torch.cuda.memory._record_memory_history(enabled="all", context=None)  # type: ignore[no-untyped-call]
    session = config.build(
        {**plan.model, **({"weights": None} if "weights" in plan.model else {})}
    ).open(
        device=device, precision=plan.precision, execution=plan.execution, num_classes=None, seed=0
    )
    [key] = plan.timed_keys()
    try:
        with ExitStack() as stack:
            settings = {
                "input_size": key.input_size,
                "batch_size": batch_size,
                "training": True,
                "seed": 0,
            }
            batches = stack.enter_context(data.open(session=session, **settings))
            step = mode.prepare(session=session, batches=batches, batch_size=batch_size)
            stack.enter_context(step.active())
            for _ in range(STEPS):
                for segment in step.segments.values():
                    segment()
            torch.cuda.synchronize()
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
        return str(error).split(".")[0]
    return f"{STEPS} steps"


def replay(events: Iterable[dict[str, Any]], limit_bytes: int) -> tuple[int, int, str]:
    """Return the largest difference of reserved memory in bytes, the number of allocations, and how it ended."""
    allocator, live, reserved, most, count = (
        LimitedAllocator(limit_bytes),
        dict[int, Block](),
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


def traced_bytes(words: Sequence[str]) -> int:
    plan = config.typed(compose(words))
    return MemoryTrace(plan).needed_bytes(next(iter(plan.timed_keys())))


def main(arguments: Sequence[str]) -> int:
    name, batch_size, *words = arguments
    words = [f"model={name}", "mode=train", f"batch_size={batch_size}", *words]
    with Forked(traced_bytes) as traced:  # before autograd computes on the device
        outcome = steps(config.typed(compose([*words, "gpu=auto"])), int(batch_size))
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]  # type: ignore[no-untyped-call]
        limit = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        most, count, ended = replay(events, limit)
        print(f"{name}, batch {batch_size}: {outcome}; room for {units.format_bytes(limit)}")
        print(
            f"  {count} allocations, replayed until {ended}; reserved differs by {most / 2**20:.0f} MiB at most"
        )
        sheet = gpu_sheets.matching(
            gpu_sheets.read([installation.conf_dir()]), torch.cuda.get_device_name()
        )
        measured = units.format_bytes(torch.cuda.max_memory_allocated())
        peak = units.format_bytes(traced([*words, f"gpu={sheet or 'auto'}"]))
    print(f"  peak {measured}, traced without workspaces of cuDNN {peak}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
