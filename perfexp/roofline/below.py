"""Below the roofs: everything that a picture, a table and a sentence need."""

from __future__ import annotations

from dataclasses import dataclass

from perfexp.roofline.peaks import Peaks
from perfexp.roofline.placement import Row
from perfexp.roofline.sentences import meaning, whole


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Everything that a picture, a table and a sentence need.

    Attributes:
        title: what was measured.
        peaks: the roofs.
        parts: kernels by name, or layers by pass; the slowest first.
        launches: each by itself, in their order; none for a record.
        ranges: by path, in the order in which they began; of a record, its passes.
        total: all of it.
        notes: what has to be known to read it.
        analytic: whether FLOPs and bytes are those that layers take by definition, not counted ones.
        percentages: whether FLOPs are a part of peak that the busiest part of the SM had.
        estimated: whether FLOPs or bytes rest on an assumption.
    """

    title: str
    peaks: Peaks
    parts: tuple[Row, ...]
    launches: tuple[Row, ...]
    ranges: tuple[Row, ...]
    total: Row
    notes: tuple[str, ...]
    analytic: bool = False
    percentages: bool = False
    estimated: bool = False

    @property
    def noun(self) -> str:
        """What the parts are called, in the plural."""
        return "layers" if self.analytic else "kernels"

    def meaning(self, row: Row) -> str:
        """One sentence on where a row stands.

        Args:
            row: of this roofline.
        """
        if row is self.total:
            told = {"noun": self.noun}
            return whole(row, self.parts, **told, analytic=self.analytic, percentages=self.percentages)
        return meaning(row, analytic=self.analytic, percentages=self.percentages)
