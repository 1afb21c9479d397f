"""A/A: how often the printed ± holds for the next run of the same command on this machine.

    python validation/aa.py --runs=20 model=resnet18 input_size=96 mode=inference
    python validation/aa.py --runs=8 "model=resnet50 batch_size=[1,16]" "model=convnext_tiny batch_size=8"

Each command runs as often as `--runs` says, in turns, each with processes of its own. For each point and kind of
time: the share of the intervals that hold the mean of all runs, the share of pairs of intervals that are disjoint,
the standard deviation between runs, and the median printed half-width. With `--json=FILE` also every interval. Then
the verdicts of `perfexp compare` on the first and second run, the third and fourth, …: every FASTER and SLOWER is
false.

Nothing is known of the machine at the beginning; what the runs show of it refines the priors of later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.comparison import judging
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.records.analysis import Analysis
from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.statistics.estimators import Interval

Cells = dict[str, list[Interval]]


def run(command: str, folder: Path) -> Record:
    """Measure once."""
    arguments = [
        sys.executable,
        "-m",
        "perfexp",
        *shlex.split(command),
        "tracking=none",
        f"output_dir={folder}",
    ]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder.parent / "cache")}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return Record.load(folder)


def intervals(record: Record) -> Iterator[tuple[str, Interval]]:
    """Name and interval of each time of each point: medians, and the mean of the pipelined loop, which rates are of."""
    for row in rows(record):
        place = f"{record.plan['choices'].get('model')} {row.key.phase} {row.key.size_label} batch {row.key.batch_size}"
        for kind, time in row.times.items():
            yield f"{place}: {kind}", time.median
        if row.samples_per_second:
            yield f"{place}: samples/s", row.samples_per_second


def line(name: str, found: list[Interval]) -> tuple[str, int, int, int, int, float, float]:
    """Figures of one cell: intervals, those that hold the grand mean, pairs, disjoint pairs, CV, median half-width."""
    known = [(one.low, one.high) for one in found if one.low is not None and one.high is not None]
    center = geometric_mean(one.value for one in found)
    held = sum(low <= center <= high for low, high in known)
    pairs = list(combinations(known, 2))
    disjoint = sum(one[1] < other[0] or other[1] < one[0] for one, other in pairs)
    spread = float(np.std(np.log([one.value for one in found]), ddof=1))
    widths = [one.relative_half_width or 0.0 for one in found]
    return name, len(known), held, len(pairs), disjoint, spread, median(widths)


def verdicts(runs: list[Record]) -> Counter[tuple[str, str]]:
    """How often each measure of pairs of consecutive runs has a verdict, with a margin of 1 %."""
    counts: Counter[tuple[str, str]] = Counter()
    for pair in zip(runs[::2], runs[1::2], strict=False):
        sides = [
            Side.of(name, name, [Analysis.of(one)]) for name, one in zip("AB", pair, strict=True)
        ]
        counts.update((one.measure, one.word) for one in judging.compare(sides, Settings()).pairs)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "commands", nargs="+", help="overrides of one command, each command in one argument"
    )
    arguments = parser.parse_args()
    commands = arguments.commands
    if not any(" " in command for command in commands):
        commands = [" ".join(commands)]
    cells: Cells = {}
    records: list[list[Record]] = [[] for _ in commands]
    with tempfile.TemporaryDirectory(prefix="perfexp-aa-") as place:
        for number in range(arguments.runs):
            for index, command in enumerate(commands):
                records[index].append(run(command, Path(place, f"{number}-{index}")))
                for name, interval in intervals(records[index][-1]):
                    cells.setdefault(name, []).append(interval)
                    print(f"{number} {name}: {interval}", file=sys.stderr, flush=True)
    lines = [line(name, found) for name, found in cells.items()]
    print(
        "| point and time | runs | mean inside | pairs disjoint | SD between runs | median ± | ± over SD |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, count, held, pairs, disjoint, spread, width in lines:
        print(
            f"| {name} | {count} | {held / count:.0%} | {disjoint / max(pairs, 1):.0%} | {spread:.2%} | {width:.2%} "
            f"| {f'{width / spread:.1f}' if spread else ''} |"
        )
    total = [sum(line[index] for line in lines) for index in (1, 2, 3, 4)]
    print(f"| all | {total[0]} | {total[1] / total[0]:.1%} | {total[3] / total[2]:.1%} | | | |")
    counts = sum(map(verdicts, records), Counter())
    print("\n| measure | verdict | pairs |\n|---|---|---|")
    for (measure, word), count in sorted(counts.items()):
        print(f"| {measure} | {word} | {count} |")
    if arguments.json:
        found = {
            name: [[one.value, one.low, one.high] for one in cell] for name, cell in cells.items()
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
