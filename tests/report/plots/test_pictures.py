from __future__ import annotations

import json
import logging
import re
import struct
import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.grid import Column, Grid
from perfexp.records.record import Metric, Point, Status, Stop
from perfexp.records.summary import rows
from perfexp.records.sweep_record import Sweep
from perfexp.report.plots import canvas, drawing, pages, record_plots, sweep_plots
from perfexp.report.plots.chart import (
    COLORS,
    GREY,
    Bars,
    Caption,
    Chart,
    ChartLine,
    Panel,
    Strips,
    unit_of,
)
from perfexp.roofline.kernel_names import cut
from perfexp.statistics.estimators import Interval
from tests.support.builders import Builder

#: A line of predicted.jsonl.
PREDICTED = {
    "predicted": {"phase": "inference", "input_size": [240, 240], "batch_size": 1},
    "precision": "fp32",
    "unit": "seconds",
    "source": "interpolated",
    "value": 1.2e-3,
    "low": 1.1e-3,
    "high": 1.3e-3,
}


def legend_of(figure: Any) -> list[str]:
    legends = [legend for axes in figure.axes if (legend := axes.get_legend())]
    return [text.get_text().replace("\n", " ") for legend in legends for text in legend.get_texts()]


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_nothing_is_drawn_where_nothing_was_timed(build: Builder) -> None:
    assert record_plots.plot(Analysis.of(build.record(build.failed()))) is None
    assert record_plots.plot(Analysis.of(build.record(build.first_prediction()))) is None
    assert sweep_plots.plot(SweepAnalysis.of(Sweep(uid="s", name="s", started=""), [])) is None


def test_one_point_shows_its_samples(build: Builder) -> None:
    plot = record_plots.plot(Analysis.of(build.record(build.point(), build.first_prediction())))
    assert isinstance(plot, Strips)
    [(name, [taken])] = plot.points
    assert (name, taken.name, len(taken.series.measured)) == ("", "latency", 80)
    assert taken.text.startswith("62.")


def test_plot_of_one_point_starts_with_its_representative_time(build: Builder) -> None:
    plot = record_plots.plot(
        Analysis.of(build.record(build.point(kinds=("latency", "throughput", "device"))))
    )
    assert isinstance(plot, Strips)
    assert [taken.name for taken in plot.points[0][1]] == ["device", "latency", "pipelined"]


def test_sizes_make_the_horizontal_axis(build: Builder) -> None:
    plot = record_plots.plot(Analysis.of(build.sizes()))
    assert isinstance(plot, Chart)
    assert plot.axis == "input size (pixels a side)"
    assert [panel.title for panel in plot.panels] == [
        "latency per call",
        "throughput",
        "peak memory",
    ]
    assert plot.panels[0].lines[0].x == tuple(range(224, 513, 32))


def test_a_tick_close_to_another_has_no_label(build: Builder) -> None:
    points = [build.point(size=side) for side in (224, 367, 369, 512)]
    axes = drawing.compose(record_plots.plot(Analysis.of(build.record(*points)))).axes[-1]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert [len(axes.get_xticks()), *labels] == [4, "224", "367", "", "512"]


def test_sizes_that_are_not_square_lie_at_their_pixels(build: Builder) -> None:
    plot = record_plots.plot(
        Analysis.of(build.record(build.point(size=(256, 512)), build.point(size=256)))
    )
    assert isinstance(plot, Chart)
    assert plot.ticks == {256 * 512: "256x512", 256 * 256: "256"}


def test_batch_sizes_bring_the_throughput(build: Builder) -> None:
    plot = record_plots.plot(Analysis.of(build.batches()))
    assert isinstance(plot, Chart)
    assert [panel.title for panel in plot.panels] == [
        "latency per call",
        "throughput",
        "peak memory",
    ]
    assert plot.is_doubling
    rates = {
        x: y.value
        for x, y in zip(plot.panels[1].lines[0].x, plot.panels[1].lines[0].y, strict=True)
    }
    [(knee, text)] = plot.panels[1].marks.items()
    assert text == f"90 % of the best rate from batch {knee:g} on"
    assert (
        min(batch for batch, rate in rates.items() if rate >= 0.9 * max(rates.values()))
        == knee
        == 16
    )


def test_each_batch_size_has_a_line_and_each_phase_a_panel(build: Builder) -> None:
    points = [
        build.point(size=size, batch=batch, phase=phase)
        for size in (256, 224)
        for batch in (1, 4)
        for phase in ("train", "inference")
    ]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    times = {panel.title: panel for panel in plot.panels if panel.unit == "seconds"}
    assert list(times) == ["train: latency per call", "inference: latency per call"]
    for panel in times.values():
        assert {line.label: line.x for line in panel.lines} == dict.fromkeys(
            ("batch 1", "batch 4"), (224.0, 256.0)
        )


def test_latency_is_a_lighter_line_behind_the_device_time(build: Builder) -> None:
    points = [build.point(size=size, kinds=("device", "latency")) for size in (224, 256)]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    assert plot.panels[0].title == "device per call"
    assert [(line.label, line.is_light, line.color) for line in plot.panels[0].lines] == [
        ("latency", True, 0),
        ("device", False, 0),
    ]


def test_an_odd_size_is_ringed_with_its_size_and_by_how_much(build: Builder) -> None:
    points = [
        build.point(0.01 * (size / 224) ** 2 * (1.5 if size == 352 else 1), size=size)
        for size in range(224, 513, 32)
    ]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    assert plot.panels[0].lines[0].odd == {352.0: "352: +50 % against the fit"}
    assert not any(panel.lines[0].odd for panel in plot.panels[1:])


def test_lines_of_several_runs_are_judged_each_by_itself(build: Builder) -> None:
    fast, slow = (
        rows(
            build.record(
                *(
                    build.point(factor * (size / 224) ** 2, size=size)
                    for size in range(224, 513, 32)
                )
            )
        )
        for factor in (0.001, 0.01)
    )
    named = [(name, row) for name, table in (("fast", fast), ("slow", slow)) for row in table]
    plot = record_plots.chart_of(
        Caption(title="two models", subtitle="", footer=""), named, "input_size"
    )
    assert all(line.odd == {} for panel in plot.panels for line in panel.lines)


def test_rate_that_still_rises_is_marked_at_the_largest_batch(build: Builder) -> None:
    seconds = {4: 4 / 50, 8: 8 / 60, 16: 16 / 70, 32: 32 / 105}
    plot = record_plots.plot(
        Analysis.of(
            build.record(*(build.point(time, batch=batch) for batch, time in seconds.items()))
        )
    )
    assert isinstance(plot, Chart)
    assert plot.panels[1].marks == {32.0: "still rising at batch 32, the largest"}


@pytest.mark.parametrize(
    ("rates", "marks"),
    [
        ((50, 80, 95, 100), {16: "90 % of the best rate from batch 16 on"}),
        ((50, 80, 100, 120), {32: "still rising at batch 32, the largest"}),
        ((50, 100, 80, 70), {}),
        ((50, 100, 70, 105), {}),
    ],
)
def test_a_rate_that_rises_up_to_the_largest_batch_has_no_knee(
    build: Builder, rates: tuple[int, ...], marks: dict[int, str]
) -> None:
    points = [
        build.point(batch / rate, batch=batch)
        for batch, rate in zip((4, 8, 16, 32), rates, strict=True)
    ]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    assert plot.panels[1].marks == marks
    assert size_of(drawing.draw(plot))[0] == 1200


@pytest.mark.parametrize(("noise", "is_marked"), [(0.01, True), (0.8, False)])
def test_rates_with_wide_intervals_have_no_knee(
    build: Builder, noise: float, is_marked: bool
) -> None:
    rates = {4: 50, 8: 80, 16: 100, 32: 120}
    points = [build.point(batch / rate, batch=batch, noise=noise) for batch, rate in rates.items()]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    assert bool(plot.panels[1].marks) is is_marked


def rough(build: Builder, n: int, **key: Any) -> Point:
    """A point of few calls: with 3 of them it has no interval."""
    point = build.point(n=n, noise=0.002, **key)
    point.series[0].stop = Stop(reason="max_seconds", target=0.001, achieved=0.002)
    return point


@pytest.mark.parametrize(
    ("n", "meaning"),
    [
        ((80, 80), ""),
        ((80, 3), "≈ no useful interval"),
    ],
)
def test_rough_values_are_hollow_and_explained_in_the_legend(
    build: Builder, n: tuple[int, ...], meaning: str
) -> None:
    points = [rough(build, count, batch=batch) for batch, count in zip((1, 2), n, strict=True)]
    record = build.record(*points)
    is_rough = [row.time is None or row.time.median.low is None for row in rows(record)]
    assert is_rough == [count < 80 for count in n]
    plot = record_plots.plot(Analysis.of(record))
    assert isinstance(plot, Chart)
    reasons = tuple(meaning if each else "" for each in is_rough)
    assert [panel.lines[0].rough for panel in plot.panels[:2]] == [reasons] * 2, "time and rate"
    runs = [[points[0]], [rough(build, n[1])]]
    bars = sweep_plots.plot(
        SweepAnalysis.of(*build.sweep([{"algorithm": "gemm"}, {"algorithm": "fft"}], [*runs]))
    )
    assert isinstance(bars, Bars)
    known = bars.facets[0].groups[""]
    assert sorted(bar.is_hollow for bar in known) == sorted(is_rough)
    assert all(bar.text.startswith("≈ ") is bar.is_hollow for bar in known)
    for either in (plot, bars):
        assert size_of(drawing.draw(either))[0] == 1200
        names = [name for name in legend_of(drawing.compose(either)) if "≈" in name]
        assert names == ([meaning] if meaning else [])


def test_a_useless_interval_leaves_the_axis_to_the_values() -> None:
    intervals = (Interval(value=1.0, low=0.01, high=500.0), Interval(value=2.0, low=1.9, high=2.1))
    line = ChartLine(label="a", x=(1.0, 2.0), y=intervals, rough=("≈", ""))
    panel = Panel(title="time", unit="seconds", lines=(line,))
    caption, ticks = Caption(title="t", subtitle="s", footer=""), {1.0: "1", 2.0: "2"}
    plot = Chart(caption=caption, panels=(panel,), axis="size", ticks=ticks, gaps={})
    assert 2.1 < drawing.compose(plot).axes[0].get_ylim()[1] < 7


@pytest.mark.parametrize(("n", "text"), [(3, "62"), (80, "62")])
def test_strip_median_without_an_interval_is_dotted(build: Builder, n: int, text: str) -> None:
    plot = record_plots.plot(Analysis.of(build.record(rough(build, n))))
    assert isinstance(plot, Strips)
    [(_, taken)] = plot.points
    assert taken[0].text.startswith(text)
    assert taken[0].is_dotted is (n < 80)
    about = drawing.compose(plot).axes[0].get_xlabel()
    assert ("dotted, ≈: no useful one" in about) is (n < 80)
    assert size_of(drawing.draw(plot))[0] == 1200


def test_plot_line_is_the_mean_of_process_medians(
    build: Builder,
) -> None:
    points = [
        build.point(0.06 * (1 + replicate), replicate=replicate, n=80) for replicate in range(2)
    ]
    for several, center in ((points[:1], "median"), (points, "mean of the processes' medians")):
        plot = record_plots.plot(Analysis.of(build.record(*several)))
        assert isinstance(plot, Strips)
        over_all, over_time = drawing.compose(plot).axes
        assert f"black: {center}, shaded" in over_all.get_xlabel()
        assert f"against the {center}, over" in over_time.get_xlabel()
        assert over_time.yaxis.get_major_formatter()(0.0, None) == center.partition(" ")[0]


def test_a_long_warm_up_leaves_the_axis_to_the_samples_after_it(build: Builder) -> None:
    point = build.point(0.1, n=10)
    point.series[0].samples[:10] = [1.0] * 10
    plot = record_plots.plot(Analysis.of(build.record(point)))
    assert isinstance(plot, Strips)
    figure = drawing.compose(plot)
    start, end = figure.axes[1].get_xlim()
    assert 9.6 < start < 10 < end < 11.1
    assert "end of the 10 s warm-up, not counted" in legend_of(figure)


def test_samples_beyond_the_axis_are_marked_as_such(build: Builder) -> None:
    point = build.point(0.1)
    point.series[0].samples[40] = 1.0
    plot = record_plots.plot(Analysis.of(build.record(point)))
    assert isinstance(plot, Strips)
    figure = drawing.compose(plot)
    assert "beyond the axis" in legend_of(figure)
    assert figure.axes[1].get_ylim()[1] < 100


def test_no_legend_covers_data(build: Builder) -> None:
    points = [build.point(size=size, kinds=("device", "latency")) for size in range(224, 513, 32)]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    figure = drawing.compose(plot)
    figure.draw_without_rendering()
    for axes in figure.axes:
        if legend := axes.get_legend():
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_lines_have_the_same_look_in_all_panels(build: Builder) -> None:
    points = [
        build.point(size=size, batch=batch, kinds=("device", "latency"))
        for size in (224, 256)
        for batch in (1, 2)
    ]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    looks = [
        {
            (line.get_color(), line.get_marker())
            for line in axes.get_lines()
            if line.get_marker() in "os^Dv"
        }
        for axes in drawing.compose(plot).axes
    ]
    assert looks[0] == looks[1] == looks[2]


def test_words_lie_inside_the_figure(build: Builder) -> None:
    for record in (build.batches(failing=True), build.sizes(failing=True)):
        plot = record_plots.plot(Analysis.of(record))
        assert plot is not None
        figure = drawing.compose(plot)
        figure.draw_without_rendering()
        words = [text for axes in figure.axes for text in axes.texts]
        assert words
        for text in words:
            box = text.get_window_extent()
            assert (
                box.x0 >= 0
                and box.y0 >= 0
                and box.x1 <= figure.bbox.x1
                and box.y1 <= figure.bbox.y1
            )


def test_hostile_names_are_escaped_in_svg_tooltips(build: Builder) -> None:
    name = "</title><script>alert(1)</script>\x1b\n\"' onload='"
    axes = [{"algorithm": name}, {"algorithm": "fft"}]
    bars = sweep_plots.plot(
        SweepAnalysis.of(*build.sweep(axes, [[build.point(0.1)], [build.point(0.2)]]))
    )
    chart = record_plots.plot(Analysis.of(build.sizes()))
    assert bars is not None and chart is not None
    for plot, count in ((bars, 2), (chart, 3 * 10)):
        svg = canvas.save(drawing.compose(plot), "svg").decode()
        assert svg == canvas.save(drawing.compose(plot), "svg").decode()
        tree = ElementTree.fromstring(svg)
        titles = [one.text or "" for one in tree.iter("{http://www.w3.org/2000/svg}title")]
        assert len(titles) == count
        assert all(re.search(r"\d m?s|samples/s|MiB", title) for title in titles)
        assert "<script" not in svg
        assert not any("onload" in one.attrib for one in tree.iter())


def test_many_samples_are_an_image_in_an_svg_and_few_are_shapes(build: Builder) -> None:
    for n, has_images in ((80, False), (5000, True)):
        plot = record_plots.plot(Analysis.of(build.record(build.point(n=n))))
        assert plot is not None
        svg = canvas.save(drawing.compose(plot), "svg").decode()
        assert ("<image" in svg) is has_images
        assert svg.count("<use") < 1000


def test_failed_points_are_marked_where_they_would_be(build: Builder) -> None:
    plot = record_plots.plot(Analysis.of(build.sizes(failing=True)))
    assert isinstance(plot, Chart)
    assert plot.gaps == {480: "oom", 512: "unsupported"}


def test_the_words_of_strips_name_whom_their_intervals_hold_for(build: Builder) -> None:
    processes = [build.point(replicate=replicate) for replicate in range(3)]
    for points, scope in ((processes[:1], "1 process"), (processes, "3 processes")):
        plot = record_plots.plot(Analysis.of(build.record(*points)))
        assert isinstance(plot, Strips)
        assert f"after the warm-up; 95 % intervals of {scope}, on " in plot.caption.subtitle


def test_caption_names_subject_time_device_and_warnings(build: Builder) -> None:
    plot = record_plots.plot(Analysis.of(build.sizes()))
    assert plot is not None
    assert (
        plot.caption.title == "resnet50 · default · inference · fp32 · eager, threads=2 · batch 1"
    )
    words = (
        "latency per call: medians with their 95 % interval of 1 process, on Example CPU @ 2.00GHz"
    )
    assert plot.caption.subtitle == words
    assert plot.caption.footer == "warnings: busy_host"


def test_numeric_sweep_has_a_line_for_each_other_combination(build: Builder) -> None:
    axes = [
        {"algorithm": name, "batch_size": str(batch)}
        for name in ("gemm", "fft")
        for batch in (1, 8)
    ]
    points = [[build.point(batch=int(each["batch_size"]))] for each in axes]
    points[3] = [build.failed(batch=8)]
    plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, [*points])))
    assert isinstance(plot, Chart)
    assert {line.label: line.x for line in plot.panels[0].lines} == {
        "gemm": (1.0, 8.0),
        "fft": (1.0,),
    }
    assert plot.gaps == {8: "fft: oom"}


def campaign(build: Builder) -> SweepAnalysis:
    """Two models by three algorithms over six sizes: one faster, one unsupported, one that died."""
    axes, points = list[dict[str, str]](), list[list[Point] | None]()
    for model in ("vgg16", "alexnet"):
        for algorithm, ratio in (("default", 1.0), ("fft", 2.0), ("winograd", 0.5)):
            axes.append({"model": model, "algorithm": algorithm})
            sizes = range(224, 385, 32)
            timed = [build.point(ratio * size * 1e-5, size=size) for size in sizes]
            points.append(timed)
    points[1] = [build.failed(Status.UNSUPPORTED, size=size) for size in range(224, 385, 32)]
    points[5] = None
    joules = Metric(name="energy/per_call_joules", value=0.5, unit="joules")
    others = (points[0] or [])[1:]
    points[0] = [build.point(224e-5, metrics=[joules]), *others]
    sweep, records = build.sweep(axes, points)
    for record in records:
        assert record.sweep
        record.plan["model"] = {"name": record.sweep.axes["model"]}
    return SweepAnalysis.of(sweep, records)


def test_campaign_has_time_and_energy_of_each_model(build: Builder) -> None:
    plot = sweep_plots.plot(campaign(build))
    assert isinstance(plot, Chart)
    assert plot.across == 2
    assert [(panel.heading, panel.unit) for panel in plot.panels] == [
        ("vgg16", "seconds"),
        ("vgg16", "joules"),
        ("alexnet", "seconds"),
        ("alexnet", "joules"),
    ]
    assert [[line.label for line in panel.lines] for panel in plot.panels] == [
        ["default", "winograd"],
        ["default"],
        ["default", "fft"],
        [],
    ]
    looks = {(line.label, line.color) for panel in plot.panels for line in panel.lines}
    assert looks == {("default", 0), ("fft", 1), ("winograd", 2)}
    assert [panel.note for panel in plot.panels] == [
        "fft: unsupported at 6 points",
        "",
        "winograd: failed",
        "not measured",
    ]
    assert set(plot.panels[0].best.values()) == {(2, True)}
    assert set(plot.panels[2].best.values()) == {(0, True)}
    assert legend_of(drawing.compose(plot))[:3] == ["default", "fft", "winograd"]
    assert drawing.draw(plot) == drawing.draw(plot)


def test_campaign_draws_what_its_sparse_runs_predicted(build: Builder, tmp_path: Path) -> None:
    analysis = campaign(build)
    details = tmp_path / "2" / "details"
    details.mkdir(parents=True)
    refused = PREDICTED | {"source": "refused", "value": None}
    content = "\n".join([json.dumps(PREDICTED), json.dumps(refused), '{"predicted": 1}'])
    (details / "predicted.jsonl").write_text(content)
    plot = sweep_plots.plot(analysis, tmp_path)
    assert isinstance(plot, Chart)
    bands = {
        (panel.heading, line.label): line.predicted for panel in plot.panels for line in panel.lines
    }
    assert list(filter(bands.get, bands)) == [("vgg16", "winograd")]
    [(position, interval)] = bands["vgg16", "winograd"].items()
    assert (position, interval.low, interval.high) == (240, 1.1e-3, 1.3e-3)


def test_a_size_that_a_curve_lacks_has_no_fastest_line(build: Builder) -> None:
    axes = [{"algorithm": name} for name in ("default", "fft", "winograd")]
    axes = [{"model": model, **each} for model in ("vgg16", "alexnet") for each in axes]
    points = []
    for number, ratio in enumerate(2 * (1.0, 0.5, 0.25)):
        sizes = [size for size in range(224, 385, 32) if number != 2 or size != 256]
        points.append([build.point(ratio * size * 1e-5, size=size) for size in sizes])
    sweep, records = build.sweep(axes, [*points])
    for record in records:
        assert record.sweep
        record.plan["model"] = {"name": record.sweep.axes["model"]}
    plot = sweep_plots.plot(SweepAnalysis.of(sweep, records))
    assert isinstance(plot, Chart)
    best = [dict.fromkeys(range(224, 385, 32), (2, True)) for _ in range(2)]
    del best[0][256]
    assert [panel.best for panel in plot.panels] == best


def test_sizes_timed_as_graphs_continue_a_line_of_device_times(
    build: Builder, tmp_path: Path
) -> None:
    kinds = 5 * [("device", "latency")] + [("device/graph", "latency")]
    axes = [{"algorithm": "default"}, {"algorithm": "fft"}]
    timed = [build.point(n * 1e-3, size=32 * n, kinds=of) for n, of in enumerate(kinds, 1)]
    run = Analysis.of(build.record(*timed))
    sweep = SweepAnalysis.of(*build.sweep(axes, [timed[:5], timed]))
    for plot in (record_plots.plot(run), sweep_plots.plot(sweep)):
        assert isinstance(plot, Chart)
        [panel] = [panel for panel in plot.panels if panel.unit == "seconds"]
        line = [line for line in panel.lines if not line.is_light][-1]
        assert line.x == (32, 64, 96, 128, 160, 192)
        assert line.rough == (*5 * [""], "as a CUDA graph")
        assert panel.title == "device per call"
        assert plot.caption.subtitle.startswith("device, device/graph per call")


def test_predicted_device_times_are_not_drawn_beside_latencies(
    build: Builder, tmp_path: Path
) -> None:
    axes = [{"algorithm": "default"}, {"algorithm": "fft"}]
    sizes = range(224, 385, 32)
    both = [build.point(1e-3, size=size, kinds=("device", "latency")) for size in sizes]
    alone = [build.point(1e-3, size=size) for size in sizes]
    trained = [build.point(2e-3, phase="train", size=size, kinds=("device",)) for size in sizes]
    for number in range(2):
        details = tmp_path / str(number) / "details"
        details.mkdir(parents=True)
        (details / "predicted.jsonl").write_text(json.dumps(PREDICTED))
    for further in ([], trained):
        timed = [[*both, *further], [*alone, *further]]
        plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, timed)), tmp_path)
        assert isinstance(plot, Chart)
        assert plot.panels[0].title.endswith("latency per call")
        assert {line.label: list(line.predicted) for line in plot.panels[0].lines} == {
            "default": [],
            "fft": [240],
        }


def test_lines_of_graphs_alone_are_not_drawn_beside_device_times(build: Builder) -> None:
    axes, runs = [{"algorithm": "default"}, {"algorithm": "fft"}], []
    for kind in ("device", "device/graph"):
        runs.append([build.point(1e-3, size=size, kinds=(kind, "latency")) for size in (32, 64)])
    plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, runs)))
    assert isinstance(plot, Chart)
    assert plot.panels[0].title == "latency per call"


def test_nine_lines_differ_in_color_or_dash() -> None:
    assert len({drawing._look_of(place)[::2] for place in range(9)}) == 9


def test_sweep_over_names_has_a_bar_each_with_the_shortest_first(build: Builder) -> None:
    axes = [{"algorithm": "gemm"}, {"algorithm": "fft"}, {"execution.threads": "4"}]
    points = [[build.point(0.1)], [build.failed()], [build.point(0.05)]]
    plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, [*points])))
    assert isinstance(plot, Bars)
    [facet] = plot.facets
    [(_, bars)] = facet.groups.items()
    assert [(bar.label, bar.value is None) for bar in bars] == [
        ("threads=4", False),
        ("gemm", False),
        ("fft", True),
    ]
    assert [bar.text.rpartition(" · ")[2] for bar in bars] == [
        "0.500 × latency",
        "baseline",
        "oom: no memory left",
    ]
    assert plot.caption.subtitle.endswith("; × is the ratio to the baseline")


def test_bars_group_models_and_phases_have_own_axes(
    build: Builder,
) -> None:
    seconds = {("a", "gemm"): 0.3, ("a", "fft"): 0.2, ("b", "gemm"): 0.1, ("b", "fft"): 0.15}
    axes = [{"model": model, "algorithm": algorithm} for model, algorithm in seconds]
    points = [
        [build.point(value), build.point(3 * value, phase="train")] for value in seconds.values()
    ]
    plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, [*points])))
    assert isinstance(plot, Bars)
    assert [facet.title for facet in plot.facets] == [
        "inference: latency per call",
        "train: latency per call",
    ]
    groups = {name: [bar.label for bar in bars] for name, bars in plot.facets[1].groups.items()}
    assert groups == {"b": ["gemm", "fft"], "a": ["fft", "gemm"]}


def test_sweep_over_device_counts_has_a_line_of_rates_per_model(build: Builder) -> None:
    """Twice the devices with twice the samples in 1.25 times the time; two models, of which one fails once."""
    axes = [
        {"model": model, "gpu.count": count} for model in ("a", "b") for count in ("1", "2", "4")
    ]
    seconds = (0.1, 0.1, 0.125, 0.2, 0.2, 0.2)
    points = [
        [build.point(each, noise=0.0, facts={"world_size": int(axis["gpu.count"])})]
        for each, axis in zip(seconds, axes, strict=True)
    ]
    points[4] = [build.failed()]
    plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, points)))
    assert isinstance(plot, Chart)
    [panel] = plot.panels
    assert [(line.label, line.x) for line in panel.lines] == [("a", (1, 2, 4)), ("b", (1, 4))]
    assert [y.value for y in panel.lines[0].y] == pytest.approx([10, 20, 32])
    assert [(curve.x[-1], curve.y[-1] / curve.y[0]) for curve in panel.curves] == [
        pytest.approx((4, 4))
    ] * 2
    assert plot.gaps == {2: "b: oom"}
    assert plot.ticks == {1: "1", 2: "2", 4: "4"}
    assert drawing.draw(plot).startswith(b"\x89PNG")


def test_scaling_plot_takes_repeated_counts_drops_non_numbers(
    build: Builder,
) -> None:
    counts = ("1", "2", "2", "all")
    axes = [{"gpu.count": count, "mode": "train"} for count in counts]
    points = [
        [build.point(0.1, facts={"world_size": int(count)})] if count.isdecimal() else None
        for count in counts
    ]
    plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, points)))
    assert isinstance(plot, Chart)
    assert [(line.label, line.x) for line in plot.panels[0].lines] == [("train", (1, 2, 2))]
    assert not plot.gaps


def test_estimated_energies_are_hollow_and_named_so(build: Builder) -> None:
    points = [build.point(batch=batch, n=200, noise=0.001) for batch in (1, 2)]
    for point in points:
        metric = Metric(
            name="energy/per_call_joules",
            value=1.0,
            unit="joules",
            low=0.9,
            high=1.1,
            estimated=True,
        )
        point.metrics.append(metric)
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    assert "≈ estimated" in legend_of(drawing.compose(plot))


def test_a_sweep_never_mixes_two_kinds_of_time(build: Builder) -> None:
    axes = [{"execution": "eager"}, {"execution": "compile"}]
    both, one = build.point(0.02, kinds=("device", "latency")), build.point(0.1)
    plot = sweep_plots.plot(SweepAnalysis.of(*build.sweep(axes, [[both], [one]])))
    assert isinstance(plot, Bars)
    bars = plot.facets[0].groups[""]
    assert [bar.label for bar in bars] == ["eager", "compile"]
    assert [bar.value.value for bar in bars if bar.value] == pytest.approx([0.04, 0.1], rel=0.01)
    assert plot.caption.subtitle.startswith("latency per call")


def test_a_caller_s_time_stands_behind_the_device_s(build: Builder) -> None:
    points = [build.point(seconds, kinds=("device", "latency")) for seconds in (0.02, 0.03)]
    plot = sweep_plots.plot(
        SweepAnalysis.of(
            *build.sweep([{"algorithm": "gemm"}, {"algorithm": "fft"}], [[one] for one in points])
        )
    )
    assert isinstance(plot, Bars)
    bars = plot.facets[0].groups[""]
    assert [bar.behind.value for bar in bars if bar.behind] == pytest.approx([0.04, 0.06], rel=0.01)
    whiskers = [
        line for line in drawing.compose(plot).axes[0].collections if line.get_alpha() == 0.6
    ]
    assert len(whiskers) == 2


def test_wide_latency_intervals_are_drawn_beyond_the_scale(build: Builder) -> None:
    points = [build.point(size=size, kinds=("device", "latency")) for size in (224, 256)]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    device, wide = plot.panels[0].lines[1], plot.panels[0].lines[0]
    wide = replace(
        wide, y=tuple(replace(one, low=one.value / 2, high=one.value * 20) for one in wide.y)
    )
    axes = drawing.compose(
        replace(plot, panels=(replace(plot.panels[0], lines=(wide, device)),))
    ).axes[0]
    [bars] = [one for one in axes.collections if one.get_alpha() == 0.45]
    assert [tuple(segment[:, 0]) for segment in bars.get_segments()] == [
        (224.0, 224.0),
        (256.0, 256.0),
    ]
    assert axes.get_ylim()[1] < bars.get_segments()[0][1, 1]
    [beyond] = [line for line in axes.lines if line.get_label() == "beyond the axis"]
    assert list(beyond.get_xdata()) == [224.0, 256.0]


def test_a_picture_names_the_size_and_the_batch_that_do_not_vary(build: Builder) -> None:
    titles = [
        made.caption.title
        for made in (
            record_plots.plot(Analysis.of(build.record(build.point(batch=4)))),
            record_plots.plot(Analysis.of(build.sizes())),
        )
        if made
    ]
    assert [title.rpartition("threads=2 · ")[2] for title in titles] == ["224 · batch 4", "batch 1"]
    swept = sweep_plots.plot(
        SweepAnalysis.of(*build.sweep([{"model": "a"}], [[build.point(batch=4)]]))
    )
    assert swept is not None
    assert (
        swept.caption.title
        == "resnet50 · resnet50 sweep · inference · 224 · batch 4 · fp32 · 1 run"
    )


def test_long_names_of_bars_keep_both_ends() -> None:
    ends = [
        cut(
            f"segformer_b0 · implicit_precomp_gemm · channels_last · {phase}", drawing.LONGEST_LABEL
        )
        for phase in ("train", "inference")
    ]
    assert all(end.startswith("segformer_b0 · implicit") and len(end) <= 55 for end in ends)
    assert [end.rpartition(" ")[2] for end in ends] == ["train", "inference"]
    assert cut("resnet50 · gemm", drawing.LONGEST_LABEL) == "resnet50 · gemm"


@pytest.mark.parametrize("kind", ["single", "sizes", "batches", "bars"])
def test_every_plot_has_its_size_and_is_reproducible(
    build: Builder, kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    axes = [{"algorithm": "gemm"}, {"algorithm": "fft"}]
    made = {
        "single": lambda: record_plots.plot(Analysis.of(build.record(build.point()))),
        "sizes": lambda: record_plots.plot(Analysis.of(build.sizes(failing=True))),
        "batches": lambda: record_plots.plot(Analysis.of(build.batches(failing=True))),
        "bars": lambda: sweep_plots.plot(
            SweepAnalysis.of(*build.sweep(axes, [[build.point(n=3)], [build.failed()]]))
        ),
    }[kind]()
    assert made is not None
    with caplog.at_level(logging.WARNING):
        first, second = drawing.draw(made), drawing.draw(made)
    assert first == second
    assert size_of(first)[0] == 1200
    assert b"tEXt" not in first
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_name_with_formula_syntax_or_missing_glyphs_is_drawn(build: Builder) -> None:
    record = build.record(build.point(), plan={"model": {"name": "$\\frac$ 模型"}})
    plot = record_plots.plot(Analysis.of(record))
    assert plot is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size_of(drawing.draw(plot))[0] == 1200


@pytest.mark.parametrize("n", [1, 2])
def test_very_few_samples_and_constant_ones_are_drawn(build: Builder, n: int) -> None:
    point = build.point(n=n)
    point.series[0].samples[10:] = [0.01] * n
    plot = record_plots.plot(Analysis.of(build.record(point)))
    assert plot is not None
    assert size_of(drawing.draw(plot))[0] == 1200


def test_a_fitted_curve_lies_behind_the_points_and_says_its_law(build: Builder) -> None:
    plot = record_plots.plot(Analysis.of(build.sizes()))
    assert isinstance(plot, Chart)
    (curve,) = plot.panels[0].curves
    assert (curve.x[0], curve.x[-1]) == (224, 512)
    assert curve.y[0] == pytest.approx(0.01, rel=0.02)
    assert curve.y[-1] == pytest.approx(0.01 * (512 / 224) ** 2, rel=0.02)
    assert curve.label.startswith("latency ≈ ")


def test_each_line_has_its_curve_and_the_legend_names_them_once(build: Builder) -> None:
    points = [
        build.point(1e-7 * batch * height * width, size=(height, width), batch=batch)
        for batch in (1, 4)
        for height, width in ((256, 128), (224, 224), (256, 512), (512, 512), (512, 1024))
    ]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    curves = plot.panels[0].curves
    assert [curve.label for curve in curves] == ["scaling model"] * 2
    assert legend_of(drawing.compose(plot)).count("scaling model") == 1
    assert (curves[0].x[0], curves[0].x[-1]) == (256 * 128, 512 * 1024)
    assert curves[1].y[-1] == pytest.approx(4e-7 * 512 * 1024, rel=0.02)
    assert size_of(drawing.draw(plot))[0] == 1200


def test_energy_has_its_panel_where_it_was_measured(build: Builder) -> None:
    def joules(value: float | None) -> Metric:
        return Metric(
            name="energy/per_call_joules",
            value=value,
            unit="joules",
            reason=None if value else "no meter",
        )

    points = [
        build.point(size=size, metrics=[joules(value)])
        for size, value in ((224, 0.5), (256, 2.0), (288, None))
    ]
    plot = record_plots.plot(Analysis.of(build.record(*points)))
    assert isinstance(plot, Chart)
    panel = plot.panels[-1]
    assert (panel.title, panel.unit) == ("energy per call", "joules")
    assert [(line.x, [y.value for y in line.y]) for line in panel.lines] == [
        ((224, 256), [0.5, 2.0])
    ]
    assert size_of(drawing.draw(plot))[0] == 1200
    nothing = record_plots.plot(
        Analysis.of(
            build.record(build.point(size=224, metrics=[joules(None)]), build.point(size=256))
        )
    )
    assert isinstance(nothing, Chart)
    assert [panel.title for panel in nothing.panels] == [
        "latency per call",
        "throughput",
        "peak memory",
    ]


@pytest.mark.parametrize(
    ("unit", "most", "told"),
    [
        ("bytes", 3 * 2**20, (2**-20, "MiB")),
        ("bytes", 100.0, (1.0, "bytes")),
        ("joules", 0.02, (1e3, "mJ")),
    ],
)
def test_values_are_told_in_a_unit_that_fits_the_largest(
    unit: str, most: float, told: tuple[float, str]
) -> None:
    assert unit_of(unit, most) == told


def test_three_sizes_and_batch_sizes_alone_have_no_curve(build: Builder) -> None:
    for record in (
        build.record(*(build.point(size=size) for size in (224, 256, 288))),
        build.batches(),
    ):
        plot = record_plots.plot(Analysis.of(record))
        assert isinstance(plot, Chart)
        assert not plot.panels[0].curves


#: Colors as people without green cones see them (Machado, Oliveira and Fernandes 2009), and without red ones.
_BLIND = {
    "none": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}


@pytest.mark.parametrize("vision", _BLIND)
def test_colors_differ_for_any_vision_also_from_grey_and_white(vision: str) -> None:
    """CIE 76: a difference of 2.3 is just noticeable; Okabe and Ito's first five and this grey have 7."""
    seen = [_lab(color, np.array(_BLIND[vision])) for color in (*COLORS, GREY, "#ffffff")]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 25


def _lab(color: str, vision: np.ndarray) -> np.ndarray:
    channels = np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(vision @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_sweep_page_has_headline_sortable_tables_and_plot(
    build: Builder,
) -> None:
    points = [[build.point(value), build.point(3 * value, phase="train")] for value in (0.1, 0.2)]
    sweep, records = build.sweep([{"algorithm": "gemm"}, {"algorithm": "fft"}], [*points])
    table = Grid([Column("<i>", ["<b>"], prose=True)], ["<u>"])
    sections = [("<h>", ["<p>"]), ("", table), ("more", ["last"])]
    page = pages.of_sweep(SweepAnalysis.of(sweep, records), sections).decode()
    parts = [
        "<h1>&lt;h&gt;</h1>",
        "<p>&lt;p&gt;</p>",
        "<th class=prose>&lt;i&gt;",
        "<td class=prose>&lt;b&gt;",
    ]
    parts += ["&lt;u&gt;</p>", "<svg", "<h2>more</h2>", "<p>last</p>", "onclick = "]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert page.count("<svg") == 1
    assert page == pages.of_sweep(SweepAnalysis.of(sweep, records), sections).decode()
