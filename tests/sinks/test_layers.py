"""Layers as a table and as a picture."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from builders import Builder
from hypothesis import given
from hypothesis import strategies as st

from perfexp.layers import Key as LayerKey
from perfexp.layers import Pass
from perfexp.layers.table import Line, Spread
from perfexp.plots import layer_areas
from perfexp.plots.layer_areas import Tile, squarify, wrapped
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Key, Metric, Point, Record, Status, layers_key
from perfexp.reports.markdown import markdown
from perfexp.tables import csv_tables, layer_tables
from perfexp.work import Geometry


def spread(seconds: float) -> Spread:
    return Spread(mean=seconds, median=seconds * 0.9, low=seconds * 0.8, high=None)


def line(path: str | None, kind: str, which: Pass, seconds: float, gap: float = 0.0, **more: Any) -> Line:
    key = LayerKey(path=path, call=0, operation=None, kind=kind, which=which)
    share = (seconds + gap) / 0.004
    return Line(key=key, kind=kind, seconds=spread(seconds), gap_seconds=spread(gap), share=share, **more)


@pytest.fixture
def record(build: Builder) -> Record:
    geometry = Geometry(
        in_channels=3, out_channels=8, kernel=(3, 5), stride=(1, 1), padding=(1, 2), dilation=(1, 1), groups=1,
        transposed=False,
    )  # fmt: skip
    conv = {"macs": 100, "flops": 200, "bytes_min": 50, "inputs": ((2, 3, 9, 9),), "convolution": geometry}
    lines = [
        line("conv1", "Conv2d", Pass.forward, 1e-3, 0.5e-3, kernels={"gemm_kernel": 2.0}, ran="gemm", **conv),
        line("conv1", "Conv2d", Pass.backward, 2e-3),
        line(None, "optimizer", Pass.optimizer_step, 0.5e-3),
        line("relu", "ReLU", Pass.forward, 0.0),
        Line(key=None, kind="unattributed", seconds=spread(1e-6), gap_seconds=spread(0.0), share=0.0),
    ]
    timed = build.point(phase="train")
    passes = [{"which": "forward", "selected": "cudnn.gemm"}, {"which": "backward_data", "selected": "cudnn.algo_1"}]
    passes.append({"which": "backward_filter", "selected": "default"})
    timed.facts["algorithm"] = {"layers": [{"name": "conv1", "passes": passes}]}
    facts = {
        "layers": {"method": "queue", "calls": 10, "call_seconds": [4e-3] * 10, "lines": msgspec.to_builtins(lines)}
    }
    point = Point(key=layers_key(timed.key), status=Status.OK, facts=facts)
    point.metrics.append(Metric(name="layers/closure", value=0.012, unit="1"))
    timed.metrics.append(Metric(name="energy/per_call_joules", value=8.0, unit="joules"))
    return build.record(timed, point)


def test_the_columns_of_old_come_first_and_ours_behind_them(record: Record) -> None:
    first, second, third, *_ = found = layer_tables.lines(record)
    header = csv_tables.to_csv(found).decode().splitlines()[0].split(",")
    assert header[:6] == ["layer", "in_channels", "out_channels", "kernel_size", "mean_ms", "percentage"]
    assert {"input_size", "kind", "pass", "gap_ms", "flops", "kernels", "computed_by"} <= set(header)
    told = {name: first[name] for name in header[:6]}
    assert told == {
        "layer": "conv1", "in_channels": 3, "out_channels": 8, "kernel_size": "3×5",
        "mean_ms": pytest.approx(1.0), "percentage": pytest.approx(37.5),
    }  # fmt: skip
    assert (first["p50_ms"], first["p50_ci95_high_ms"]) == (pytest.approx(0.9), None)
    assert first["energy_apportioned_j"] == pytest.approx(3.0)
    assert sum(line["energy_apportioned_j"] for line in found) == pytest.approx(8.0)
    assert (first["computed_by"], second["computed_by"]) == ("cudnn.gemm", "cudnn.algo_1, default")
    assert (first["kernels"], first["inputs"], first["phase"]) == ("2 × gemm_kernel", "2×3×9×9", "train")
    assert (first["ran"], second["ran"]) == ("gemm", None)
    assert (third["layer"], third["kernel_size"], third["computed_by"]) == ("optimizer", None, None)


def test_the_rows_that_take_most_are_told(record: Record, build: Builder) -> None:
    told = layer_tables.table(record)
    assert told is not None
    title, grid = told
    assert title == "the top 3 of 3 rows, gaps before them included"
    cells = {column.title: list(column.cells) for column in grid.columns}
    assert cells["share"] == ["50.0 %", "37.5 %", "12.5 %"]
    assert cells["p50"] == ["1.80 ms", "1.35 ms", "450 µs"], "medians: one disturbed call does not move them"
    assert cells["layer"] == ["conv1", "conv1", "optimizer"], "as in the table"
    del record.points[0].facts["algorithm"]
    assert title in markdown(record)
    assert "| conv1" in markdown(record)


@pytest.mark.parametrize(("disagreeing", "chosen"), [((), 512), ((512,), 256), ((512, 256, 128), 512)])
def test_the_largest_point_whose_layers_agree_is_told(
    record: Record, build: Builder, disagreeing: tuple[int, ...], chosen: int
) -> None:
    facts, found = record.points[-1].facts, []
    for size in (128, 512, 256):
        key = Key(phase="train", input_size=(size, size), batch_size=2, precision="fp32")
        doubts = [Diagnostic(code="layers_disagree", message="far")] if size in disagreeing else []
        found.append(Point(key=layers_key(key), status=Status.OK, facts=facts, doubts=doubts))
    several = build.record(*found)
    point, table = layer_tables.representative_point(several), layer_tables.table(several)
    assert point is not None
    assert point.key.pixels == chosen**2
    assert table is not None
    assert table[0].startswith(f"the top 3 of 3 rows of {chosen}, ")


def test_without_layers_there_is_no_table_and_no_picture(build: Builder) -> None:
    record = build.record(build.point())
    assert layer_tables.lines(record) == []
    assert layer_tables.table(record) is None
    assert layer_areas.draw(record) is None


def test_the_layers_of_a_call_are_drawn(record: Record) -> None:
    png = layer_areas.draw(record)
    assert png is not None
    assert struct.unpack(">II", png[16:24]) == (1200, 900)
    assert png == layer_areas.draw(record)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_a_treemap_fills_its_rectangle_in_proportion(values: list[float]) -> None:
    values.sort(reverse=True)
    within = Tile(1.0, 2.0, 16.0, 9.0)
    tiles = squarify(values, within)
    area = within.width * within.height
    for value, tile in zip(values, tiles, strict=True):
        assert tile.width * tile.height == pytest.approx(area * value / sum(values), rel=1e-6)
        assert tile.x >= within.x - 1e-9
        assert tile.y >= within.y - 1e-9
        assert tile.x + tile.width <= within.x + within.width + 1e-6
        assert tile.y + tile.height <= within.y + within.height + 1e-6
    for number, one in enumerate(tiles):
        for other in tiles[:number]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            up = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(across, up) <= 1e-6


@pytest.mark.parametrize(
    ("name", "width", "height", "text"),
    [
        ("layer4.1.conv2", 4.0, 3.0, "layer4.1.conv2"),
        ("layer4.1.conv2", 1.2, 3.0, "layer4.\n1.conv2"),
        ("stages.3.blocks.2.conv1", 1.2, 0.8, "…blocks.\n2.conv1"),
        ("extraordinary", 1.0, 0.2, "extrao…"),
    ],
)
def test_a_label_breaks_after_dots(name: str, width: float, height: float, text: str) -> None:
    assert wrapped(name, Tile(0.0, 0.0, width, height)) == text
