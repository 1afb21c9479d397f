"""Whether intervals hold on machines and models that the priors do not know.

    python validation/left_out.py

Each class of figures is fitted without one machine, or without one model, of `process_medians.json` and of the
published records. Of each figure that was left out, the first processes predict the mean of the others. Printed is the
share of figures whose mean lies in the 95 % interval of the difference, by the first processes and the fitted prior.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
from process_components import CELLS, RECORDS, classes, fits, of_file

from perfexp.statistics.distributions import student95
from perfexp.statistics.moderated import Repeats
from perfexp.statistics.prior import Prior

#: Numbers of processes that predict, and the least number of those that they predict.
FIRST, OTHERS = (1, 3), 2


def holds(values: tuple[float, ...], first: int, prior: Prior) -> bool:
    """Whether the mean of the other processes lies where the first ones expect it."""
    known = Repeats(values=values[:first], prior=prior).component
    assert known is not None
    between, others = known.variance, len(values) - first
    error = math.sqrt(between / first + between / others)
    difference = float(np.log(values[:first]).mean() - np.log(values[first:]).mean())
    return abs(difference) <= student95(known.degrees) * error


def outcomes(cells: list[dict], left_out: str) -> Iterator[tuple[str, str, int, bool]]:
    """Yield kind, class and number of first processes of each figure that is left out, and whether it holds."""
    for kind in ("cuda", "cpu"):
        of_kind = [cell for cell in cells if cell["kind"] == kind]
        for group in sorted({cell[left_out] for cell in of_kind}):
            known = fits([cell for cell in of_kind if cell[left_out] != group])
            unknown = classes([cell for cell in of_kind if cell[left_out] == group])
            for name, members in unknown.items():
                for _, _, values in members if name in known else ():
                    for first in FIRST:
                        if len(values) >= first + OTHERS:
                            yield kind, name, first, holds(values, first, known[name].on([]))


def main() -> None:
    cells = json.loads(CELLS.read_text())
    cells += [cell for file in sorted(RECORDS.glob("*.json.xz")) for cell in of_file(file)]
    for left_out in ("device", "model"):
        found = list(outcomes(cells, left_out))
        number = Counter((kind, name, first) for kind, name, first, _ in found)
        held = Counter((kind, name, first) for kind, name, first, is_held in found if is_held)
        for key, count in sorted(number.items()):
            kind, name, first = key
            print(
                f"without its {left_out:7}{kind:5}{name:11} {first} of processes {held[key] / count:7.1%} of {count}"
            )


if __name__ == "__main__":
    main()
