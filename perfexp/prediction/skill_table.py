"""Tables of prediction skill: how well a corpus predicts itself, by method and by curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfexp.prediction.corpus import MOST_CURVES, MeasuredCurve, calibrates, place_of
from perfexp.prediction.skill import GAUSSIAN_PROCESS, Score, Truth, pooled, score
from perfexp.records import units
from perfexp.records.grid import Column, Grid
from perfexp.statistics.conformal import Calibration, calibrate
from perfexp.statistics.gaussian_process import Curve

#: Points that a curve needs to be scored by leaving out each point in turn.
_LEAST_POINTS = 6
#: Limit on listed curves.
_MOST_LISTED = 20
#: Columns, with their names in `skill.pooled`.
_COLUMNS = {
    "median error": "median_error",
    "p90": "p90_error",
    "coverage": "coverage",
    "half-width": "half_width",
    "worst curve": "worst_coverage",
}


@dataclass(frozen=True, kw_only=True)
class SkillTable:
    """Scores for a quantity.

    Attributes:
        quantity: `time` or `energy`.
        curves: scored curves.
        scores: each curve's scores by method, in the same order.
    """

    quantity: str
    curves: Sequence[MeasuredCurve]
    scores: Sequence[Mapping[str, Score]]

    @property
    def title(self) -> str:
        """Return the quantity with the numbers of curves and points."""
        points = sum(len(methods[GAUSSIAN_PROCESS].errors) for methods in self.scores)
        curves = units.counted(len(self.curves), "curve")
        return f"{self.quantity}: {curves}, {points} points that no method had seen"

    def methods(self) -> Grid:
        """Return a table with a line for each method.

        `perfexp predict check` prints it.
        """
        columns = [Column("method", is_key=True, prose=True), *map(Column, _COLUMNS)]
        columns.append(Column("interval score"))
        cells = []
        process_score = pooled([scores[GAUSSIAN_PROCESS] for scores in self.scores])[
            "interval_score"
        ]
        for name in self.scores[0]:
            figures = pooled([scores[name] for scores in self.scores])
            ratio = f"{figures['interval_score'] / process_score:.2f}" if process_score else ""
            cells.append([name, *map(_percent, _figures(figures)), ratio])
        note = (
            "coverage of 90 % intervals; interval score relative to the Gaussian process, more is "
            "worse"
        )
        return Grid.of_cells(columns, cells, [note])

    def worst(self) -> Grid:
        """Return a table with a line for each curve, lowest coverage first.

        `perfexp predict check` prints it.
        """
        lines = []
        for curve, scores in zip(self.curves, self.scores, strict=True):
            lines.append((curve, pooled([scores[GAUSSIAN_PROCESS]])))
        lines.sort(key=lambda line: (line[1]["coverage"], -line[1]["p90_error"]))
        columns = [
            Column("curve", is_key=True, prose=True),
            Column("device", is_key=True, prose=True),
            *map(Column, list(_COLUMNS)[:-1]),
        ]
        cells = []
        for curve, figures in lines[:_MOST_LISTED]:
            device = curve.about.device or "unknown"
            cells.append([curve.name, device, *map(_percent, _figures(figures)[:-1])])
        Grid.of_cells(columns, cells)  # fills the columns
        if len({*columns[1].cells}) == 1:
            del columns[1]
        notes = []
        if unlisted := lines[_MOST_LISTED:]:
            notes.append(f"and {units.counted(len(unlisted), 'more curve')}")
        return Grid(columns, notes)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values.

        `perfexp predict check --json` prints them.
        """
        methods, curves = {}, []
        for name in self.scores[0]:
            methods[name] = dict(pooled([scores[name] for scores in self.scores]))
        for curve, scores in zip(self.curves, self.scores, strict=True):
            facts = {
                "name": curve.name,
                "device": curve.about.device,
                "kind": curve.kind,
                "folder": str(curve.folder),
            }
            curves.append({**facts, **pooled([scores[GAUSSIAN_PROCESS]])})
        return {"methods": methods, "curves": curves}


def score_all(curves: Sequence[MeasuredCurve], *, measured: int, dense: int) -> list[SkillTable]:
    """Score predictions within each curve; return a table for each measured quantity.

    Curves with many points are sampled like a sparse sweep. In shorter curves, each inner point is
    predicted from all other points. Curves without inner points are left out. `perfexp predict
    check` calls it.

    Args:
        curves: curves in a corpus.
        measured: number of points that a sparse sweep measures.
        dense: least number of points for which a curve is sampled; at least `measured` + 1.
    """
    groups: dict[str, list[_Sampled]] = {}
    for curve in curves:
        group = groups.setdefault(curve.quantity, [])
        if len(curve.values) >= _LEAST_POINTS:
            sampled = _Sampled.of(curve, measured, max(dense, measured + 1))
            if sampled.seen is not None or _inner(sampled.truth):
                group.append(sampled)
    tables = []
    for quantity, scored in groups.items():
        if scored:
            measured_curves = [sample.measured for sample in scored]
            tables.append(
                SkillTable(quantity=quantity, curves=measured_curves, scores=_scores(scored))
            )
    return tables


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """A curve as known truth, with the points that a sparse sweep would measure.

    Attributes:
        seen: indices of these points; None if each point is left out in turn.
    """

    measured: MeasuredCurve
    truth: Truth
    seen: Sequence[int] | None

    @classmethod
    def of(cls, curve: MeasuredCurve, measured: int, dense: int) -> _Sampled:
        """Return a curve with its points.

        A curve with fewer points than `dense` leaves out each in turn.
        """
        truth = curve.truth()
        seen = truth.campaign(measured, 0.0) if len(curve.values) >= dense else None
        return cls(measured=curve, truth=truth, seen=seen)

    def curve(self) -> Curve:
        """Return the seen points."""
        if self.seen is None:
            return self.measured.curve()
        return self.truth.curve(self.seen)


def _scores(sampled: Sequence[_Sampled]) -> list[dict[str, Score]]:
    """Score each curve, calibrated by other curves' seen points as in a corpus."""
    calibrations: dict[tuple[str | None, ...], Calibration] = {}
    scores = []
    for sample in sampled:
        curve_place = place_of(sample.measured)
        if curve_place not in calibrations:
            others = []
            for other in sampled:
                if calibrates(other.measured, sample.measured):
                    others.append(other.curve())
            calibrations[curve_place] = calibrate(others[:MOST_CURVES])
        scores.append(_scored(sample.truth, sample.seen, calibrations[curve_place]))
    return scores


def _scored(truth: Truth, seen: Sequence[int] | None, calibration: Calibration) -> dict[str, Score]:
    """Score a curve at unseen points, or at each inner point from all other points."""
    if seen is not None:
        return score(truth, seen, calibration)
    parts: dict[str, list[Score]] = {}
    for left_out in _inner(truth):
        others = [index for index in range(len(truth.values)) if index != left_out]
        for name, curve_score in score(truth, others, calibration).items():
            parts.setdefault(name, []).append(curve_score)
    return {name: _joined(curve_score) for name, curve_score in parts.items()}


def _inner(truth: Truth) -> list[int]:
    """Return the indices of the points with more work than the least and less than the most."""
    work = truth.x.sum(axis=1)
    inner: list[int] = np.flatnonzero((work > work.min()) & (work < work.max())).tolist()
    return inner


def _joined(parts: Sequence[Score]) -> Score:
    """Return the scores of several predictions as one."""
    fields: dict[str, Any] = {}
    for name in ("errors", "is_covered", "half_widths", "interval_scores"):
        fields[name] = np.concatenate([getattr(part, name) for part in parts])
    return Score(**fields)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _figures(pooled_scores: Mapping[str, float]) -> list[float]:
    """Return a method's figures in the order of the columns."""
    return list(map(pooled_scores.__getitem__, _COLUMNS.values()))
