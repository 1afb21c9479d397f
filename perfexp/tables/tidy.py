"""Points and samples of many runs as one table each, every line complete in itself, for pandas."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfexp.records.record import Record
from perfexp.summaries.analysis import Analysis
from perfexp.tables import csv_tables, flat, layer_tables
from perfexp.tables.flat import Line

if TYPE_CHECKING:
    import pandas as pd

#: Columns of texts, even without values; any other column without values is one of figures.
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
#: Types of columns that may be without values.
_DTYPES = {"git_dirty": "boolean", "sweep_job": "Int64"}
#: Columns that the samples of a series have in common.
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
#: A series: the cells of `_HEAD`, and `values` (all samples, warm-up first) and `warmup` (number of those).
Block = dict[str, Any]


def layers(analysis: Analysis, folder: Path) -> list[layer_tables.Row]:
    """Return one line for each row and pass of each point with profiled layers, preceded by the run's identity."""
    about = flat.identity_of(analysis.record, folder) | {"execution": analysis.about.execution}
    return [
        replace(row, line=about | flat.with_units(row.line)) for row in layer_tables.rows(analysis)
    ]


def frame(lines: Sequence[Line]) -> pd.DataFrame:
    """Return aligned lines as a frame in which numbers are numbers and missing values are null.

    Whole numbers are `Int64`, others `float64`, truths `boolean`, texts `string` (an empty one is null, as in a CSV),
    `started` a time in UTC. The axes of a sweep were typed by its user: an axis is of numbers or truths if all its
    values are.
    """
    import pandas as pd

    names = list(lines[0]) if lines else []
    return pd.DataFrame({name: _column(name, [line[name] for line in lines]) for name in names})


def blocks(record: Record) -> list[Block]:
    """Return the series of all points of a run, those of a cold start (phase `ttfp`) included."""
    return [
        {
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
        for point in record.points
        for series in point.series
    ]


def samples(series: Sequence[Block], text: Callable[[str], str] = str) -> pd.DataFrame:
    """Return one line for each raw sample: run, point, series, index, whether it is warm-up, and the sample.

    A sample is the mean of `calls_per_sample` calls, in seconds. `text` is applied to texts, which are categories,
    because each is repeated many times.
    """
    import pandas as pd

    counts = [len(block["values"]) for block in series]
    heads = pd.DataFrame(series, columns=list(_HEAD))
    for name in _TEXTS.intersection(heads):
        heads[name] = heads[name].map(text).astype("category")
    made = heads.iloc[np.repeat(np.arange(len(series)), counts)].reset_index(drop=True)
    made["sample_index"] = _joined((np.arange(count) for count in counts), np.int64)
    made["is_warmup"] = made["sample_index"] < np.repeat(
        [block["warmup"] for block in series], counts
    )
    made["calls_per_sample"] = made.pop("calls_per_sample")
    made["seconds"] = _joined((block["values"] for block in series), np.float64)
    return made


def to_parquet(made: pd.DataFrame) -> bytes:
    """Return a frame as Parquet."""
    buffer = io.BytesIO()
    made.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


def samples_csv(series: Sequence[Block]) -> bytes:
    """Return samples as CSV like `csv_tables.to_csv`: full precision, no text that is a formula."""
    made = samples(series, text=csv_tables.cell_text)
    made["is_warmup"] = np.where(made["is_warmup"], "true", "false")
    content: str = made.to_csv(index=False, lineterminator="\r\n")
    return content.encode("utf-8", errors="replace")


def _column(name: str, cells: Sequence[flat.Cell]) -> pd.Series:
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
    dtype = "boolean" if kinds == {bool} else "Int64" if kinds == {int} else "float64"
    return pd.Series(cells, dtype=_DTYPES.get(name, dtype))


def _joined(arrays: Iterable[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])
