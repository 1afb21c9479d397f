"""Hostile folders through every command that reads them: nothing runs, nothing outside changes.

    python validation/hostile.py [--trials 500] [--seed 0]

First the whole corpus of tests/adversarial/cases.py, of which the tests take a part, then folders with random changes.

The claim is that of SECURITY.md. The exit code is 1 if anything did not hold; the seed of each such trial is named.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.adversarial.cases import CASES
from tests.adversarial.mutations import mutate
from tests.adversarial.place import Place, commands, driver, make_base


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    codes: Counter[tuple[str, int | None]] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="perfexp-hostile-") as root, driver() as driven:
        base = make_base(Path(root) / "base")
        for name, case in CASES.items():
            place = Place(Path(root) / name)
            place.take(base)
            problems = []
            for step in case(place):
                before = place.state()
                for command in step if isinstance(step, list) else commands(step, place.out):
                    driven.run(place, command)
                problems += place.problems(before)
            if problems:
                failed += 1
                print(f"case {name}:", *problems, sep="\n  ", flush=True)
            shutil.rmtree(place.root)
        for seed in range(arguments.seed, arguments.seed + arguments.trials):
            place = Place(Path(root) / str(seed))
            place.take(base)
            given = mutate(place, seed)
            before = place.state()
            for command in given:
                answer = driven.run(place, command)
                codes[command[0].partition("=")[0], answer.code] += 1
            if problems := place.problems(before):
                failed += 1
                print(f"seed {seed}:", *problems, sep="\n  ", flush=True)
            shutil.rmtree(place.root)
    for (command, code), number in sorted(codes.items(), key=str):
        print(f"{command:<8} exit code {code}: {number}")
    tried = arguments.trials + len(CASES)
    print(f"{tried - failed} of {tried} cases and trials held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
