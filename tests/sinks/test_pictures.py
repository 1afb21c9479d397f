from __future__ import annotations

import logging
import struct
import warnings

import pytest
from builders import Builder

from perfexp.plots import canvas, record_plots
from perfexp.plots.chart import Bars, Chart, Strips
from perfexp.records.record import Metric
from perfexp.records.sweep_record import Sweep
from perfexp.roofline.kernel_names import cut
from perfexp.statistics import estimators


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_nothing_is_drawn_where_nothing_was_timed(build: Builder) -> None:
    assert record_plots.plot(build.record(build.failed())) is None
    assert record_plots.plot(build.record(build.first_prediction())) is None
    assert record_plots.sweep_plot(Sweep(uid="s", name="s", started=""), []) is None


def test_one_point_shows_its_samples(build: Builder) -> None:
    plot = record_plots.plot(build.record(build.point(), build.first_prediction()))
    assert isinstance(plot, Strips)
    assert len(plot.rows) == 1


def test_sizes_make_the_horizontal_axis(build: Builder) -> None:
    plot = record_plots.plot(build.sizes())
    assert isinstance(plot, Chart)
    assert plot.axis == "input size (pixels a side)"
    assert [panel.title for panel in plot.panels] == ["time per call", "peak memory"]
    assert plot.panels[0].lines[0].x == tuple(range(224, 513, 32))


def test_sizes_that_are_not_square_lie_at_their_pixels(build: Builder) -> None:
    plot = record_plots.plot(build.record(build.point(size=(256, 512)), build.point(size=256)))
    assert isinstance(plot, Chart)
    assert plot.ticks == {256 * 512: "256x512", 256 * 256: "256"}


def test_batch_sizes_bring_the_throughput(build: Builder) -> None:
    plot = record_plots.plot(build.batches())
    assert isinstance(plot, Chart)
    assert [panel.title for panel in plot.panels] == ["time per call", "throughput", "peak memory"]
    assert plot.panels[1].lines[0].y[-1].value > plot.panels[1].lines[0].y[0].value


def test_each_batch_size_and_each_phase_has_its_line_over_sizes(build: Builder) -> None:
    points = [
        build.point(size=size, batch=batch, phase=phase)
        for size in (256, 224)
        for batch in (1, 4)
        for phase in ("train", "inference")
    ]
    plot = record_plots.plot(build.record(*points))
    assert isinstance(plot, Chart)
    labels = {line.label: line.x for line in plot.panels[0].lines}
    names = ("train · batch 1", "inference · batch 1", "train · batch 4", "inference · batch 4")
    assert labels == dict.fromkeys(names, (224.0, 256.0))


def test_failed_points_are_marked_where_they_would_be(build: Builder) -> None:
    plot = record_plots.plot(build.sizes(failing=True))
    assert isinstance(plot, Chart)
    assert plot.gaps == {480: "oom", 512: "unsupported"}


def test_the_words_name_what_was_measured_which_time_where_and_the_doubts(build: Builder) -> None:
    plot = record_plots.plot(build.sizes())
    assert plot is not None
    assert plot.caption.title == "resnet50 · default · inference · fp32 · eager, threads=2 · batch 1"
    assert (
        plot.caption.subtitle
        == "latency per call, median with its 95 % interval where there is one, on Example CPU @ 2.00GHz"
    )
    assert plot.caption.footer == "warnings: busy_host"


def test_a_sweep_over_a_number_has_a_line_for_each_combination_of_the_rest(build: Builder) -> None:
    axes = [{"algorithm": name, "batch_size": str(batch)} for name in ("gemm", "fft") for batch in (1, 8)]
    points = [[build.point(batch=int(each["batch_size"]))] for each in axes]
    points[3] = [build.failed(batch=8)]
    plot = record_plots.sweep_plot(*build.sweep(axes, [*points]))
    assert isinstance(plot, Chart)
    assert {line.label: line.x for line in plot.panels[0].lines} == {"gemm": (1.0, 8.0), "fft": (1.0,)}
    assert plot.gaps == {8: "fft: oom"}


def test_a_sweep_over_names_has_a_bar_for_each(build: Builder) -> None:
    axes = [{"algorithm": "gemm"}, {"algorithm": "fft"}, {"execution.threads": "4"}]
    plot = record_plots.sweep_plot(*build.sweep(axes, [[build.point()], [build.failed()], [build.point()]]))
    assert isinstance(plot, Bars)
    assert plot.labels == ("gemm", "fft", "threads=4")
    assert plot.remarks == ("", "oom", "")


def test_a_sweep_never_mixes_two_kinds_of_time(build: Builder) -> None:
    axes = [{"gpu.count": "1"}, {"gpu.count": "2"}]
    both, one = build.point(0.02, kinds=("device", "latency")), build.point(0.1)
    plot = record_plots.sweep_plot(*build.sweep(axes, [[both], [one]]))
    assert isinstance(plot, Bars)
    assert plot.labels == ("count=1", "count=2")
    assert [value.value for value in plot.values if value] == pytest.approx([0.04, 0.1], rel=0.01)
    assert plot.caption.subtitle.startswith("latency per call")


def test_a_picture_names_the_size_and_the_batch_that_do_not_vary(build: Builder) -> None:
    titles = [
        made.caption.title
        for made in (record_plots.plot(build.record(build.point(batch=4))), record_plots.plot(build.sizes()))
        if made
    ]
    assert [title.rpartition("threads=2 · ")[2] for title in titles] == ["224 · batch 4", "batch 1"]
    swept = record_plots.sweep_plot(*build.sweep([{"model": "a"}], [[build.point(batch=4)]]))
    assert swept is not None
    assert swept.caption.title == "resnet50 sweep · inference · 224 · batch 4 · fp32 · 1 run"


def test_long_names_of_bars_keep_both_ends() -> None:
    ends = [
        cut(f"segformer_b0 · implicit_precomp_gemm · channels_last · {phase}", canvas.LONGEST_LABEL)
        for phase in ("train", "inference")
    ]
    assert all(end.startswith("segformer_b0 · implicit") and len(end) <= 55 for end in ends)
    assert [end.rpartition(" ")[2] for end in ends] == ["train", "inference"]
    assert cut("resnet50 · gemm", canvas.LONGEST_LABEL) == "resnet50 · gemm"


@pytest.mark.parametrize("kind", ["single", "sizes", "batches", "bars"])
def test_every_kind_is_drawn_at_its_size_silently_and_always_the_same(
    build: Builder, kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    axes = [{"algorithm": "gemm"}, {"algorithm": "fft"}]
    made = {
        "single": lambda: record_plots.plot(build.record(build.point())),
        "sizes": lambda: record_plots.plot(build.sizes(failing=True)),
        "batches": lambda: record_plots.plot(build.batches(failing=True)),
        "bars": lambda: record_plots.sweep_plot(*build.sweep(axes, [[build.point(n=3)], [build.failed()]])),
    }[kind]()
    assert made is not None
    with caplog.at_level(logging.WARNING):
        first, second = canvas.draw(made), canvas.draw(made)
    assert first == second
    assert size_of(first) == (1200, 1100 if kind == "batches" else 800)
    assert b"tEXt" not in first
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_a_name_that_looks_like_a_formula_or_has_no_glyph_is_drawn(build: Builder) -> None:
    record = build.record(build.point(), plan={"model": {"name": "$\\frac$ 模型"}})
    plot = record_plots.plot(record)
    assert plot is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size_of(canvas.draw(plot)) == (1200, 800)


@pytest.mark.parametrize("n", [1, 2])
def test_very_few_samples_and_constant_ones_are_drawn(build: Builder, n: int) -> None:
    point = build.point(n=n)
    point.series[0].samples[10:] = [0.01] * n
    plot = record_plots.plot(build.record(point))
    assert plot is not None
    assert size_of(canvas.draw(plot)) == (1200, 800)


def test_a_fitted_curve_lies_behind_the_points_and_says_its_law(build: Builder) -> None:
    plot = record_plots.plot(build.sizes())
    assert isinstance(plot, Chart)
    (curve,) = plot.panels[0].curves
    assert (curve.x[0], curve.x[-1]) == (224, 512)
    assert curve.y[0] == pytest.approx(0.01, rel=0.02)
    assert curve.y[-1] == pytest.approx(0.01 * (512 / 224) ** 2, rel=0.02)
    assert curve.label.startswith("latency ≈ ")
    assert curve.line == plot.panels[0].lines[0].label


def test_each_line_has_its_curve_and_the_legend_names_them_once(build: Builder) -> None:
    points = [
        build.point(1e-7 * batch * height * width, size=(height, width), batch=batch)
        for batch in (1, 4)
        for height, width in ((256, 128), (224, 224), (256, 512), (512, 1024))
    ]
    plot = record_plots.plot(build.record(*points))
    assert isinstance(plot, Chart)
    curves = plot.panels[0].curves
    assert [(curve.line, curve.label) for curve in curves] == [("batch 1", "scaling model"), ("batch 4", "")]
    assert (curves[0].x[0], curves[0].x[-1]) == (256 * 128, 512 * 1024)
    assert curves[1].y[-1] == pytest.approx(4e-7 * 512 * 1024, rel=0.02)
    assert size_of(canvas.draw(plot)) == (1200, 1100)


def test_energy_has_its_panel_where_it_was_measured(build: Builder) -> None:
    def joules(value: float | None) -> Metric:
        return Metric(name="energy/per_call_joules", value=value, unit="joules", reason=None if value else "no meter")

    points = [build.point(size=size, metrics=[joules(value)]) for size, value in ((224, 0.5), (256, 2.0), (288, None))]
    plot = record_plots.plot(build.record(*points))
    assert isinstance(plot, Chart)
    panel = plot.panels[1]
    assert (panel.title, panel.unit) == ("energy per call", "joules")
    assert [(line.x, [y.value for y in line.y]) for line in panel.lines] == [((224, 256), [0.5, 2.0])]
    assert size_of(canvas.draw(plot)) == (1200, 1100)
    nothing = record_plots.plot(build.record(build.point(size=224, metrics=[joules(None)]), build.point(size=256)))
    assert isinstance(nothing, Chart)
    assert [panel.title for panel in nothing.panels] == ["time per call", "peak memory"]


@pytest.mark.parametrize(
    ("unit", "most", "told"),
    [("bytes", 3 * 2**20, (2**-20, "MiB")), ("bytes", 100.0, (1.0, "bytes")), ("joules", 0.02, (1e3, "mJ"))],
)
def test_values_are_told_in_a_unit_that_fits_the_largest(unit: str, most: float, told: tuple[float, str]) -> None:
    values = [estimators.Interval(value=value, low=None, high=None) for value in (most / 10, most)]
    assert canvas._unit(unit, values) == told


def test_three_sizes_and_batch_sizes_alone_have_no_curve(build: Builder) -> None:
    for record in (build.record(*(build.point(size=size) for size in (224, 256, 288))), build.batches()):
        plot = record_plots.plot(record)
        assert isinstance(plot, Chart)
        assert not plot.panels[0].curves
