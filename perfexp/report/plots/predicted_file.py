"""Predictions of a run with `sweep=sparse`, read from its predicted.jsonl for a sweep's plot."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from perfexp.host import foreign
from perfexp.prediction.corpus import QUANTITIES
from perfexp.prediction.predictions import INTERPOLATED, key_of
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key
from perfexp.records.sizes import Size
from perfexp.statistics.estimators import Interval


class _Place(msgspec.Struct):
    phase: str
    input_size: Size
    batch_size: int


class _Line(msgspec.Struct):
    predicted: _Place
    precision: str
    unit: str
    source: str
    value: float | None
    low: float | None
    high: float | None


def read(folder: Path) -> list[tuple[str, Key, Interval]]:
    """Return quantities, points and values that a run interpolated between its measured points.

    Values are in SI units; a quantity is `time` or `energy`.

    Args:
        folder: the run's folder. Without predictions in it, there are no values; a broken file has
            those up to its first broken line.
    """
    values = []
    quantities = {unit: quantity for quantity, unit in QUANTITIES.items()}
    with suppress(OSError, *foreign.DECODING_ERRORS):
        for content in foreign.read_bytes(RunPaths(folder).predicted).splitlines():
            line = foreign.from_json(content, _Line)
            if line.source == INTERPOLATED and line.value is not None and line.unit in quantities:
                place = line.predicted
                pair = place.input_size, place.batch_size
                key = key_of(pair, place.phase, line.precision)
                interval = Interval(value=line.value, low=line.low, high=line.high)
                values.append((quantities[line.unit], key, interval))
    return values
