"""What the printed ± of a whole run is worth on a scripted device whose noise and truth are known.

    python validation/noise.py [--runs=300] [NAME…]

Each run takes the three times of a call of 5 ms in five processes, 1.5 s apart, as `stopping=normal` does. For `device`
and for samples/s: the share of runs whose 95 % interval holds the truth, the share with a diagnostic that names the
cause (where there is no cause to name: with any diagnostic, which is false), the share with either, and the median
half-width. Seeds are fixed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.noisy_device import CALL_SECONDS, NOISES, run


def line(name: str, runs: int) -> str:
    source, median, mean, causes = NOISES[name]
    held, warned, either, widths, rates = 0, 0, 0, [], 0
    for seed in range(runs):
        result = run(source, seed)
        interval, rate = result.times["device"].median, result.samples_per_second
        low, high = interval.low or 0.0, interval.high or np.inf
        inside = low <= median * CALL_SECONDS <= high
        named = (
            any(doubt.code in causes for doubt in result.doubts) if causes else bool(result.doubts)
        )
        held, warned, either = (
            held + inside,
            warned + named,
            either + (inside or (named and bool(causes))),
        )
        widths.append(interval.relative_half_width or np.inf)
        rates += rate is not None and (rate.low or 0.0) <= 1 / (mean * CALL_SECONDS) <= (
            rate.high or np.inf
        )
    cells = [f"{count / runs:.1%}" for count in (held, warned, either, rates)]
    return f"| {name} | {' | '.join(cells)} | ±{np.median(widths):.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("names", nargs="*", default=list(NOISES))
    arguments = parser.parse_args()
    print("| noise | `device` holds the truth | warned | either | samples/s hold it | median ± |")
    print("|---|---|---|---|---|---|")
    for name in arguments.names:
        print(line(name, arguments.runs), flush=True)


if __name__ == "__main__":
    main()
