"""Point runs: each phase and batch size of a record, as a tracking store shows them: with metrics of the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfexp.records.record import Record
from perfexp.records.summary import FirstPrediction, Row, first_predictions


@dataclass(frozen=True, kw_only=True)
class PointRun:
    """What a record has of one phase and one batch size: all sizes and processes.

    Attributes:
        phase: `inference` or `train`.
        batch_size: samples per call.
        rows: its points, in the record's order.
        first_predictions: those with this batch size; a training has none.
    """

    phase: str
    batch_size: int
    rows: tuple[Row, ...]
    first_predictions: tuple[FirstPrediction, ...]


def point_runs(record: Record, known: Sequence[Row]) -> list[PointRun]:
    """The phases and batch sizes of a record, in its order.

    Args:
        record: record of any run.
        known: its rows.
    """
    firsts = first_predictions(record)
    pairs = [(row.key.phase, row.key.batch_size) for row in known]
    pairs += [("inference", first.key.batch_size) for first in firsts]
    return [
        PointRun(
            phase=phase,
            batch_size=batch,
            rows=tuple(row for row in known if (row.key.phase, row.key.batch_size) == (phase, batch)),
            first_predictions=tuple(first for first in firsts if ("inference", first.key.batch_size) == (phase, batch)),
        )
        for phase, batch in dict.fromkeys(pairs)
    ]
