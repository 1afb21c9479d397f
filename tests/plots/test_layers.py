"""Layers as a table and as a picture."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgspec
import pytest

from perfexp.layers import Key as LayerKey
from perfexp.layers import Pass
from perfexp.layers.table import Line, Spread
from perfexp.plots import canvas, layer_plot, pages
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Key, Metric, Point, Record, Status, layers_key
from perfexp.reports.markdown import markdown
from perfexp.summaries.analysis import Analysis
from perfexp.tables import csv_tables, layer_groups, layer_tables
from perfexp.work import Geometry
from tests.support.builders import Builder


def spread(seconds: float) -> Spread:
    return Spread(mean=seconds, median=seconds * 0.9, low=seconds * 0.8, high=None)


def line(
    path: str | None, kind: str, which: Pass, seconds: float, gap: float = 0.0, **more: Any
) -> Line:
    key = LayerKey(path=path, call=0, operation=None, kind=kind, which=which)
    share = (seconds + gap) / 0.004
    return Line(
        key=key, kind=kind, seconds=spread(seconds), gap_seconds=spread(gap), share=share, **more
    )


@pytest.fixture
def record(build: Builder) -> Record:
    geometry = Geometry(
        in_channels=3, out_channels=8, kernel=(3, 5), stride=(1, 1), padding=(1, 2), dilation=(1, 1), groups=1,
        transposed=False,
    )  # fmt: skip
    conv = {
        "macs": 100,
        "flops": 200,
        "bytes_min": 50,
        "inputs": ((2, 3, 9, 9),),
        "convolution": geometry,
    }
    lines = [
        line(
            "conv1",
            "Conv2d",
            Pass.forward,
            1e-3,
            0.5e-3,
            kernels={"gemm_kernel": 2.0},
            ran="gemm",
            **conv,
        ),
        line("conv1", "Conv2d", Pass.backward, 2e-3),
        line(None, "optimizer", Pass.optimizer_step, 0.5e-3),
        line("relu", "ReLU", Pass.forward, 0.0),
        Line(
            key=None, kind="unattributed", seconds=spread(1e-6), gap_seconds=spread(0.0), share=0.0
        ),
    ]
    timed = build.point(phase="train")
    passes = [
        {"which": "forward", "selected": "cudnn.gemm"},
        {"which": "backward_data", "selected": "cudnn.algo_1"},
    ]
    passes.append({"which": "backward_filter", "selected": "default"})
    timed.facts["algorithm"] = {"layers": [{"name": "conv1", "passes": passes}]}
    facts = {
        "layers": {
            "method": "queue",
            "calls": 10,
            "call_seconds": [4e-3] * 10,
            "lines": msgspec.to_builtins(lines),
        }
    }
    point = Point(key=layers_key(timed.key), status=Status.OK, facts=facts)
    point.metrics.append(Metric(name="layers/closure", value=0.012, unit="1"))
    timed.metrics.append(Metric(name="energy/per_call_joules", value=8.0, unit="joules"))
    return build.record(timed, point)


def test_the_columns_of_old_come_first_and_ours_behind_them(record: Record) -> None:
    first, second, third, *_ = found = layer_tables.lines(Analysis.of(record))
    header = csv_tables.to_csv(found).decode().splitlines()[0].split(",")
    assert header[:6] == [
        "layer",
        "in_channels",
        "out_channels",
        "kernel_size",
        "mean_ms",
        "percentage",
    ]
    assert {"input_size", "kind", "pass", "gap_ms", "flops", "kernels", "computed_by"} <= set(
        header
    )
    told = {name: first[name] for name in header[:6]}
    assert told == {
        "layer": "conv1", "in_channels": 3, "out_channels": 8, "kernel_size": "3×5",
        "mean_ms": pytest.approx(1.0), "percentage": pytest.approx(37.5),
    }  # fmt: skip
    assert (first["p50_ms"], first["p50_ci95_high_ms"]) == (pytest.approx(0.9), None)
    assert first["energy_apportioned_j"] == pytest.approx(3.0)
    assert sum(line["energy_apportioned_j"] for line in found) == pytest.approx(8.0)
    assert (first["computed_by"], second["computed_by"]) == ("cudnn.gemm", "cudnn.algo_1, default")
    assert (first["kernels"], first["inputs"], first["phase"]) == (
        "2 × gemm_kernel",
        "2×3×9×9",
        "train",
    )
    assert (first["ran"], second["ran"]) == ("gemm", None)
    assert (third["layer"], third["kernel_size"], third["computed_by"]) == ("optimizer", None, None)


def test_the_rows_that_take_most_are_told(record: Record, build: Builder) -> None:
    told = layer_tables.table(record)
    assert told is not None
    title, grid = told
    words = "the top 3 of 3 rows, identical ones together, gaps before them included; 100 % is a call of 3.95 ms"
    assert title == words
    cells = {column.title: list(column.cells) for column in grid.columns}
    assert cells["share"] == ["50.0 %", "37.5 %", "12.5 %"]
    assert cells["time"] == ["1.98 ms", "1.48 ms", "494 µs"], (
        "shares of 3.95 ms, the call without profiling"
    )
    assert cells["layer"] == ["conv1", "conv1", "optimizer"], "as in the table"
    del record.points[0].facts["algorithm"]
    assert title in markdown(Analysis.of(record))
    assert "| conv1" in markdown(Analysis.of(record))


@pytest.mark.parametrize(
    ("disagreeing", "chosen"), [((), 512), ((512,), 256), ((512, 256, 128), 512)]
)
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
    assert layer_tables.lines(Analysis.of(record)) == []
    assert layer_tables.table(record) is None
    assert layer_plot.draw(record) is None


def test_the_layers_of_a_call_are_drawn(record: Record) -> None:
    png = layer_plot.draw(record)
    assert png is not None
    assert struct.unpack(">II", png[16:24])[0] == 1200
    assert png == layer_plot.draw(record)


def test_layers_that_disagree_with_the_call_have_shares_only(
    record: Record, build: Builder
) -> None:
    point = record.points[-1]
    message = "a call takes 5 ms with stamps, 4 ms without profiling (+25.0%, tolerated ±2%); 0% of it are gaps"
    point.doubts.append(
        Diagnostic(code="layers_disagree", message=message, help="read the layers as shares")
    )
    words = layer_plot.caption(record, point)
    assert words.title.endswith("shares only: the layers disagree with the call")
    assert "(+25.0%, tolerated ±2%), on " in words.subtitle
    assert words.subtitle.endswith("read the layers as shares")
    figure = layer_plot.compose(record)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    texts += [axes.get_xlabel() for axes in figure.axes]
    assert not any(re.search(r"\d [mµ]?s\b|\([mµ]?s\)", text) for text in texts)
    table = layer_tables.table(record)
    assert table is not None
    assert table[0].endswith("shares only: the layers disagree with the call")
    assert "time" not in [column.title for column in table[1].columns]
    titles = re.findall(r"<title>(.*?)</title>", canvas.save(figure, "svg").decode())
    assert titles
    assert not any(re.search(r"\d [mµ]?s\b", title) for title in titles)
    others = [metric for metric in point.metrics if metric.name != "layers/closure"]
    point.metrics = [*others, Metric(name="layers/closure", value=0.4, unit="1")]
    assert layer_plot.caption(record, point).title.endswith(
        "not usable: the layers are far from the call"
    )
    assert layer_tables.table(record)[0].endswith("not usable: the layers are far from the call")


def blocks(build: Builder, closure: float | None = None, method: str = "queue") -> Point:
    """Three equal blocks of a convolution and its activation, 1 ms and 0.5 ms, and a last layer of 2.5 ms."""
    shapes = {"inputs": ((1, 8, 9, 9),), "outputs": ((1, 8, 9, 9),)}
    lines = [
        line(f"stage.{block}.{name}", kind, Pass.forward, seconds / 0.9, **shapes)
        for block in range(3)
        for name, kind, seconds in (("conv", "Conv2d", 1e-3), ("act", "ReLU", 0.5e-3))
    ]
    lines += [
        line("neck", "Conv2d", Pass.forward, 1e-3 / 0.9, **shapes),
        line("fc", "Linear", Pass.forward, 1.5e-3 / 0.9),
    ]
    for one in lines:
        one.share = one.seconds.median / 7e-3
    facts = {
        "layers": {
            "method": method,
            "call_seconds": [7e-3] * 9 + [70e-3],
            "lines": msgspec.to_builtins(lines),
        }
    }
    metrics = (
        [Metric(name="layers/closure", value=closure, unit="1")] if closure is not None else []
    )
    return Point(key=layers_key(build.point().key), status=Status.OK, facts=facts, metrics=metrics)


def test_identical_layers_are_one_with_their_numbers_as_a_range(build: Builder) -> None:
    found = {
        layer.label: (layer.count, layer.share) for layer in layer_groups.merged(blocks(build))
    }
    assert found == {
        "stage.0-2.conv ×3": (3, pytest.approx(3 / 7)),
        "stage.0-2.act ×3": (3, pytest.approx(1.5 / 7)),
        "fc": (1, pytest.approx(1.5 / 7)),
        "neck": (1, pytest.approx(1 / 7)),
    }


@pytest.mark.parametrize(
    ("closure", "method", "call"),
    [(0.4, "queue", 5e-3), (None, "queue", 7e-3), (0.4, "unheld", 7e-3)],
)
def test_layer_time_is_its_share_of_the_call_despite_an_outlier(
    build: Builder, closure: float | None, method: str, call: float
) -> None:
    """The tenth of the profiled calls took ten times as long."""
    point = blocks(build, closure, method)
    assert layer_groups.call_seconds(point) == pytest.approx(call)
    layers = layer_groups.merged(point)
    assert [layer.seconds for layer in layers] == pytest.approx(
        [layer.share * call for layer in layers]
    )
    kinds = {kind: sum(passes.values()) for kind, passes in layer_groups.by_kind(point).items()}
    assert kinds == pytest.approx(
        {"Conv2d": call * 4 / 7, "Linear": call * 1.5 / 7, "ReLU": call * 1.5 / 7}
    )


def test_strip_has_stages_blocks_and_layers_in_execution_order(build: Builder) -> None:
    rows = dict(layer_groups.in_order(blocks(build)))
    assert {title: [stretch.name for stretch in row] for title, row in rows.items()} == {
        "stage": ["stage", "neck", "fc"],
        "block": ["stage.0", "stage.1", "stage.2", "neck", "fc"],
        "layer": ["Conv2d", "ReLU"] * 3 + ["Conv2d", "Linear"],
    }
    assert [stretch.start for stretch in rows["block"]] == pytest.approx(
        [0, 1.5e-3, 3e-3, 4.5e-3, 5.5e-3]
    )
    assert all(
        sum(stretch.seconds for stretch in row) == pytest.approx(7e-3) for row in rows.values()
    )


def test_a_part_that_is_nearly_all_of_a_call_is_not_a_stage(build: Builder) -> None:
    lines = [line(f"features.{number}.conv", "Conv2d", Pass.forward, 1e-3) for number in range(4)]
    lines += [line(name, "Linear", Pass.forward, 1e-4) for name in ("norm", "head")]
    facts = {
        "layers": {"method": "queue", "call_seconds": [4e-3], "lines": msgspec.to_builtins(lines)}
    }
    rows = dict(
        layer_groups.in_order(
            Point(key=layers_key(build.point().key), status=Status.OK, facts=facts)
        )
    )
    assert [stretch.label for stretch in rows["stage"]] == ["0", "1", "2", "3", "norm", "head"]


def test_numbers_that_are_no_range_are_listed() -> None:
    assert layer_groups.name_of_all(["a.0.b1", "a.2.b1", "a.3.b1"]) == "a.0,2-3.b1"


def test_a_sign_in_a_path_is_not_taken_for_a_number(build: Builder) -> None:
    point = blocks(build)
    point.facts["layers"]["lines"][0]["key"]["path"] = "stage.#.conv"
    labels = {layer.label for layer in layer_groups.merged(point)}
    assert {"stage.#.conv", "stage.1-2.conv ×2"} <= labels


def test_numbers_of_any_length_in_a_path_are_no_error() -> None:
    digits = "7" * 5000
    assert layer_groups.name_of_all([f"a.0.b{digits}", f"a.1.b{digits}"]) == f"a.0-1.b{digits}"


def test_run_page_shows_times_and_layers_with_tooltips(
    build: Builder,
) -> None:
    record = build.record(build.point(), blocks(build))
    page = pages.of_run(Analysis.of(record), [("headline", ["line"])]).decode()
    assert page.count("<svg") == 2
    assert "<title>stage.0-2.conv ×3, forward, Conv2d, 3.00 ms · 42.9 %</title>" in page
    assert page == pages.of_run(Analysis.of(record), [("headline", ["line"])]).decode()
