"""The runs of a sweep on two GPUs of one machine, beside one GPU: wall time, and the times that are measured.

    python benchmarks/local_gpus.py [--gpus 2] [--models resnet50,vgg16] [--batches 1,8,32,64] [--rounds 2] [--out DIR]

Each round measures the same sweep on one GPU, on all with `exclusive=false`, and with `exclusive=true`. The claims:
with `exclusive=false` at most 0.6 of the wall time of one GPU, and `device` within 1 %; with `exclusive=true` the
intervals of latency and throughput overlap with those of one GPU. `--options gpu=fake` tries it without GPUs.
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


def main() -> int:
    arguments = _parser().parse_args()
    ways = {
        "one GPU": ["hydra.launcher.gpus=1"],
        "together": [f"hydra.launcher.gpus={arguments.gpus}", "hydra.launcher.exclusive=false"],
        "turns": [f"hydra.launcher.gpus={arguments.gpus}", "hydra.launcher.exclusive=true"],
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    times: dict[str, dict[str, list[Summary]]] = {way: defaultdict(list) for way in ways}
    with suppress(KeyboardInterrupt):  # a machine that is lent by the minute: what is complete counts
        for number in range(arguments.rounds):
            for way, launcher in ways.items():
                folder = arguments.out / f"{way.replace(' ', '-')}-{number}"
                took = _sweep(folder, [*arguments.options, *launcher], arguments)
                seconds[way].append(took)
                for file in folder.glob("*/record.json"):
                    _collect(Record.load(file), times[way])
    ratios = {way: statistics.median(seconds[way]) / statistics.median(seconds["one GPU"]) for way in seconds}
    print(json.dumps({"wall_seconds": seconds, "wall_ratio": ratios}))
    for way in ("together", "turns"):
        for kind in ("device", "latency", "throughput"):
            print(way, kind, json.dumps(_compared(times["one GPU"], times[way], kind)))
    return 0


def _sweep(folder: Path, options: list[str], arguments: argparse.Namespace) -> float:
    """Wall time of a sweep."""
    axes = [f"model={arguments.models}", f"batch_size={arguments.batches}"]
    fixed = ["-m", "hydra/launcher=local", "tracking=none", "ttfp=false", f"output_dir={folder}"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "perfexp", *axes, *fixed, *options], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _collect(record: Record, times: dict[str, list[Summary]]) -> None:
    for row in rows(record):
        for kind, summary in row.times.items():
            times[f"{kind} {record.plan['model']['name']} {row.key}"].append(summary)


def _compared(one: dict[str, list[Summary]], other: dict[str, list[Summary]], kind: str) -> dict[str, float | int]:
    """Number of points, worst ratio of the medians, and how many have no overlapping interval in any round."""
    names = [name for name in one if name.startswith(f"{kind} ") and name in other]
    ratios = [
        statistics.median(each.median.value for each in other[name])
        / statistics.median(each.median.value for each in one[name])
        for name in names
    ]
    apart = sum(not any(_overlap(first, second) for first in one[name] for second in other[name]) for name in names)
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)
    return {"points": len(names), "worst_ratio": round(worst, 4), "apart": apart}


def _overlap(first: Summary, second: Summary) -> bool:
    one, other = first.median, second.median
    if None in (one.low, one.high, other.low, other.high):
        return True
    return bool(one.low <= other.high and other.low <= one.high)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", default="resnet50,vgg16")
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("local_gpus"), help="folder of the runs")
    parser.add_argument("--options", nargs="*", default=["stopping=brisk"])
    return parser


if __name__ == "__main__":
    sys.exit(main())
