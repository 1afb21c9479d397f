"""Replay what torch's allocator did on a device by the rules that traces of memory follow.

`python validation/allocator_history.py MODEL BATCH` runs four training steps on the GPU of this machine, by default in
float32 at 224 pixels, and prints how far the reserved memory of the replay is from it, and the measured and the traced
peak. Further arguments are settings: `precision=amp_bf16 input_size=320`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.cli.composition import compose
from perfexp.host import gpu_sheets, installation
from perfexp.host.forked import Forked
from perfexp.plan import config
from perfexp.records import units
from perfexp.worker.peak_memory import MemoryTrace
from tests.support.allocator_replay import replay

STEPS = 4


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
