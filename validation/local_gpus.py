"""The runs of a sweep on two GPUs of one machine, beside one GPU: wall time, and the times that are measured.

    python validation/local_gpus.py [--gpus 2] [--models resnet50,vgg16] [--batches 1,8,32,64] [--rounds 2] [--out DIR]

Each round measures the same sweep on one GPU, on all with `exclusive=false`, and with `exclusive=true`. The claims:
with `exclusive=false` at most 0.6 of the wall time of one GPU, and `device` within 1 %; with `exclusive=true` the
intervals of latency and throughput overlap with those of one GPU. Boards differ by more than the interval of a process
shows, so that runs on the same board and on another one are counted apart. `--options gpu=fake` tries it without GPUs.
The runs stay in the folder `--out`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.statistics.blockwise import Summary

#: The board and the statistics of each run of a point, by kind of time, model and point.
Times = dict[str, list[tuple[str, Summary]]]


def main() -> int:
    arguments = _parser().parse_args()
    ways = {
        "one GPU": ["hydra.launcher.gpus=1"],
        "together": [f"hydra.launcher.gpus={arguments.gpus}", "hydra.launcher.exclusive=false"],
        "turns": [f"hydra.launcher.gpus={arguments.gpus}", "hydra.launcher.exclusive=true"],
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    times: dict[str, Times] = {way: defaultdict(list) for way in ways}
    with suppress(
        KeyboardInterrupt
    ):  # a machine that is lent by the minute: what is complete counts
        for number in range(arguments.rounds):
            for way, launcher in ways.items():
                folder = arguments.out / f"{way.replace(' ', '-')}-{number}"
                took = _sweep(folder, [*arguments.options, *launcher], arguments)
                seconds[way].append(took)
                for file in folder.glob("*/record.json"):
                    _collect(Record.load(file), times[way])
    ratios = {
        way: statistics.median(seconds[way]) / statistics.median(seconds["one GPU"])
        for way in seconds
    }
    print(json.dumps({"wall_seconds": seconds, "wall_ratio": ratios}))
    for way in ("together", "turns"):
        for kind in ("device", "latency", "throughput"):
            for is_same in (True, False):
                found = _compared(times["one GPU"], times[way], kind, is_same=is_same)
                print(way, kind, "same board" if is_same else "other board", json.dumps(found))
    return 0


def _sweep(folder: Path, options: list[str], arguments: argparse.Namespace) -> float:
    """Wall time of a sweep."""
    axes = [f"model={arguments.models}", f"batch_size={arguments.batches}"]
    fixed = ["-m", "hydra/launcher=local", "tracking=none", f"output_dir={folder}"]
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "perfexp", *axes, *fixed, *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def _collect(record: Record, times: Times) -> None:
    board = str(record.environment["device"].get("uuid"))
    for row in rows(record):
        for kind, summary in row.times.items():
            times[f"{kind} {record.plan['model']['name']} {row.key}"].append((board, summary))


def _compared(
    one: Times, other: Times, kind: str, *, is_same: bool
) -> dict[str, float | int | None]:
    """Number of pairs of a round, worst ratio of their medians, and how many have intervals that do not overlap.

    Args:
        is_same: whether both of a pair are of the same board, or of two.
    """
    pairs = [
        (first, second)
        for name in one
        if name.startswith(f"{kind} ")
        for (board, first), (its_board, second) in zip(one[name], other[name], strict=False)
        if (board == its_board) == is_same
    ]
    ratios = [second.median.value / first.median.value for first, second in pairs]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=None)
    apart = sum(not _overlap(first, second) for first, second in pairs)
    return {"pairs": len(pairs), "worst_ratio": worst and round(worst, 4), "apart": apart}


def _overlap(first: Summary, second: Summary) -> bool:
    one, other = first.median, second.median
    if None in (one.low, one.high, other.low, other.high):
        return True
    return bool(one.low <= other.high and other.low <= one.high)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", default="resnet50,vgg16")
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("local_gpus"), help="folder of the runs")
    parser.add_argument("--options", nargs="*", default=["stopping=brisk"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
