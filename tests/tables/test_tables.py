from __future__ import annotations

import csv
import io
import statistics

import pytest

from perfexp.records.record import Metric, Status
from perfexp.summaries.analysis import Analysis, SweepAnalysis
from perfexp.tables import csv_tables, flat
from tests.support.builders import Builder


def read(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))


def test_columns_of_the_seed_come_first_and_in_their_order(build: Builder) -> None:
    for lines in (
        flat.overall(Analysis.of(build.record(build.point()))),
        flat.overall(Analysis.of(build.record(build.training()))),
    ):
        assert tuple(lines[0])[:9] == flat.FIRST_COLUMNS


def test_a_record_without_points_has_a_header_only(build: Builder) -> None:
    assert (
        csv_tables.to_csv(flat.overall(Analysis.of(build.record())))
        == (",".join(flat.FIRST_COLUMNS) + "\r\n").encode()
    )


def test_times_are_milliseconds_of_the_measured_samples(build: Builder) -> None:
    point = build.point(0.05)
    measured = [sample * 1e3 for sample in point.series[0].samples[10:]]
    (line,) = read(csv_tables.to_csv(flat.overall(Analysis.of(build.record(point)))))
    assert float(line["mean"]) == pytest.approx(statistics.fmean(measured), rel=1e-12)
    assert float(line["min"]) == min(measured)
    assert float(line["max"]) == max(measured)
    assert float(line["std"]) == pytest.approx(statistics.stdev(measured), rel=1e-12)
    assert (line["n"], line["warmup_calls"], line["time_kind"]) == ("80", "10", "latency")


def test_percentiles_come_from_latency_even_with_device_time(
    build: Builder,
) -> None:
    point = build.point(0.01, n=400, noise=0.001, kinds=("device", "latency"))
    (line,) = flat.overall(Analysis.of(build.record(point)))
    assert (line["time_kind"], line["percentile_kind"]) == ("device", "latency")
    assert isinstance(line["median_ms"], float)
    assert abs(line["median_ms"] - 10) < 0.1
    assert isinstance(line["p50_ms"], float)
    assert abs(line["p50_ms"] - 20) < 0.2


def test_a_percentile_without_an_interval_says_so_by_empty_ends(build: Builder) -> None:
    (line,) = read(csv_tables.to_csv(flat.overall(Analysis.of(build.record(build.point(n=40))))))
    assert line["p50_ms"]
    assert float(line["p99_ms"]) == pytest.approx(62.4 * 1.02, rel=0.02)
    assert [line[f"p99{end}_ms"] for end in ("_low", "_high")] == ["", ""]


def test_a_failed_point_has_its_line_with_empty_figures(build: Builder) -> None:
    lines = read(
        csv_tables.to_csv(
            flat.overall(Analysis.of(build.record(build.point(), build.failed(size=512))))
        )
    )
    assert (lines[1]["input_size"], lines[1]["status"], lines[1]["error"]) == (
        "512",
        "oom",
        "no memory left",
    )
    assert lines[1]["mean"] == lines[1]["median_ms"] == lines[1]["samples_per_second"] == ""


def test_sizes_are_written_as_people_give_them(build: Builder) -> None:
    record = build.record(build.point(size=224), build.point(size=(512, 1024)))
    assert [line["input_size"] for line in flat.overall(Analysis.of(record))] == [224, "512x1024"]


def test_energy_memory_phases_and_estimates_have_their_columns(build: Builder) -> None:
    point = build.training(batch=8)
    point.metrics += [
        Metric(name="energy/power_mean_watts", value=250.5, unit="watts"),
        Metric(name="energy/per_call_joules", value=1.25, unit="joules"),
    ]
    (line,) = flat.overall(Analysis.of(build.record(point)))
    assert (line["power_mean_w"], line["energy_per_inference_j"], line["peak_memory_mib"]) == (
        250.5,
        1.25,
        520.0,
    )
    assert (line["epoch_seconds"], line["estimated"], line["data_share"]) == (
        12.5,
        "epoch_seconds",
        0.1,
    )
    assert line["accuracy"] is None
    assert "phase_backward_ms" in line


def test_metric_interval_has_columns_at_every_point(build: Builder) -> None:
    points = [build.training(batch=8), build.training(batch=16)]
    points[0].metrics.append(
        Metric(name="energy/per_call_joules", value=1.25, unit="joules", low=1.2, high=1.3)
    )
    ends = ["energy_per_inference_j_low", "energy_per_inference_j_high"]
    lines = flat.overall(Analysis.of(build.record(*points)))
    assert [[line[name] for name in ends] for line in lines] == [[1.2, 1.3], [None, None]]


def test_figures_keep_their_full_precision() -> None:
    assert read(csv_tables.to_csv([{"x": 0.1 + 0.2, "y": 10**20}])) == [
        {"x": "0.30000000000000004", "y": str(10**20)}
    ]


def test_csv_formulas_are_defused_negative_numbers_are_not() -> None:
    texts = [
        "=HYPERLINK(1)",
        "+1+1",
        "-cmd",
        "@SUM(1)",
        "\t=1",
        "-0.5",
        "plain",
        'a "b", c\nd\x1b[31m',
    ]
    content = csv_tables.to_csv([{"error": text} for text in texts])
    assert [line["error"] for line in read(content)] == [
        "'=HYPERLINK(1)", "'+1+1", "'-cmd", "'@SUM(1)", "'=1", "-0.5", "plain", 'a "b", c d [31m'
    ]  # fmt: skip
    assert b'"a ""b"", c d [31m"\r\n' in content


def test_an_infinite_figure_and_a_missing_one_are_empty() -> None:
    assert csv_tables.to_csv([{"a": float("inf"), "b": None, "c": True}]) == b"a,b,c\r\n,,true\r\n"


def test_a_sweep_has_its_axes_first_and_a_line_for_each_run(build: Builder) -> None:
    axes = [{"algorithm": name, "batch_size": "4"} for name in ("gemm", "fft", "direct")]
    sweep, records = build.sweep(
        axes, [[build.point(batch=4), build.point(size=256, batch=4)], [build.failed()], None]
    )
    lines = read(csv_tables.to_csv(flat.sweep(SweepAnalysis.of(sweep, records[::-1]))))
    assert list(lines[0])[:4] == ["algorithm", "batch_size", "job", "run"]
    assert [(line["algorithm"], line["status"]) for line in lines] == [
        ("gemm", Status.OK), ("gemm", Status.OK), ("fft", Status.OOM), ("direct", Status.FAILED)
    ]  # fmt: skip
    assert lines[3]["error"] == "the worker died"


def test_line_counts_the_processes_that_measured_its_point(build: Builder) -> None:
    points = [
        build.point(0.060 * (1 + 0.02 * replicate), replicate=replicate) for replicate in range(3)
    ]
    points += [build.failed(replicate=3), build.point(size=512)]
    three, alone = flat.overall(Analysis.of(build.record(*points)))
    assert (three["processes"], alone["processes"]) == (3, 1)
    medians = [
        flat.overall(Analysis.of(build.record(point)))[0]["median_ms"] for point in points[:3]
    ]
    assert three["median_ms"] == pytest.approx(statistics.geometric_mean(medians))  # type: ignore[type-var]


def test_a_doubt_about_growth_is_in_its_line(build: Builder) -> None:
    points = [build.point(0.02), build.point(0.01, size=512)]
    assert [line["doubts"] for line in flat.overall(Analysis.of(build.record(*points)))] == [
        "scaling_unexpected",
        "",
    ]
