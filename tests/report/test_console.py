from __future__ import annotations

import io
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.diagnostics import Diagnostic, make
from perfexp.records.grid import Column, Grid
from perfexp.records.priors import HOST_BOUND
from perfexp.records.record import Epoch, Key, Metric, Point, Status, Stop, SweepMembership
from perfexp.records.remarks import raised_diagnostics, scaling_lines
from perfexp.records.summary import rows
from perfexp.records.wording import interval_text, metric_text, metric_title
from perfexp.report.console import Console, lines_of
from perfexp.report.plots import record_plots
from perfexp.report.plots.chart import Chart
from perfexp.report.progress import Whole
from perfexp.report.tables import flat
from perfexp.run.job import ProgressRelay
from perfexp.statistics.estimators import Interval
from perfexp.statistics.prior import Prior
from tests.support.builders import PLAN, Builder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(out: io.StringIO, **settings: object) -> Console:
    return Console(out=out, err=io.StringIO(), **settings)  # type: ignore[arg-type]


def shown(
    build: Builder, *points: object, out: io.StringIO | None = None, **settings: object
) -> str:
    out = out or io.StringIO()
    settings.setdefault("verbose", not settings.get("quiet"))
    console(out, **settings).show(Analysis.of(build.record(*points)), Path("out"))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_the_header_says_what_is_measured_and_for_how_long() -> None:
    out = io.StringIO()
    console(out).header(PLAN, {"device": {"name": "AMD EPYC"}}, points="3 points", seconds=50)
    assert out.getvalue().splitlines() == [
        "resnet50 · inference · fp32 · threads=2 · AMD EPYC",
        "  3 points, measuring takes about 50 s, more if calls are slow",
    ]


def test_time_has_its_interval_and_only_supported_digits(
    build: Builder,
) -> None:
    text = shown(build, build.point(0.0624, n=400, noise=0.02))
    assert re.search(r"latency p50 ± CI95: 62\.\d\d ms ± 0\.\d %", text)


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.15528, 0.14621, 0.16935, "155 ms ± 7.5 %"),
        (0.1549, 0.1434, 0.1664, "155 ms ± 7.4 %"),
        (0.1052, 0.0941, 0.1163, "105 ms ± 11 %"),
        (0.01572, 0.01416, 0.02037, "15.7 ms (14.2 … 20.4 ms)"),
        (0.00647, 0.006337, 0.006744, "6.47 ms (6.34 … 6.74 ms)"),
        (0.00647, 0.00646, 0.00650, "6.470 ms ± 0.3 %"),
    ],
)
def test_rounding_hides_neither_figure_nor_interval_end(value, low, high, text):
    assert interval_text(Interval(value=value, low=low, high=high)) == text


def test_piped_lines_ignore_the_exported_columns(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    Console(out=out, err=io.StringIO()).show(
        Analysis.of(build.record(build.point(0.0624, n=400, noise=0.02))), Path("out")
    )
    assert max(map(len, out.getvalue().splitlines())) > 60


def test_percentiles_without_interval_are_named_below_the_table(build: Builder) -> None:
    point = build.independent(n=80)
    lines = shown(build, point).splitlines()
    assert "  ≈ p99 without an interval: 80 of 368 effective samples" in lines
    assert any(line.startswith("  p99: ≈ 63.") for line in lines), "it is printed all the same"
    assert any(re.fullmatch(r"  p95: 6\d\.\d+ ms ± [\d.]+ %", line) for line in lines), (
        "p95 has its interval"
    )


def test_percentiles_over_several_processes_are_explained(build: Builder) -> None:
    note = "  p95, p99 pool the calls of all processes; p50 is the geometric mean of their medians"
    points = [build.point(n=80, replicate=replicate) for replicate in range(2)]
    assert note in shown(build, *points).splitlines()
    assert "pool the calls" not in shown(build, points[0])
    record, out = build.record(*points), io.StringIO()
    record.plan["percentiles"] = [50]
    console(out, verbose=True).results(Analysis.of(record))
    assert "pool the calls" not in out.getvalue()


def test_footnote_lists_effective_samples_missing_percentiles(
    build: Builder,
) -> None:
    few, more = build.independent(n=80), build.independent(n=120)
    more.key = msgspec.structs.replace(more.key, batch_size=2)
    lines = shown(build, few, more).splitlines()
    assert (
        "  ≈ p99 at 2 of 2 points without an interval: 80 to 120 of 368 effective samples" in lines
    )


def test_a_percentile_with_a_wide_interval_has_both_ends(build: Builder) -> None:
    point = build.independent(n=80)
    samples = point.series[0].samples
    samples[5::27] = [0.2 + 0.1 * index for index in range(len(samples[5::27]))]
    assert re.search(r"p95: [\d.]+ ms \(6\d\.\d … [2-9]\d\d ms\)\n", shown(build, point))


def test_batch_that_all_points_share_is_in_the_header(build: Builder) -> None:
    lines = shown(build, build.point(batch=4), build.point(batch=4, size=256)).splitlines()
    assert lines[0] == "resnet50 · inference · batch 4 · fp32 · threads=2 · Example CPU @ 2.00GHz"


def test_fp32_without_tf32_is_marked_on_a_gpu(build: Builder) -> None:
    record, out = build.record(build.point()), io.StringIO()
    record.plan["precision"] = {"name": "fp32", "tf32": False}
    flags = {"matmul_allow_tf32": False, "cudnn_allow_tf32": False}
    record.environment = {"device": {"kind": "cuda", "name": "NVIDIA H100"}, "session": flags}
    console(out).results(Analysis.of(record))
    assert "· fp32 (no TF32) ·" in out.getvalue().splitlines()[0]


@pytest.mark.parametrize(
    ("products", "convolutions", "words"),
    [
        (False, True, "float32, TF32 convolutions (PyTorch's default)"),
        (True, True, "float32, TF32 convolutions and products"),
        (False, False, "float32, no TF32"),
    ],
)
def test_the_default_precision_says_what_torchs_flags_are(
    build: Builder, products, convolutions, words
) -> None:
    record, out = build.record(build.point(precision="torch")), io.StringIO()
    record.plan["precision"] = {"name": "torch", "tf32": None}
    flags = {"matmul_allow_tf32": products, "cudnn_allow_tf32": convolutions}
    record.environment = {"device": {"kind": "cuda", "name": "NVIDIA H100"}, "session": flags}
    console(out).results(Analysis.of(record))
    assert f"· {words} ·" in out.getvalue().splitlines()[0]
    record.environment["device"]["compute_capability"] = "7.5"
    console(out).results(Analysis.of(record))
    assert "· float32 ·" in out.getvalue()


def idle(share: float, cause: str = "launches") -> Diagnostic:
    return make("device_idle", idle=share, of_mean="", cause=cause, advice="more")


def test_a_doubt_of_the_run_and_one_of_a_point_are_two(build: Builder) -> None:
    of_run, of_point = (
        Diagnostic(code="drift", message=f"moved by {share} %", help="wait") for share in (19, 5)
    )
    record = build.record(build.point(doubts=[of_point]), doubts=[of_run])
    assert [raised.lines[0] for raised in raised_diagnostics(Analysis.of(record))] == [
        "warning: moved by 19 % (drift)",
        "warning: 224 · batch 1: moved by 5 % (drift)",
    ]


def test_cold_start_warning_belongs_to_its_own_point_only(build: Builder) -> None:
    first = build.first_prediction()
    first.doubts.append(Diagnostic(code="busy_host", message="load"))
    record = build.record(build.training(), build.point(), build.point(batch=8), first)
    codes = [
        [
            raised.worst.code
            for raised in raised_diagnostics(replace(Analysis.of(record), rows=(row,)))
        ]
        for row in rows(record)
    ]
    assert ["busy_host" in each for each in codes] == [False, True, False]


def test_a_rate_without_an_interval_is_marked(build: Builder) -> None:
    text = shown(build, build.point(n=5))
    assert re.search(r"≈ 16\.\d", text)
    assert "  ≈ samples/s without an interval: too few effective samples\n" in text
    assert "≈ 16" not in shown(build, build.point(n=400))


def test_rate_that_slow_calls_lower_is_explained_below_the_table(build: Builder) -> None:
    point = build.point(n=400)
    assert "mean of all calls" not in shown(build, point)
    point.series[0].samples[10::7] = [0.2] * len(point.series[0].samples[10::7])
    assert "samples/s is by the mean of all calls, which differs" in shown(build, point)
    assert "at 1 of 2 points" in shown(build, point, build.point(n=400, batch=2))


def test_worst_of_several_warnings_is_shown_with_its_range(build: Builder) -> None:
    points = []
    for size, share in ((224, 0.4), (256, 0.7), (288, 0.5)):
        points.append(build.point(size=size, doubts=[idle(share)]))
    text = shown(build, *points)
    assert (
        "  warning: 256, the worst of 3 measurements: the device idles 70% of the loop; launches "
        "(40% to 70% over all) (device_idle)" in text.splitlines()
    )
    old = [msgspec.structs.replace(idle(share), fields=msgspec.UNSET) for share in (0.4, 0.7)]
    points = [
        build.point(size=size, doubts=[doubt]) for size, doubt in zip((224, 256), old, strict=True)
    ]
    assert "warning: 224, and 1 more measurement with other details: the device idles 40%" in shown(
        build, *points
    )


def test_the_range_covers_doubts_that_differ_in_their_cause_too(build: Builder) -> None:
    points = [
        build.point(size=size, doubts=[idle(share, cause)])
        for size, share, cause in (
            (224, 0.7, "the host needs 95%"),
            (256, 0.74, "the pace changed"),
            (288, 0.4, "data"),
        )
    ]
    assert (
        "  warning: 256, the worst of 3 measurements: the device idles 74% of the loop; the pace changed "
        "(40% to 74% over all) (device_idle)" in shown(build, *points).splitlines()
    )


def test_the_least_coverage_is_the_worst(build: Builder) -> None:
    points = [
        build.point(
            size=size,
            doubts=[make("algorithm_fallback", share=share, algorithm="gemm", layers=layers)],
        )
        for size, share, layers in ((224, 0.597, "a"), (256, 0.54, "b"))
    ]
    assert "warning: 256, the worst of 2 measurements: 54.0% of the conv" in shown(build, *points)
    points[0].doubts[:] = [
        make("algorithm_fallback", share=0.0, algorithm="gemm", layers="features.3")
    ]
    assert "warning: 224, the worst of 2 measurements: 0.0% of the conv" in shown(build, *points)


def test_figures_that_do_not_measure_harm_are_not_ranked(build: Builder) -> None:
    points = [
        build.point(size=size, doubts=[make("pace_changed", pipelined_ms=one, waiting_ms=two)])
        for size, one, two in ((224, 2.0, 10.0), (256, 90.0, 100.0))
    ]
    assert "warning: 224, and 1 more measurement with other details: a call takes 2" in shown(
        build, *points
    )


def test_figures_of_one_doubt_are_not_those_of_the_others(build: Builder) -> None:
    doubts = [
        Diagnostic(code="odd", message=text, help="look")
        for text in ("3 of 4 blocks", "5 spikes", "2 gaps")
    ]
    points = [
        build.point(size=224 + 32 * number, doubts=[doubt]) for number, doubt in enumerate(doubts)
    ]
    record = build.record(*points)
    [raised] = raised_diagnostics(Analysis.of(record))
    assert (
        raised.lines[0]
        == "warning: 224, and 2 more measurements with other details: 3 of 4 blocks (odd)"
    )


def test_worst_interval_is_the_widest_and_its_range_has_units(
    build: Builder,
) -> None:
    points = []
    for size, effective, width in ((224, 8, 0.05), (256, 10, 0.12)):
        reached = f"±{width:.1%} instead of ±1.0%"
        few = make(
            "too_few_samples",
            n=12,
            effective=effective,
            width=width,
            reached=reached,
            advice="more",
        )
        busy = make("busy_host", load=effective + 0.3, cores=64)
        points.append(build.point(size=size, doubts=[few, busy]))
    record = build.record(*points)
    lines = [raised.lines[0] for raised in raised_diagnostics(Analysis.of(record))]
    assert lines == [
        "warning: 256, the worst of 2 measurements: other processes used 10.3 of 64 CPU cores during the measurement "
        "(8.3 to 10.3 over all) (busy_host)",
        "note: 256, the worst of 2 measurements: 12 samples (10 effective): ±12.0% instead of ±1.0% "
        "(5.0% to 12.0% over all) (too_few_samples)",
    ]


@pytest.mark.parametrize(
    ("sweep", "again"),
    [
        (None, "resume=DIR"),
        (SweepMembership(uid="a", job=0), "resume=DIR"),
        (SweepMembership(uid="a", job=0, level=0.0), "repeating perfexp ab with output_dir=DIR"),
    ],
)
def test_processes_that_took_turns_continue_in_turn(
    build: Builder, sweep: SweepMembership | None, again: str
) -> None:
    points = [
        build.point(),
        build.failed(Status.INTERRUPTED, replicate=1, error="the run was interrupted"),
    ]
    record = msgspec.structs.replace(build.record(*points), sweep=sweep)
    note = f"  ± 95 % interval over 1 of 2 processes; ≈ no useful one (perfexp help ±); {again} continues"
    assert " ".join(note.split()) in " ".join(
        " ".join(lines_of(lambda console: console.results(Analysis.of(record)))).split()
    )


def test_an_interrupted_run_shows_what_any_process_has_finished(build: Builder) -> None:
    def interrupted(batch: int, replicate: int) -> Point:
        return build.failed(
            Status.INTERRUPTED, batch=batch, replicate=replicate, error="the run was interrupted"
        )

    points = [
        interrupted(1, 0),
        interrupted(2, 0),
        build.point(batch=1, replicate=1),
        interrupted(1, 2),
    ]
    lines = shown(build, *points).splitlines()
    assert any(re.search(r"1 +62\.\d\d ms ± .*", line) for line in lines)
    assert (
        "  ± 95 % interval of the mean over processes, from 1 of 3 processes (resume=DIR continues)"
        in lines
    )
    assert lines[lines.index("not measured") + 1 :][:2] == [
        "  inference · 224 · batch 1 · fp32: interrupted after 1 of 3 processes",
        "  inference · 224 · batch 2 · fp32: interrupted: the run was interrupted",
    ]


@pytest.mark.parametrize("width", [34, 40, 60])
def test_no_word_of_a_table_is_split_where_all_words_fit(width: int) -> None:
    points, verdicts = (
        ["efficientnet_b0 · batch 4", "wide_resnet50_2"],
        ["✕ NOT COMPARABLE", "▲ FASTER"],
    )
    grid = Grid(
        [
            Column("point", points, prose=True),
            Column("n", ["7"] * 2),
            Column("verdict", verdicts, prose=True),
        ]
    )
    out = Terminal()
    console(out, width=width).show_grid("title", grid)
    words = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).split()
    assert {"efficientnet_b0", "wide_resnet50_2", "COMPARABLE", "FASTER"} <= set(words)
    assert grid.least_width + 2 <= 34 < grid.whole_width + 2
    assert sum(grid.widths(60)) == grid.whole_width - 4


def test_only_what_varies_has_a_column(build: Builder) -> None:
    head = shown(build, build.point(batch=1), build.point(batch=2)).splitlines()[1].split()
    assert head[:2] == ["batch", "latency"]


def test_training_shows_phases_share_of_data_and_estimates(build: Builder) -> None:
    text = shown(build, build.training(), build.training(batch=2))
    assert re.search(r"data +forward +loss +backward +optimizer +data share of means", text)
    assert re.search(r"phases\n +data: [\d.]+ ms\n +forward: ", shown(build, build.training()))
    assert "≈ 12.5 s" in text
    assert "accuracy: the labels are random" in text


def test_memory_line_is_of_timed_calls_first_calls_in_metrics(
    build: Builder,
) -> None:
    def point(size: int, first: float) -> Point:
        made = build.point(size=size)
        [peak] = [metric.value for metric in made.metrics if metric.name == "memory/peak_bytes"]
        assert peak == 513 * 2**20
        made.metrics.append(
            Metric(name="memory/warmup_peak_bytes", value=first * peak, unit="bytes")
        )
        return made

    text = shown(build, point(224, 8.0))
    assert "memory 513 MiB" in " ".join(shown(build, point(224, 8.0), verbose=False).split())
    assert "memory/warmup_peak: 4.01 GiB" in text


@pytest.mark.parametrize(
    ("name", "unit", "value", "text"),
    [
        ("work/flops", "1", 3.51e9, "3.51 GFLOP"),
        ("work/forward_macs", "1", 5.94e8, "594 MMAC"),
        ("work/flops_per_second", "1/s", 1.41e10, "14.1 GFLOP/s"),
        ("work/parameters", "1", 11689512, "11.7 M"),
        ("work/bytes_min", "bytes", 2.0**20, "1.00 MiB"),
        ("ceiling/flops_per_second", "1/s", 4e11, "400 GFLOP/s"),
        ("ceiling/bytes_per_second", "bytes/s", 3.3e12, "3.30 TB/s"),
        ("mfu", "1", 0.421, "42 %"),
        ("layers/gap_share", "1", 0.031, "3.1 %"),
        ("train/loss_first", "1", 7.2, "7.20"),
        ("ranks/together", "samples/s", 120.0, "120 samples/s"),
    ],
)
def test_figures_have_the_unit_of_what_they_count(
    name: str, unit: str, value: float, text: str
) -> None:
    assert metric_text(Metric(name=name, value=value, unit=unit)) == text
    assert metric_text(Metric(name=name, value=value, unit=unit, estimated=True)) == f"≈ {text}"
    ranged = Metric(name=name, value=value, unit=unit, low=0.9 * value, high=1.1 * value)
    assert metric_text(ranged) == f"{text} ± 10 %"


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (
            Metric(name="call_seconds", unit="seconds", value=5.44e-3, low=3.88e-3, high=7.01e-3),
            "3.88 … 7.01 ms",
        ),
        (
            Metric(name="lag_seconds", unit="seconds", value=1e-3, low=4e-4, high=1.6e-3),
            "400 µs … 1.60 ms",
        ),
        (
            Metric(name="used_bytes", unit="bytes", value=2**30, low=2**29, high=2**31),
            "512 MiB … 2.00 GiB",
        ),
        (Metric(name="work/flops", unit="1", value=2e9, low=1e9, high=3e9), "1.00 … 3.00 GFLOP"),
        (Metric(name="mfu", unit="1", value=0.4, low=0.2, high=0.6), "20 … 60 %"),
        (
            Metric(name="energy/per_call_joules", unit="joules", value=2.0, low=1.0, high=3.0),
            "1.00 … 3.00 J",
        ),
        (Metric(name="train/loss_first", unit="1", value=2.0, low=1.0, high=3.0), "1.00 … 3.00"),
    ],
)
def test_ends_of_a_wide_interval_are_in_the_unit_of_the_value(metric: Metric, text: str) -> None:
    assert metric_text(metric).endswith(f" ({text})")


def test_titles_distinguish_times_energies_and_differences() -> None:
    names = {
        "energy/call_seconds": "seconds",
        "energy/per_call_joules": "joules",
        "layers/closure": "1",
    }
    titles = [metric_title(Metric(name=name, value=1.0, unit=unit)) for name, unit in names.items()]
    assert titles == ["energy/time of a call", "energy/per_call", "layers − call"]


def test_rate_and_mfu_name_the_time_and_peak_they_use(build: Builder) -> None:
    rate = Metric(name="work/flops_per_second", value=6.5e12, unit="1/s")
    shares = [Metric(name=name, value=0.045, unit="1") for name in ("mfu", "mfu_of_ceiling")]
    lines = shown(build, build.point(metrics=[rate, *shares]))
    assert "FLOP/s at latency p50" in lines
    assert "MFU at samples/s" in lines
    of_the_sheet, of_the_ceiling = (
        "the data sheet's peak in fp32",
        "the peak of matrix products on this device in fp32",
    )
    assert f"  MFU is of {of_the_sheet}; MFU of ceiling is of {of_the_ceiling}\n" in lines
    assert of_the_sheet not in shown(build, build.point(metrics=[rate]))


def test_energies_name_their_loop_and_show_its_call_time(
    build: Builder,
) -> None:
    loop = [
        Metric(name="energy/per_call_joules", value=0.7654, unit="joules"),
        Metric(name="energy/call_seconds", value=4.65e-3, unit="seconds"),
    ]
    queued = [
        Metric(name="energy/queued_per_call_joules", value=0.366, unit="joules"),
        Metric(name="energy/queued_call_seconds", value=1.344e-3, unit="seconds"),
    ]
    note = "energies are of a loop of calls back to back"
    text = shown(build, build.point(metrics=loop))
    assert f"  {note}\n" in text
    assert "energy/time of a call: 4.65 ms" in text
    busy = "; queued: of CUDA graphs that keep the device busy"
    text = shown(build, build.point(metrics=[*loop, *queued]))
    assert f"{note}{busy}" in " ".join(text.split())
    assert "energy/time of a queued call as a CUDA graph: 1.34 ms" in text
    several = [build.point(size=size, metrics=[*loop, *queued]) for size in (224, 256)]
    assert f"  {note}{busy}\n" in shown(build, *several)
    assert note not in shown(
        build, build.point(metrics=[Metric(name="mfu", value=0.045, unit="1")])
    )


def test_warnings_show_their_help_and_failures_their_reason(build: Builder) -> None:
    doubt = Diagnostic(code="busy_host", message="load average 3.1", help="end other work")
    lines = shown(
        build, build.point(doubts=[doubt]), build.failed(size=512), build.first_prediction()
    ).splitlines()
    assert "  warning: 224: load average 3.1 (busy_host)" in lines
    assert "    help: end other work" in lines
    assert "  inference · 512 · batch 1 · fp32: oom: no memory left" in lines
    parts = "3.30 s = process 100 ms + imports 2.50 s + context 10.0 ms + weights 400 ms + first call 290 ms"
    assert any(line.endswith(f"{parts}; then second call 60.0 ms") for line in lines)


def test_the_reason_for_a_missing_figure_is_printed_once(build: Builder) -> None:
    def missing(name: str) -> Metric:
        return Metric(name=name, value=None, unit="joules", reason="no meter: MIG is on")

    points = [
        build.point(batch=batch, metrics=[missing("energy/per_call_joules")]) for batch in (1, 2)
    ]
    assert shown(build, *points).count("no meter: MIG is on") == 1
    for point in points:
        point.doubts.append(make("meter_missing", reason="no meter: MIG is on"))
    text = shown(build, *points)
    assert text.count("no meter: MIG is on") == 1
    assert (
        "warning: batch 1 and 1 more measurement: no energy was measured, no meter: MIG is on"
        in text
    )


def test_a_link_longer_than_the_terminal_stays_whole(build: Builder) -> None:
    out, link = Terminal(), "http://127.0.0.1:5000/#/experiments/1?" + "x" * 100
    console(out, width=80).show(
        Analysis.of(build.record(build.point())), Path("out"), tracking=link
    )
    assert link in out.getvalue()


@pytest.mark.parametrize("width", [80, 200])
def test_no_figure_is_cut_off_at_any_width(build: Builder, width: int) -> None:
    points = [
        point
        for size in (224, (512, 1024))
        for batch in (1, 128)
        for point in (
            build.point(
                0.0101 * batch,
                batch=batch,
                size=size,
                n=400,
                kinds=("device", "latency", "throughput"),
            ),
            build.training(0.05 * batch, batch=batch, size=size),
        )
    ]
    terminal = shown(build, *points, out=Terminal(), width=width)
    plain = shown(build, *points)
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for time in re.findall(r"[\d.]+ m?s ± [\d.]+ %", plain):
        assert time in text
    words = set(text.split())
    assert {
        word
        for line in plain.splitlines()
        for word in line.split()
        if "." in word and "/" not in word
    } <= words


def test_columns_that_do_not_fit_follow_in_a_second_table() -> None:
    grid = Grid(
        [
            Column("size", ["224", "256"], is_key=True),
            Column("time", ["1 ms", "2 ms"]),
            Column("memory", ["7 MiB", ""], rank=2),
            Column("rate", ["10", "20"], rank=1),
        ],
        ["a note"],
    )
    out = io.StringIO()
    console(out, width=20).show_grid("title", grid)
    assert out.getvalue().splitlines() == [
        "title",
        "  size  time  rate",
        "   224  1 ms    10",
        "   256  2 ms    20",
        "  size  memory",
        "   224   7 MiB",
        "  a note",
    ]


def test_a_latency_beside_the_device_time_has_its_interval(build: Builder) -> None:
    points = [
        build.point(0.01, n=400, kinds=("device", "latency", "throughput")),
        build.training(0.05, n=400),
    ]
    lines = shown(build, *points).splitlines()
    assert "latency p50 ± CI95" in lines[1]
    assert re.search(r" 10\.\d+ ms ± [\d.]+ % .* (19|20)\.?\d* ms ± [\d.]+ % ", lines[2])
    assert "p95 and p99 are those of latency" not in shown(build, points[0])


def test_a_metric_that_some_points_lack_says_at_how_many(build: Builder) -> None:
    values = (0.9, None)
    metrics = [
        Metric(name="accuracy", value=value, unit="1", reason=None if value else "no labels")
        for value in values
    ]
    points = [build.point(batch=batch, metrics=[metric]) for batch, metric in enumerate(metrics, 1)]
    assert "  no accuracy at 1 of 2 points: no labels\n" in shown(build, *points)
    assert "  no accuracy: no labels\n" in shown(build, points[1])


def test_metrics_of_an_estimated_time_are_estimated_too(build: Builder) -> None:
    metrics = [
        Metric(name="work/flops_per_second", value=3.574e9, unit="1/s"),
        Metric(name="mfu", value=0.62, unit="1"),
        Metric(name="work/flops", value=1.234e9, unit="1"),
    ]
    text = shown(build, build.point(n=5, metrics=metrics))
    assert "FLOP/s at latency p50: ≈ 3.57 GFLOP/s\n" in text
    assert "MFU at samples/s: ≈ 62 %\n" in text
    assert (
        "  ≈ FLOP/s at latency p50, MFU at samples/s: computed from a figure that has ≈ itself\n"
        in text
    )
    assert "estimated from what was measured" not in text
    assert "1.23 GFLOP\n" in text
    sure = shown(build, build.point(n=400, metrics=metrics))
    assert "FLOP/s at latency p50: 3.57 GFLOP/s\n  MFU at samples/s: 62 %\n" in sure
    assert "computed from a figure" not in sure


def test_a_rate_of_work_has_no_more_digits_than_its_time(build: Builder) -> None:
    metric = Metric(name="work/flops_per_second", value=357.4e9, unit="1/s")
    assert re.search(
        r" 3[56]0 GFLOP/s\n", shown(build, build.point(n=40, noise=0.2, metrics=[metric]))
    )
    few = build.point(n=4, noise=5e-3, metrics=[metric])
    assert re.search(r" ≈ 357 GFLOP/s\n", shown(build, few)), "it has no interval"


def test_an_estimated_basis_is_marked_in_the_table_of_points_too(build: Builder) -> None:
    metrics = [
        Metric(name="mfu", value=0.62, unit="1"),
        Metric(name="work/flops", value=1e9, unit="1"),
    ]
    [line] = flat.overall(Analysis.of(build.record(build.point(n=5, metrics=metrics))))
    assert line["estimated"] == "mfu"


@pytest.mark.parametrize(
    ("engine", "is_noted"), [("cudnn.winograd_nonfused", True), ("cudnn.gemm", False)]
)
def test_mfu_note_names_an_algorithm_with_fewer_multiplications(
    build: Builder, engine: str, is_noted: bool
) -> None:
    layers = [{"name": "conv", "passes": [{"which": "forward", "selected": engine, "seconds": {}}]}]
    facts = {"algorithm": {"name": "winograd_nonfused", "layers": layers}}
    mfu = Metric(name="mfu", value=0.97, unit="1")
    note = (
        "MFU counts the multiplications of direct convolution; cudnn.winograd_nonfused needs fewer"
    )
    assert (note in shown(build, build.point(facts=facts, metrics=[mfu]))) == is_noted
    assert note not in shown(build, build.point(facts=facts))


def test_lines_are_plain_without_terminal_color_or_if_quiet(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        shown(build, build.sizes().points[0]),
        shown(build, build.point(), out=Terminal(), quiet=True),
    ]
    monkeypatch.setenv("NO_COLOR", "1")
    texts.append(shown(build, build.point(), out=Terminal(), width=80))
    for text in texts:
        assert "\x1b" not in text
        assert not re.search("[─━│]", text)
        assert not any(line.endswith(" ") for line in text.splitlines())


def test_quiet_prints_results_warnings_failures_and_the_folder(build: Builder) -> None:
    out = io.StringIO()
    quiet = console(out, quiet=True)
    quiet.header(PLAN, {}, points="2", seconds=1)
    with quiet.progress() as progress:
        progress.started(1)
        progress.point("224")
        progress.done("ok", "1 ms")
    point = build.point(0.0624, doubts=[Diagnostic(code="busy_host", message="load")])
    quiet.show(Analysis.of(build.record(point, build.failed(size=512))), Path("out"))
    lines = out.getvalue().splitlines()
    assert re.fullmatch(r"224: latency 62\.\d+ ms ± 0\.\d %", lines[0])
    assert lines[1:] == [
        "warning: 224: load (busy_host)",
        "not measured",
        "  inference · 512 · batch 1 · fp32: oom: no memory left",
        "out/",
    ]


def test_run_without_a_terminal_prints_one_line_per_point() -> None:
    out = io.StringIO()
    with console(out).progress() as progress:
        progress.started(2)
        progress.point("inference 224")
        progress.block("latency")
        progress.done("ok", "62.4 ms ± 0.8 %")
        progress.point("inference 512")
        progress.done("oom", "")
    assert out.getvalue().splitlines() == [
        "[1/2] inference 224: 62.4 ms ± 0.8 %",
        "[2/2] inference 512: oom",
    ]


def test_waiting_without_a_terminal_is_reported_on_stderr() -> None:
    for is_quiet in (False, True):
        out, err = io.StringIO(), io.StringIO()
        with Console(quiet=is_quiet, out=out, err=err, width=80).progress() as progress:
            progress.started(1)
            progress.block("loading")
            progress.waiting("waiting: process 7 measures x\x1b[2J")
        told, silent = (err, out) if is_quiet else (out, err)
        assert told.getvalue().splitlines() == ["waiting: process 7 measures x [2J"]
        assert silent.getvalue() == ""


def test_the_bar_is_drawn_by_events_alone() -> None:
    out = Terminal()
    threads = threading.active_count()
    with console(out, width=80).progress() as progress:
        progress.started(2)
        progress.point("inference 224")
        assert threading.active_count() == threads
        drawn = len(out.getvalue())
        assert "inference 224" in out.getvalue()
        progress.block("latency")
        assert len(out.getvalue()) > drawn


def test_a_bar_leaves_room_for_the_echo_of_an_interrupt() -> None:
    out = Terminal()
    with console(out, width=80).progress() as progress:
        progress.started(2)
        progress.point("inference 224 batch 16 process 4: " + "long " * 30)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert 70 < max(map(len, re.split(r"[\r\n]", shown))) <= 78


def test_training_bar_shows_epochs_and_the_last_figures(tmp_path: Path) -> None:
    key = Key(phase="train", input_size=(32, 32), batch_size=8, precision="fp32")
    plan = SimpleNamespace(epochs=20, is_sparse=False, mode=SimpleNamespace(name="train"))
    assignment = SimpleNamespace(folder=tmp_path, plan=plan, whole=None, seconds=lambda *_: None)
    followed: list[Point] = []
    out = Terminal()
    with console(out, width=100).progress() as progress:
        progress.started(1)
        relay = ProgressRelay(
            progress,
            [key],
            [key],
            assignment,
            tmp_path / "points",
            lambda: None,
            lambda: None,
            followed.append,
        )  # type: ignore[arg-type]
        relay({"event": "point", "key": msgspec.to_builtins(key)})
        epochs = [
            Epoch(number=number, seconds=8.0, samples_per_second=12345.4, loss=2.5 / number)
            for number in (1, 2)
        ]
        epochs[1].accuracy, epochs[1].evaluation_seconds = 0.872, 4.0
        for epoch in epochs:
            training = msgspec.to_builtins(Point(key=key, status=Status.OK, epochs=[epoch]))
            relay({"event": "block", "text": "a line", "is_result": True, "training": training})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r" 0/20 ", shown)
    assert re.search(r" 1/20 +loss 2.5, 12,345 samples/s +about 2 min 32 s left", shown)
    assert re.search(
        r" 2/20 +loss 1.25, accuracy 87.20 %, 12,345 samples/s +about 3 min 00 s left", shown
    )
    assert [point.epochs for point in followed] == [[epoch] for epoch in epochs]


def test_what_is_left_of_a_run_is_counted_down() -> None:
    now = [0.0]
    progress = console(io.StringIO()).progress(clock=lambda: now[0])
    progress.started(1)
    assert progress.left_text == ""
    progress.remaining(50.0)
    now[0] = 10.0
    assert progress.left_text == "about 40 s left"
    now[0] = 60.0
    assert progress.left_text == ""


def test_time_left_of_a_sweep_comes_from_measured_runs() -> None:
    now, out = [0.0], io.StringIO()
    whole = Whole(110, clock=lambda: now[0])
    whole.begin(1, "a")
    assert whole.left_text == ""
    whole.estimated_seconds = 30.0
    assert whole.left_text == "about 55 min 00 s left"
    whole.measure()
    now[0] = 10.0
    whole.begin(2, "b")  # everything of it is there
    now[0] = 11.0
    whole.begin(3, "c")
    now[0] = 15.0
    console(out).progress(whole=whole).begun()
    assert out.getvalue() == "run 3 of 110: c, about 17 min 56 s left\n"
    now[0] = 30.0  # it takes longer than the others
    assert whole.left_text == "about 17 min 50 s left"
    whole.begin(3, "c")
    console(out).progress(whole=whole).begun()
    assert out.getvalue().count("\n") == 1, "another process of a run that was named"
    whole.measure()
    now[0] = 40.0
    whole.begin(3, "c")
    now[0] = 50.0
    whole.begin(4, "d")
    assert whole.seconds == [10.0, 39.0]  # with all processes of c


def test_a_bar_shows_the_sweep_above_the_run() -> None:
    out, whole = Terminal(), Whole(110)
    whole.begin(3, "batch_size=4")
    with console(out, width=100).progress(whole=whole) as progress:
        progress.started(1)
        progress.remaining(22.0)
        progress.point("inference 224")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"2/110 +run 3 of 110: batch_size=4", shown)
    assert re.search(r"0/1 +inference 224 .*about 2\d s left", shown)


def test_sweep_table_has_a_line_per_run_and_failure_reasons(build: Builder) -> None:
    axes = [{"algorithm": name} for name in ("gemm", "fft", "direct")]
    sweep, records = build.sweep(axes, [[build.point()], [build.failed()], None])
    out = io.StringIO()
    console(out).show_sweep(SweepAnalysis.of(sweep, records), Path("out"))
    lines = out.getvalue().splitlines()
    assert lines[0] == "sweep over resnet50 sweep: 3 of 3 runs ended, 1 oom, 1 failed"
    assert re.search(r"0 +gemm +62\.\d+ ms ± 0\.\d %", lines[3])
    assert "  run 1 resnet50-1: inference · 224 · batch 1 · fp32: oom: no memory left" in lines
    assert "  run 2 resnet50-2: failed: the worker died" in lines


def test_error_markup_is_literal_and_control_codes_are_removed() -> None:
    out, err = io.StringIO(), io.StringIO()
    Console(out=out, err=err).error("[bold]model=x\x1b[2J[/bold] is unknown.\nDid you mean y?")
    assert out.getvalue() == ""
    assert err.getvalue() == "error: [bold]model=x [2J[/bold] is unknown.\nDid you mean y?\n"


def test_character_the_stream_cannot_encode_is_a_question_mark(build: Builder) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(out=stream, err=io.StringIO()).show(
        Analysis.of(build.record(build.point())), Path("out")
    )
    stream.flush()
    assert b"ms ? 0." in raw.getvalue()


def test_a_sweep_of_sizes_says_how_the_time_grows(build: Builder) -> None:
    lines = shown(build, *build.sizes().points).splitlines()
    where = lines.index("scaling with the input size")
    assert re.fullmatch(
        r"  latency ≈ (\S+ .s \+ )?52\.\d ms · \(pixels / 512²\)\^(0.99|1.00) ± 0.0\d "
        r"\(224 to 512 only, 10 sizes, scatter 0.\d %\)",
        lines[where + 1],
    )


def test_each_batch_size_has_a_line_and_flat_ones_no_exponent(build: Builder) -> None:
    points = [
        build.point(0.01 if batch == 1 else 1e-7 * size**2, size=size, batch=batch)
        for batch in (1, 4)
        for size in range(224, 513, 32)
    ]
    text = shown(build, *points)
    assert re.search(
        r"  batch 1: latency ≈ (9.9\d|10.0) ms, does not grow with the size \(224 to 512 only", text
    )
    assert re.search(r"  batch 4: latency ≈ .*\(pixels / 512²\)\^", text)


def test_uncertain_scaling_exponent_is_given_as_a_range(build: Builder) -> None:
    times = (0.01, 0.0135, 0.0165, 0.021, 0.024)
    points = [
        build.point(seconds, size=size)
        for size, seconds in zip(range(224, 353, 32), times, strict=True)
    ]
    text = shown(build, *points)
    assert re.search(
        r"\(pixels / 352²\)\^\d\.\d \(\d\.\d … \d\.\d\) \(224 to 352 only, 5 sizes", text
    )


def test_few_sizes_or_estimates_do_not_show_how_the_time_grows(build: Builder) -> None:
    def grown(sizes: int, n: int) -> str:
        points = [
            build.point(1e-7 * size**2, size=size, n=n) for size in range(224, 224 + 32 * sizes, 32)
        ]
        for point in points if n < 20 else ():
            point.series[0].stop = Stop(reason="max_seconds", target=0.001, achieved=0.002)
        record = build.record(*points)
        plot = record_plots.plot(Analysis.of(record))
        assert isinstance(plot, Chart)
        [line] = scaling_lines(Analysis.of(record))
        assert bool(plot.panels[0].curves) is ("≈" in line)
        return line

    undetermined = "latency: growth with the size not determined: "
    assert grown(4, 80) == undetermined + "4 sizes are too few (5 at least)"
    assert grown(6, 4) == undetermined + "6 of 6 medians have no interval"
    assert grown(6, 80).startswith("latency ≈ ")


@pytest.mark.parametrize(("power", "words"), [(2, "faster"), (0.6, "more slowly")])
def test_a_growth_that_is_not_that_of_the_pixels_is_named(
    build: Builder, power: float, words: str
) -> None:
    points = [
        build.point(0.01 * (size / 224) ** (2 * power), size=size) for size in range(224, 513, 32)
    ]
    assert f", growing {words} than the pixels" in shown(build, *points)


def test_times_over_processes_show_interval_spread_and_count(build: Builder) -> None:
    points = [
        build.point(seconds, size=size, replicate=replicate)
        for size in (224, 256)
        for replicate, seconds in enumerate((0.0600, 0.0612, 0.0624))
    ]
    lines = shown(build, *points).splitlines()
    head, cells = (re.split(r"  +", line.strip()) for line in lines[1:3])
    assert head[-2:] == ["spread", "processes"]
    assert cells[-2:] == ["2.0 %", "3"]
    assert "  ± 95 % interval of the mean over processes, from 3 processes" in lines


def test_a_cold_start_beside_several_sizes_names_its_own(build: Builder) -> None:
    first = build.first_prediction()
    [alone, several] = [
        shown(build, *points, first)
        for points in ([build.point()], [build.point(), build.point(size=512)])
    ]
    assert "cold start\n  3.30 s" in alone
    assert "cold start\n  cold start · 224 · batch 1 · fp32: 3.30 s" in several


def test_the_hosts_time_to_launch_is_the_median_of_the_processes(build: Builder) -> None:
    points = [
        build.point(
            replicate=number,
            metrics=[Metric(name="loop/host_seconds", value=value, unit="seconds")],
        )
        for number, value in enumerate((7.4e-3, 2.6e-3, 2.8e-3))
    ]
    [row] = rows(build.record(*points))
    assert [one.value for one in row.metrics if one.name == "loop/host_seconds"] == [2.8e-3]


def test_one_measurement_prints_at_most_eight_lines(
    build: Builder,
) -> None:
    doubts = [idle(0.2), make("throttled", share=0.1, series="device", reasons="power")]
    points = [
        build.point(n=400, kinds=("device", "latency"), replicate=number, doubts=doubts)
        for number in range(3)
    ]
    lines = shown(build, *points, verbose=False).splitlines()
    assert len(lines) == 8
    assert (
        lines[0]
        == "resnet50 · inference · 224 · batch 1 · fp32 · threads=2 · Example CPU @ 2.00GHz"
    )
    assert re.fullmatch(r"  GPU time    6\d\.?\d* ms ± [\d.]+ %", lines[1])
    assert re.fullmatch(
        r"  latency     12\d\.?\d* ms ± [\d.]+ %   p95 \S.* ms.*   p99 \S.* ms.*", lines[2]
    )
    assert re.fullmatch(r"  throughput  8\.\d+ samples/s ± [\d.]+ %   memory 513 MiB", lines[3])
    assert lines[4:] == [
        "  ± 95 % interval over 3 processes (perfexp help ±)",
        "warning: the driver throttled the device for 10% of the time of `device`: power (throttled)",
        "  help: let the device cool, or read the figure as one under this limit; perfexp changes no limits",
        "out/  perfexp show -v out (1 more warning)",
    ]


def test_warning_that_voids_most_comes_first(
    build: Builder,
) -> None:
    doubts = [
        make(
            "not_faster",
            algorithm="fastest",
            ratio=1.01,
            baseline="default",
            low=0.9,
            high=1.1,
            how="together",
        ),
        idle(0.2),
        make("drift", relative=0.1, changes="the median moved"),
        make("algorithm_substituted", algorithm="gemm", layers="conv1"),
        make("shared_device", evidence="other processes on the device: 1"),
    ]
    [alone, several] = [
        shown(build, *[build.point(size=size, doubts=doubts) for size in sizes], verbose=False)
        for sizes in ((224,), (224, 256))
    ]
    order = ["algorithm_substituted", "shared_device", "drift", "device_idle", "not_faster"]
    assert re.findall(r"\((\w+)\)$", alone, re.MULTILINE) == order[:2], (
        "all errors, and one warning"
    )
    assert ", ".join(order) in several


def test_interval_note_mentions_runs_only_if_they_differ(build: Builder) -> None:
    points = [build.point(n=400, replicate=number) for number in range(3)]
    for point in points:
        point.facts["process_start"] = "forked"
    for server, said in ((0.0, ""), (1.0, " and runs")):
        record, out = build.record(*points), io.StringIO()
        record.priors = {HOST_BOUND: Prior(variance=1e-4, degrees=4, server=server)}
        console(out).results(Analysis.of(record))
        assert f"± 95 % interval over 3 processes{said} (perfexp help ±)" in out.getvalue()


def test_the_answer_has_what_was_asked_for_besides_the_times(build: Builder) -> None:
    energy = Metric(name="energy/per_call_joules", value=0.88, unit="joules", low=0.87, high=0.89)
    epochs = [
        Epoch(number=number, seconds=8.0, samples_per_second=100.0, loss=1.0 / number)
        for number in (1, 2)
    ]
    text = shown(
        build, build.point(metrics=[energy], epochs=epochs), build.first_prediction(), verbose=False
    )
    assert "\n  energy      0.880 J ± 1.1 % per call\n" in text
    assert "\n  epoch 2: loss 0.5, 100 samples/s\n" in text
    assert "\n  cold start  3.30 s\n" in text


def test_several_points_are_a_row_each_with_the_best_batch_below(build: Builder) -> None:
    lines = shown(build, *build.batches().points, verbose=False).splitlines()
    assert len(lines) == 1 + 1 + 8 + 3
    assert lines[1].split() == ["batch", "latency", "samples/s", "memory"]
    assert re.fullmatch(
        r"  best: batch 128, 24\d\.?\d* samples/s; batch 32 reaches 95 % of it", lines[-3]
    )
    sizes = shown(build, *build.sizes().points, verbose=False)
    assert "best" not in sizes, "another size is other work"


def test_batches_that_may_be_equally_fast_are_named_together(build: Builder) -> None:
    points = [
        build.point(seconds, batch=batch) for seconds, batch in ((0.02, 1), (0.02, 2), (0.04, 4))
    ]
    assert re.search(
        r"best: batch (2 or batch 4|4 or batch 2), \d", shown(build, *points, verbose=False)
    )
    undecided = [build.point(0.01 * batch, batch=batch, n=4) for batch in (1, 2)]
    assert "best: undecided" in shown(build, *undecided, verbose=False)


def test_errors_precede_warnings_and_notes_are_on_request(build: Builder) -> None:
    codes = ("busy_host", "too_few_samples", "meter_fault", "throttled")
    point = build.point(
        doubts=[Diagnostic(code=code, message=f"about {code}", help="try") for code in codes]
    )
    text = shown(build, point, verbose=False)
    assert [line for line in text.splitlines() if "about" in line] == [
        "error: about meter_fault (meter_fault)",
        "warning: about busy_host (busy_host)",
    ]
    assert "note: 224 · batch 1: about too_few_samples" in shown(build, point)
    assert shown(build, point, quiet=True).count("about") == 3


def test_the_folder_and_the_link_to_the_tracker_end_it(build: Builder, tmp_path: Path) -> None:
    out = io.StringIO()
    console(out).show(Analysis.of(build.record(build.point())), tmp_path, tracking="perfexp ui")
    assert out.getvalue().splitlines()[-2:] == [
        f"{tmp_path}/  perfexp show -v {tmp_path}",
        "perfexp ui",
    ]
