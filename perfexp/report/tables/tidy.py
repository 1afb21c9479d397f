"""Tidy tables for pandas: points and samples from many runs, with every line self-contained.

`perfexp export` writes them as CSV or Parquet, and `perfexp.load` returns them as data frames.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfexp.records.analysis import Analysis
from perfexp.records.record import Record
from perfexp.report.tables import csv_tables, flat, layer_tables
from perfexp.report.tables.flat import Line

if TYPE_CHECKING:
    import pandas as pd

#: Text columns, even without values; any other column without values is numeric.
_TEXTS = frozenset(flat.IDENTITY) - {"git_dirty", "started", "sweep_job"} | {
    *(
        "model",
        "algorithm",
        "mode",
        "execution",
        "input_size",
        "phase",
        "precision",
        "time_kind",
        "stop_reason",
    ),
    *("percentile_kind", "estimated", "status", "doubts", "error", "series"),
    *("layer", "kernel_size", "kind", "pass", "stride", "padding", "dilation", "inputs", "outputs"),
    *("computed_by", "ran", "kernels", "fastest_algorithm"),
}
#: Types of columns that may have no values.
_DTYPES = {"git_dirty": "boolean", "sweep_job": "Int64"}
#: Columns that a series' samples share.
_HEAD = (
    *(
        "run_uid",
        "phase",
        "input_size",
        "input_height_pixels",
        "input_width_pixels",
        "batch_size",
        "precision",
    ),
    *("replicate", "series", "calls_per_sample"),
)
#: Series: the cells in `_HEAD`, `values` (all samples, warm-up first) and `warmup` (how many of
#: them).
Block = dict[str, Any]


def layers(analysis: Analysis, folder: Path) -> list[layer_tables.LayerRow]:
    """Return a line for each layer row and pass in a profiled point, after the run's identity.

    `perfexp export` collects them over runs.
    """
    about = flat.identity_of(analysis.record, folder) | {"execution": analysis.about.execution}
    table = []
    for row in layer_tables.rows(analysis):
        table.append(replace(row, line=about | flat.with_units(row.line)))
    return table


def frame(lines: Sequence[Line]) -> pd.DataFrame:
    """Return aligned lines as a data frame, with null for missing values.

    Whole numbers are `Int64`, other numbers `float64`, booleans `boolean` and texts `string`. An
    empty text is null, as in a CSV. `started` is a UTC time. Users type sweep axes as text, so an
    axis is numeric or boolean only if all its values are.
    """
    import pandas as pd

    columns = {}
    for name in lines[0] if lines else ():
        columns[name] = _column(name, [line[name] for line in lines])
    return pd.DataFrame(columns)


def blocks(record: Record) -> list[Block]:
    """Return the series for all points in a run, including cold starts (phase `ttfp`).

    Series stay compact until `samples` makes a line for each sample.
    """
    series_blocks = []
    for point in record.points:
        for series in point.series:
            block = {
                "run_uid": record.uid,
                "phase": point.key.phase,
                **flat.size_cells(*point.key.input_size),
                "batch_size": point.key.batch_size,
                "precision": point.key.precision,
                "replicate": point.key.replicate,
                "series": series.name,
                "calls_per_sample": series.calls_per_sample,
                "values": np.asarray(series.samples, dtype=np.float64),
                "warmup": series.warmup,
            }
            series_blocks.append(block)
    return series_blocks


def samples(series: Sequence[Block], text: Callable[[str], str] = str) -> pd.DataFrame:
    """Return a line for each raw sample: run, point, series, index, warm-up flag and seconds.

    A sample is the mean over `calls_per_sample` calls, in seconds.

    Args:
        text: function applied to texts. Texts are stored as categories, because each is repeated
            many times.
    """
    import pandas as pd

    counts, indices, warmups = [], [], []
    for block in series:
        counts.append(len(block["values"]))
        indices.append(np.arange(counts[-1]))
        warmups.append(block["warmup"])
    heads = pd.DataFrame(series, columns=list(_HEAD))
    for name in _TEXTS.intersection(heads):
        heads[name] = heads[name].map(text).astype("category")
    table = heads.iloc[np.repeat(np.arange(len(series)), counts)].reset_index(drop=True)
    table["sample_index"] = _joined(indices, np.int64)
    table["is_warmup"] = table["sample_index"] < np.repeat(warmups, counts)
    table["calls_per_sample"] = table.pop("calls_per_sample")
    table["seconds"] = _joined(map(itemgetter("values"), series), np.float64)
    return table


def to_parquet(table: pd.DataFrame) -> bytes:
    """Return a data frame as Parquet."""
    buffer = io.BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


def samples_csv(series: Sequence[Block]) -> bytes:
    """Return samples as CSV like `csv_tables.to_csv`: in full precision and without formulas."""
    table = samples(series, text=csv_tables.cell_text)
    table["is_warmup"] = np.where(table["is_warmup"], "true", "false")
    content: str = table.to_csv(index=False, lineterminator="\r\n")
    return content.encode("utf-8", errors="replace")


def _column(name: str, cells: Sequence[flat.Cell]) -> pd.Series:
    """Return cells as a column of the type that `frame` describes."""
    import pandas as pd

    if name == "started":
        return pd.to_datetime(
            pd.Series(cells, dtype="string"), format="ISO8601", utc=True, errors="coerce"
        )
    if name.startswith(flat.AXIS):
        texts = pd.Series(cells, dtype="string")
        if texts.dropna().str.lower().isin(("true", "false")).all():
            return texts.str.lower().map({"true": True, "false": False}).astype("boolean")
        with suppress(TypeError, ValueError):
            return pd.to_numeric(texts)
        return texts
    kinds = {type(cell) for cell in cells if cell is not None}
    if name in _TEXTS or str in kinds:
        return pd.Series([str(cell) if cell else None for cell in cells], dtype="string")
    dtype = "float64"
    if kinds == {bool}:
        dtype = "boolean"
    elif kinds == {int}:
        dtype = "Int64"
    return pd.Series(cells, dtype=_DTYPES.get(name, dtype))


def _joined(arrays: Iterable[Any], dtype: Any) -> Any:
    """Return arrays as one, of the given type even without arrays."""
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])
