"""Recorded profiles of an H200 (torch 2.11), with the ranges that perfexp puts into a profile.

Each has a spin that holds the queue and the calls piled up behind it: two of resnet50 at batch 1 and of vgg16 trained
at batch 8, one of resnet50 trained at batch 16. Modules and phases were recorded as annotations `module:PATH` and
`phase:NAME`; calls, and the numbers of a module's calls, are added here. Names are cut at 160 characters, and calls of
the runtime that launch nothing are left out. `clean` is the device time of a call without a profiler, in seconds.
"""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

from perfexp.measuring.layers.events import ProfilerEvent, RangeMark, Scope

FOLDER = Path(__file__).parent / "recordings"
INFERENCE, TRAINING = ("resnet50_1_infer",), ("vgg16_8_train", "resnet50_16_train")
EVERY = INFERENCE + TRAINING


@cache
def recording(name):
    """Clean seconds and events."""
    with gzip.open(FOLDER / f"{name}.json.gz") as file:
        content = json.load(file)
    begins = "module:" if name in INFERENCE else "Optimizer.zero_grad#SGD.zero_grad"
    return content["clean"], with_ranges(content["rows"], begins)


def with_ranges(rows, begins):
    rows = sorted(rows, key=lambda row: (row[1], -row[2]))
    host = [row for row in rows if row[3] == "CPU"]
    paths = {row[0].removeprefix("module:") for row in host if row[0].startswith("module:")}
    inner = {path.rpartition(".")[0] for path in paths if path}
    starts = [row[1] for row in host if row[0] == begins]
    events, counts = [], Counter()
    for number, start in enumerate(starts):
        following = starts[number + 1] if number + 1 < len(starts) else rows[-1][1] + 1
        ours = [
            row
            for row in host
            if start <= row[1] < following and row[0].startswith(("module:", "phase:", "Optim"))
        ]
        end = max(row[1] + row[2] for row in ours)
        events.append(
            ProfilerEvent(
                RangeMark(Scope.call, number).name,
                start - 1,
                end - start + 2,
                False,
                442,
                -1 - number,
                0,
            )
        )
    for name, start, duration, kind, *numbers, annotation in rows:
        if kind == "CPU" and name.startswith("module:"):
            counts = Counter() if name == "module:" else counts
            path = name.removeprefix("module:")
            name = RangeMark(Scope.module, counts[path], path not in inner, "Module", path).name
            counts[path] += 1
        elif kind == "CPU" and name.startswith("phase:"):
            name = RangeMark(Scope.phase, kind=name.removeprefix("phase:")).name
        events.append(
            ProfilerEvent(name, start, duration, kind == "CUDA", *numbers, bool(annotation))
        )
    return events


def sum_ns(call):
    """Sum of rows, gaps and unattributed time, which equals the span."""
    return sum(
        spent.busy_ns + spent.gap_ns
        for of in (call.rows, call.unattributed)
        for spent in of.values()
    )
