"""Skill tables: how well a corpus predicts itself, by method over all curves, and by curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfexp.forecast.corpus import MOST_CURVES, MeasuredCurve, calibrates, place_of
from perfexp.prediction.conformal import Calibration, calibrate
from perfexp.prediction.gaussian_process import Curve
from perfexp.prediction.skill import GAUSSIAN_PROCESS, Score, Truth, pooled, score
from perfexp.records import units
from perfexp.summaries.grid import Column, Grid

#: Points that a curve needs to be scored by leaving out each point in turn.
_LEAST_POINTS = 6
#: Limit on listed curves.
_MOST_LISTED = 20
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
        points = sum(len(one[GAUSSIAN_PROCESS].errors) for one in self.scores)
        return f"{self.quantity}: {units.counted(len(self.curves), 'curve')}, {points} points that no method had seen"

    def methods(self) -> Grid:
        """Return a table with a line for each method."""
        names = list(self.scores[0])
        figures = [pooled([one[name] for one in self.scores]) for name in names]
        own = figures[0]["interval_score"]
        columns = [Column("method", names, is_key=True, prose=True)]
        columns += [
            Column(title, [_percent(one[name]) for one in figures])
            for title, name in _COLUMNS.items()
        ]
        ratios = (f"{one['interval_score'] / own:.2f}" if own else "" for one in figures)
        columns.append(Column("interval score", ratios))
        note = "coverage of 90 % intervals; interval score relative to the Gaussian process, more is worse"
        return Grid(columns, [note])

    def worst(self) -> Grid:
        """Return a table with a line for each curve, lowest coverage first."""
        figures = [pooled([one[GAUSSIAN_PROCESS]]) for one in self.scores]
        order = sorted(
            range(len(figures)),
            key=lambda place: (figures[place]["coverage"], -figures[place]["p90_error"]),
        )
        order = order[:_MOST_LISTED]
        columns = [
            Column("curve", [self.curves[place].name for place in order], is_key=True, prose=True)
        ]
        devices = [self.curves[place].about.device or "unknown" for place in order]
        columns += (
            [Column("device", devices, is_key=True, prose=True)] if len(set(devices)) > 1 else []
        )
        for title, name in list(_COLUMNS.items())[:-1]:
            columns.append(Column(title, [_percent(figures[place][name]) for place in order]))
        rest = len(figures) - len(order)
        return Grid(columns, [f"and {units.counted(rest, 'more curve')}"] if rest else [])

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "methods": {
                name: dict(pooled([one[name] for one in self.scores])) for name in self.scores[0]
            },
            "curves": [
                {
                    "name": curve.name,
                    "device": curve.about.device,
                    "kind": curve.kind,
                    "folder": str(curve.folder),
                    **pooled([one[GAUSSIAN_PROCESS]]),
                }
                for curve, one in zip(self.curves, self.scores, strict=True)
            ],
        }


def score_all(curves: Sequence[MeasuredCurve], *, measured: int, dense: int) -> list[SkillTable]:
    """Score predictions within each curve; return a table for each measured quantity.

    Curves with many points are sampled like a sparse sweep. In shorter curves, each inner point is
    predicted from all other points. Curves without inner points are left out.

    Args:
        curves: curves in a corpus.
        measured: number of points that a sparse sweep measures.
        dense: number of points from which a curve is sampled, if larger than `measured`.
    """
    tables = []
    for quantity in dict.fromkeys(curve.quantity for curve in curves):
        alike = [
            curve
            for curve in curves
            if curve.quantity == quantity and len(curve.values) >= _LEAST_POINTS
        ]
        sampled = [_Sampled.of(curve, measured, max(dense, measured + 1)) for curve in alike]
        if scored := [one for one in sampled if one.seen is not None or _inner(one.truth)]:
            scores = _scores(scored)
            tables.append(
                SkillTable(
                    quantity=quantity, curves=[one.measured for one in scored], scores=scores
                )
            )
    return tables


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """Curve as known truth, with the points that a sparse sweep would measure.

    `seen` is None if each point is left out in turn.
    """

    measured: MeasuredCurve
    truth: Truth
    seen: Sequence[int] | None

    @classmethod
    def of(cls, curve: MeasuredCurve, measured: int, dense: int) -> _Sampled:
        truth = curve.truth()
        return cls(
            measured=curve,
            truth=truth,
            seen=truth.campaign(measured, 0.0) if len(curve.values) >= dense else None,
        )

    def curve(self) -> Curve:
        """Return the seen points."""
        return self.measured.curve() if self.seen is None else self.truth.curve(self.seen)


def _scores(sampled: Sequence[_Sampled]) -> list[dict[str, Score]]:
    """Score each curve, calibrated by other curves' seen points as in a corpus."""
    calibrations: dict[tuple[str | None, ...], Calibration] = {}
    for one in sampled:
        place = place_of(one.measured)
        if place not in calibrations:
            others = [
                other.curve() for other in sampled if calibrates(other.measured, one.measured)
            ]
            calibrations[place] = calibrate(others[:MOST_CURVES])
    return [_scored(one.truth, one.seen, calibrations[place_of(one.measured)]) for one in sampled]


def _scored(truth: Truth, seen: Sequence[int] | None, calibration: Calibration) -> dict[str, Score]:
    """Score a curve at unseen points, or at each inner point from all other points."""
    if seen is not None:
        return score(truth, seen, calibration)
    every = range(len(truth.values))
    parts = [
        score(truth, [place for place in every if place != left_out], calibration)
        for left_out in _inner(truth)
    ]
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _inner(truth: Truth) -> list[int]:
    """Return the points with more work than the least and less work than the most."""
    work = truth.x.sum(axis=1)
    return [int(place) for place in np.flatnonzero((work > work.min()) & (work < work.max()))]


def _joined(parts: Sequence[Score]) -> Score:
    return Score(
        errors=np.concatenate([part.errors for part in parts]),
        is_covered=np.concatenate([part.is_covered for part in parts]),
        half_widths=np.concatenate([part.half_widths for part in parts]),
        interval_scores=np.concatenate([part.interval_scores for part in parts]),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
