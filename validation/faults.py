"""What is left of a run when something goes wrong at a random moment: many trials in real processes.

    python validation/faults.py [--trials 200] [--torch 20] [--seed 0] [--jobs 2]

The claim: no finished point is lost, every other one is measured or has its status, a resumed run completes, and
nothing keeps running. A line per kind of fault; the exit code is 1 if anything did not hold, and each trial in which it
did not is named with the command that repeats it. The moments come from the seed; what the machine does then does not.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.support.faults import KINDS, TORCH_KINDS, Outcome, Trial, draw_pictures


def main() -> int:
    arguments = _parser().parse_args()
    root = Path(tempfile.mkdtemp(prefix="perfexp-faults-"))
    pictures = draw_pictures(root / "pictures")
    numbers = range(arguments.seed, arguments.seed + arguments.trials)
    torch_numbers = range(arguments.seed, arguments.seed + arguments.torch)

    def trial(number: int, torch: bool) -> Outcome:
        folder = root / f"{'torch' if torch else 'fake'}-{number}"
        folder.mkdir()
        outcome = Trial(
            number, folder, pictures=pictures if torch else None, kind=arguments.kind
        ).go()
        if not outcome.problems and not arguments.keep:
            shutil.rmtree(folder)
        return outcome

    held = True
    for title, kinds, chosen, torch in (
        ("scripted device", KINDS, numbers, False),
        ("torch on the processor", TORCH_KINDS, torch_numbers, True),
    ):
        if chosen:
            outcomes = _all(chosen, lambda number, torch=torch: trial(number, torch), arguments)
            print(_table(title, list(kinds), outcomes), flush=True)
            held = held and not any(outcome.problems for outcome in outcomes)
    if held:
        shutil.rmtree(root)
    else:
        print(f"what the trials left is in {root}")
    return 0 if held else 1


def _all(
    numbers: range, trial: Callable[[int], Outcome], arguments: argparse.Namespace
) -> list[Outcome]:
    outcomes = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(trial, numbers):
            outcomes.append(outcome)
            if outcome.problems or arguments.verbose:
                word = "VIOLATED" if outcome.problems else "held"
                print(
                    f"{outcome.number:4} {outcome.kind}: {word} — {outcome.text}",
                    *outcome.problems,
                    sep="\n     ",
                )
                sys.stdout.flush()
    return outcomes


def _table(title: str, kinds: list[str], outcomes: list[Outcome]) -> str:
    lines = [f"{title:<24} trials  passed  finished before  lost  left running"]
    for kind in [*kinds, "all"]:
        mine = [outcome for outcome in outcomes if kind in (outcome.kind, "all")]
        if mine:
            passed = sum(not outcome.problems for outcome in mine)
            finished, lost, left = (
                sum(getattr(outcome, name) for outcome in mine)
                for name in ("finished", "lost", "left")
            )
            lines.append(
                f"{kind:<24} {len(mine):>6}  {passed:>6}  {finished:>15}  {lost:>4}  {left:>12}"
            )
    for outcome in outcomes:
        if outcome.problems:
            option = "--trials 0 --torch 1" if "torch" in title else "--trials 1 --torch 0"
            lines.append(
                f"again: python validation/faults.py {option} --seed {outcome.number}  ({outcome.kind})"
            )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="on the scripted device")
    parser.add_argument("--torch", type=int, default=20, help="with torch on the processor")
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument(
        "--kind", choices=sorted({*KINDS, *TORCH_KINDS}), help="this kind of fault only"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each trial")
    parser.add_argument("--keep", action="store_true", help="leave the folders of trials that held")
    return parser


if __name__ == "__main__":
    sys.exit(main())
