"""Reproduction: the outcome of measuring a record's plan again, from comparing both runs.

`perfexp reproduce` measures the plan of a record and compares the new run with the record. The
outcome is whether all figures are the same within the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from perfexp.comparison import comparison_table
from perfexp.comparison.comparability import Difference, Role
from perfexp.comparison.document import Compared, Comparison, Verdict, measures_of, with_verdict
from perfexp.records import units

#: Measures that decide by default: p95 rarely has an interval, and another clock changes cycles but
#: not times.
MEASURES = ("device", "latency", "throughput", "memory", "energy", "accuracy")


class Outcome(StrEnum):
    """Outcome of a reproduction."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


#: Exit codes, the same as for `perfexp check`.
EXIT_CODES = {
    Outcome.REPRODUCED: 0,
    Outcome.DIFFERS: 1,
    Outcome.UNDECIDED: 2,
    Outcome.NOT_COMPARABLE: 2,
}


@dataclass(frozen=True)
class Reproduction:
    """Outcome with its reasons, a line each, at least one."""

    outcome: Outcome
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return lines for the console, outcome first."""
        joint = " because" if self.outcome is Outcome.NOT_COMPARABLE else ":"
        first = f"{self.outcome.value.upper()}{joint} {self.reasons[0]}"
        return [first, *(f"  {line}" for line in self.reasons[1:])]


def not_comparable(differences: Sequence[Difference]) -> Reproduction | None:
    """Return the outcome if the runs' facts rule out comparing any figure; otherwise None.

    `perfexp reproduce` asks before it measures: another device, or a confounder that affects all
    measures and is not allowed, makes a measurement useless.
    """
    reasons = []
    for item in differences:
        is_confounder = item.role is Role.CONFOUNDER and not item.allowed and not item.measures
        if is_confounder or item.key == "device":
            remedy = f"; {item.help}" if item.help else ""
            reasons.append(f"{item.key}: {item.baseline} → {item.other}{remedy}")
    if not reasons:
        return None
    return Reproduction(Outcome.NOT_COMPARABLE, tuple(reasons))


def judge(compared: Comparison) -> Reproduction:
    """Combine the verdicts on two runs of the same plan; the worst verdict counts.

    A figure that differs counts before a confounded figure, and that before an undecided one.

    Args:
        compared: comparison of the record (`A`) with the new run.
    """
    if reproduction := not_comparable(compared.sides[1].differences):
        return reproduction
    differing = _lines(compared, Verdict.WORSE, Verdict.BETTER)
    undecided = _lines(compared, Verdict.UNDECIDED)
    for item in compared.alone:
        if item.side == "A":
            # a point that the new run tried has a status
            lines = undecided if item.status is None else differing
            lines.append(f"not measured again: {comparison_table.alone_of(item)}")
    confounded = []
    if with_verdict(compared.pairs, Verdict.NOT_COMPARABLE):
        confounded = comparison_table.confounders(compared.sides[1])
    for outcome, reasons in (
        (Outcome.DIFFERS, differing),
        (Outcome.NOT_COMPARABLE, confounded),
        (Outcome.UNDECIDED, undecided),
    ):
        if reasons:
            return Reproduction(outcome, tuple(reasons))
    points = len({(pair.point, pair.key) for pair in compared.pairs})
    names = ", ".join(measures_of(compared.pairs))
    if not names:
        return Reproduction(Outcome.UNDECIDED, ("no figure was measured on both sides",))
    within = f"within ±{comparison_table.bare(compared.margin)}"
    reason = f"{names} of {units.counted(points, 'point')} {within}"
    return Reproduction(Outcome.REPRODUCED, (reason,))


def _lines(compared: Comparison, *verdicts: Verdict) -> list[str]:
    """Return a line for each figure with one of these verdicts, with both values and the ratio."""
    lines = []
    for pair in compared.pairs:
        if pair.verdict in verdicts:
            before = comparison_table.figure(pair.baseline, pair.unit)
            now = comparison_table.figure(pair.other, pair.unit)
            change = "" if pair.ratio is None else f", by {100 * (pair.ratio - 1):+.3g} %"
            lines.append(
                f"{pair.measure} of {pair.point}: {before} → {now}{change} "
                f"(ratio {comparison_table.ratio_of(pair)}){_why(pair, compared.margin)}"
            )
    return lines


def _why(pair: Compared, margin: float) -> str:
    """Return why a figure is undecided, as the end of its line; empty if it is decided."""
    if pair.verdict is not Verdict.UNDECIDED:
        return ""
    if pair.low is None or pair.high is None:
        return "; no interval: one side has a single process"
    if pair.high < 1 / (1 + margin) or pair.low > 1 + margin:
        return "; too few processes for a verdict among all figures"
    return f"; the interval is neither within nor beyond ±{comparison_table.bare(margin)}"
