"""What the verdicts of `perfexp compare` are worth on synthetic records whose truth is known.

    python validation/comparison.py [--pairs=1000] [--sweeps=100] [--records=1000] [--only ab|ab-sweeps]

Each side is a run of eight processes with 30 calls each. For each scenario: the share of pairs with each verdict, the
share of ratios whose 95 % interval holds the truth, and the median half-width. For sweeps of 100 points, of which ten
truly differ by more than the margin: the mean share of false verdicts among all FASTER and SLOWER ones. Seeds are
fixed. Then the same for `perfexp ab`, which measures pairs of processes until there is a verdict: the shares, and the
median and the greatest number of processes of each side. Then `perfexp ab` of several points, which ends when all of
them have a verdict: the mean shares of false verdicts among all FASTER and SLOWER ones, at the end and at the look
where it is the greatest, and among all SAME ones. At the end, the time of a comparison of two sweeps with that many
records of ten points together.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.verdicts import (
    POINTS,
    SCENARIOS,
    SWEEPS,
    TOGETHER,
    Shares,
    in_turn,
    seconds,
    sweep,
    sweep_in_turn,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--sweeps", type=int, default=100)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--only", choices=["ab", "ab-sweeps"], help="Simulate `perfexp ab` alone.")
    arguments = parser.parse_args()
    if arguments.only == "ab-sweeps":
        _simulate_sweeps_in_turn(arguments.sweeps)
        return
    if not arguments.only:
        _simulate_runs(arguments)
    print(
        "\n| ab | FASTER | SLOWER | SAME | UNDECIDED | interval holds the truth | median processes | most |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, scenario in TOGETHER.items():
        shares = Shares.of(scenario, arguments.pairs, in_turn)
        print(
            f"| {name} | {shares.line} | {shares.processes[0]:g} | {shares.processes[1]} |",
            flush=True,
        )
    if not arguments.only:
        _simulate_sweeps_in_turn(arguments.sweeps)
        each = seconds(arguments.records) / arguments.records
        print(
            f"\n{1e3 * each:.1f} ms per record to read and compare {arguments.records} records of ten points"
        )


def _simulate_runs(arguments: argparse.Namespace) -> None:
    print("| scenario | FASTER | SLOWER | SAME | UNDECIDED | interval holds the truth | median ± |")
    print("|---|---|---|---|---|---|---|")
    for name, scenario in SCENARIOS.items():
        shares = Shares.of(scenario, arguments.pairs)
        print(f"| {name} | {shares.line} | ±{shares.half_width:.2%} |", flush=True)
    false, named = np.mean([sweep(seed) for seed in range(arguments.sweeps)], axis=0)
    print(
        f"\n{arguments.sweeps} sweeps of {POINTS} points: {false:.1%} of the FASTER and SLOWER verdicts are false,"
    )
    print(f"and {named:.1%} of the points that truly differ have one")


def _simulate_sweeps_in_turn(sweeps: int) -> None:
    print(
        f"\n| {sweeps} sweeps by ab | false of FASTER and SLOWER | ± | at the worst look | ± | false of SAME | named |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, scenario in SWEEPS.items():
        every = np.array([sweep_in_turn(scenario, seed) for seed in range(sweeps)])
        (end, worst, same, named, _), errors = (
            every.mean(axis=0),
            1.96 * every.std(axis=0) / math.sqrt(sweeps),
        )
        cells = f"{end:.1%} | ±{errors[0]:.1%} | {worst:.1%} | ±{errors[1]:.1%} | {same:.1%} | {named:.1%}"
        print(f"| {name} ({np.median(every[:, 4]):g} processes) | {cells} |", flush=True)


if __name__ == "__main__":
    main()
