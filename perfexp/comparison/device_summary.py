"""Device summary: two devices by four figures for each phase, from the pairs of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from perfexp.comparison.document import Compared, DeviceSummary, SideFacts, Verdict
from perfexp.records.point_times import DEVICE_TIMES

#: Times of a call, the first of which counts that a phase has.
_TIMES = (*DEVICE_TIMES, "latency")


def summaries(sides: Iterable[SideFacts], pairs: Sequence[Compared]) -> Iterator[DeviceSummary]:
    """A summary of each phase of each side whose subject is the device."""
    for side in sides:
        if any(one.key == "device" for one in side.differences):
            comparable = [pair for pair in pairs if pair.side == side.name and pair.verdict != Verdict.NOT_COMPARABLE]
            for phase in dict.fromkeys(pair.key.phase for pair in comparable):
                yield _summary(side.name, phase, [pair for pair in comparable if pair.key.phase == phase])


def in_words(summary: DeviceSummary) -> str:
    """A summary in one line; ≈ stands before a ratio that is undecided."""
    words = {
        "speedup": "speedup",
        "throughput_ratio": "throughput ratio",
        "memory_efficiency": "memory efficiency (samples/s per byte of peak memory)",
    }
    texts = []
    for name, word in words.items():
        if (value := getattr(summary, name)) is not None:
            texts.append(f"{word} {'≈ ' if name in summary.undecided else ''}{value:.3f}")
    if summary.accuracy_difference is not None:
        texts.append(f"accuracy {100 * summary.accuracy_difference:+.2f} percentage points")
    return f"{summary.phase}: {', '.join(texts)}"


def _summary(side: str, phase: str, pairs: Sequence[Compared]) -> DeviceSummary:
    ratios = {
        name: _geometric_mean(pair.ratio for pair in pairs if pair.measure == name and pair.ratio)
        for name in dict.fromkeys(pair.measure for pair in pairs if pair.ratio)
    }
    time = next((name for name in _TIMES if name in ratios), "")
    open_pairs = {pair.measure for pair in pairs if pair.verdict == Verdict.UNDECIDED}
    parts = {"speedup": {time}, "throughput_ratio": {"throughput"}, "memory_efficiency": {"throughput", "memory"}}
    seconds = ratios.get(time)
    rate, memory = ratios.get("throughput"), ratios.get("memory")
    accuracies = [pair.other - pair.baseline for pair in pairs if pair.measure == "accuracy"]
    return DeviceSummary(
        side=side,
        phase=phase,
        speedup=1 / seconds if seconds else None,
        throughput_ratio=rate,
        memory_efficiency=rate / memory if rate and memory else None,
        accuracy_difference=sum(accuracies) / len(accuracies) if accuracies else None,
        undecided=tuple(name for name, measures in parts.items() if measures & open_pairs),
    )


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
