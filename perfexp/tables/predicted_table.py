"""The predictions of a sparse sweep as a table; measured points are marked as such."""

from __future__ import annotations

from collections.abc import Sequence

from perfexp.forecast.predictions import Forecast, Predicted, key_of
from perfexp.records.quantities import ENERGY, named
from perfexp.records.record import Record
from perfexp.summaries.subject import subject
from perfexp.tables.csv_tables import Line, columns_of

#: Names of the columns of a quantity, and the factor of its unit.
_COLUMNS = {"time": ("median_ms", 1e3), "energy": (named(ENERGY).column, 1.0)}


def lines(record: Record, forecasts: Sequence[Forecast]) -> list[Line]:
    """Return one line for each point of a sparse sweep; ends of intervals are those of 90 % intervals."""
    about = subject(record.plan, record.environment)
    table: dict[tuple[str, object], Line] = {}
    for forecast in forecasts:
        phase = forecast.curve.phase
        for point in forecast.points:
            key = key_of(point.pair, phase, about.precision)
            line = table.setdefault((phase, point.pair), columns_of(about, key))
            if forecast.curve.quantity == "time":
                near = key_of(point.nearest, phase, about.precision)
                line |= {"source": point.source, "time_kind": forecast.curve.kind}
                line |= {"nearest_input_size": near.size_label, "nearest_batch_size": near.batch_size}
            line |= _figures(point, *_COLUMNS[forecast.curve.quantity])
            if point.reason:
                line["reason"] = point.reason
    return list(table.values())


def _figures(point: Predicted, name: str, factor: float) -> Line:
    value = point.value
    ends = (value.low, value.value, value.high) if value else (None, None, None)
    names = (f"{name}_low", name, f"{name}_high")
    return {column: None if end is None else factor * end for column, end in zip(names, ends, strict=True)}
