"""A/A of functions: how often `perfexp ab --left --right` finds a difference between equal sides.

    python validation/callables.py --pairs=40 --json=FILE

For each function the same one is measured on both sides, in pairs of processes. The mean of log(right/left) shows
whether a side is favored. Sequences of pairs are then drawn with replacement and judged as the command does it: after
each pair, until a verdict or the last pair.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfexp.comparison.document import Verdict
from perfexp.run import callable_judge
from perfexp.statistics import sequential

MARGIN, SEQUENCES = 0.01, 2000
CODE = """
import torch
def make_rows(seed): return torch.randn(256, 1024)
def make_square(seed): return torch.randn(192, 192), torch.randn(192, 192)
def make_short(seed): return torch.randn(64)
def rows(x): return torch.softmax(x, -1)
def square(a, b): return a @ b
def short(x): return torch.sigmoid(x) * x
"""


def measured(file: Path, name: str, count: int) -> list[dict[str, float]]:
    """Measure pairs of processes that both run one function."""
    places = f"{file}:{name}", f"{file}:{name}", f"{file}:make_{name}"
    judge = callable_judge._Judge(places, str(file.parent))
    with judge._running("left") as judge._referee:
        facts = judge._referee.ask("describe")
        judge._shapes, judge._parameters = range(facts["shapes"]), range(facts["arguments"])
        return [judge._pair(is_first=number == 0) for number in range(count)]


def judged(pairs: list[dict[str, float]], shuffler: random.Random) -> Verdict:
    """Judge one sequence of pairs, drawn with replacement."""
    drawn = shuffler.choices(pairs, k=sequential.MOST)
    for count in range(callable_judge._LEAST_PAIRS, sequential.MOST + 1):
        verdict, _ = callable_judge._judged(drawn[:count], MARGIN)
        if verdict is not Verdict.UNDECIDED:
            break
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(CODE)
        for name in ("rows", "square", "short"):
            pairs = measured(file, name, arguments.pairs)
            shuffler = random.Random(0)
            verdicts = Counter(judged(pairs, shuffler).value for _ in range(SEQUENCES))
            shares = {verdict: count / SEQUENCES for verdict, count in verdicts.items()}
            results[name] = {"verdicts": shares, "pairs": pairs}
            logs = [math.log(pair["right"] / pair["left"]) for pair in pairs]
            mean, error = statistics.fmean(logs), statistics.stdev(logs) / len(logs) ** 0.5
            results[name] |= {"mean_log_ratio": mean, "standard_error": error}
            print(
                f"{name} {shares} mean log ratio {mean:.4f}, standard error {error:.4f}", flush=True
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
