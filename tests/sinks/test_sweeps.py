"""What is said of a sweep's runs."""

import io
from pathlib import Path

import pytest
from builders import Builder

from perfexp.records.record import Metric, Point, Status
from perfexp.reports.console import Console
from perfexp.summaries import sweep_summary


def test_an_interrupted_run_has_neither_ended_nor_failed(build: Builder) -> None:
    axes = [{"batch_size": str(size)} for size in (1, 2, 4)]
    points = [build.point()], [build.failed()], [build.failed(Status.INTERRUPTED)]
    sweep, _ = build.sweep(axes, list(points))
    sweep.jobs = 4
    assert sweep_summary.headline(sweep) == "sweep over resnet50 sweep: 2 of 4 runs ended, 1 oom, 1 interrupted"
    sweep.children.pop()
    sweep.jobs = None
    assert sweep_summary.headline(sweep) == "sweep over resnet50 sweep: 2 runs ended, 1 oom"


def test_the_share_that_ran_as_asked_stands_beside_the_times(build: Builder) -> None:
    """Of a run by torch's own choice nothing was asked; a phase is a line of its own, and says what is proven."""

    def point(phase: str, share: float | None) -> Point:
        found = build.point(phase=phase)
        shares = {} if share is None else {"flops": share, "proven": proven[phase] * share}
        found.metrics += [
            Metric(name=f"algorithm/{name}_share", value=value, unit="1") for name, value in shares.items()
        ]
        return found

    proven = {"train": 0.0, "inference": 1.0}
    axes = [{"algorithm": name} for name in ("default", "gemm", "fft")]
    shares = (None, None), (1.0, 1.0), (0.19, 0.106)
    runs = [[point("train", one), point("inference", other)] for one, other in shares]
    grid = sweep_summary.runs(*build.sweep(axes, runs))
    cells = {column.title: column.cells for column in grid.columns}
    texts = ((100, "not verified"), (100, "proven"), (19, "not verified"), (11, "proven"))
    assert cells["algorithm coverage"] == ("", "", *(f"{share} %, {about}" for share, about in texts))
    assert cells["phase"] == ("train", "inference") * 3
    assert cells["algorithm"] == ("default", "default", "gemm", "gemm", "fft", "fft")
    assert all(cells["samples/s"]), "of one point each"
    nothing_asked = sweep_summary.runs(*build.sweep(axes[:1], runs[:1]))
    assert "algorithm coverage" not in [column.title for column in nothing_asked.columns]


def test_processes_that_measured_one_point_say_its_time_together(build: Builder) -> None:
    axes = [{"model": "alexnet"}, {"model": "resnet18"}]
    processes = [build.point(seconds, replicate=index, noise=0) for index, seconds in enumerate((0.01, 0.0101, 0.0102))]
    sizes = [build.point(0.02, noise=0), build.point(0.021, size=96, noise=0)]
    grid = sweep_summary.runs(*build.sweep(axes, [processes, sizes]))
    cells = {column.title: column.cells for column in grid.columns}
    assert cells["latency p50 ± CI95"] == ("10.1 ms ± 2.5 %", "20.00 ms … 21.00 ms")


def test_runs_are_counted_by_the_status_that_they_have(build: Builder) -> None:
    axes = [{"algorithm": name} for name in ("gemm", "fft", "winograd")]
    points = [[build.point()], [build.failed(Status.UNSUPPORTED)], [build.failed(Status.UNSUPPORTED)]]
    sweep, _ = build.sweep(axes, [*points])
    assert sweep_summary.headline(sweep) == "sweep over resnet50 sweep: 3 of 3 runs ended, 2 unsupported"


def test_what_all_runs_share_is_said_once(build: Builder) -> None:
    axes = [{"batch_size": "1"}, {"batch_size": "8"}]
    sweep, records = build.sweep(axes, [[build.point(batch=1)], [build.point(batch=8)]])
    assert sweep_summary.setting(records) == "inference · 224 · fp32 on Example CPU @ 2.00GHz"
    out = io.StringIO()
    Console(out=out, width=100).show_sweep(sweep, Path("somewhere"), records)
    assert "  inference · 224 · fp32 on Example CPU @ 2.00GHz" in out.getvalue().splitlines()
    records[1].environment = {"device": {"name": "NVIDIA X"}}
    assert sweep_summary.setting(records) == "inference · 224 · fp32"
    assert sweep_summary.setting([]) == ""


@pytest.mark.parametrize(("slow_seconds", "raised"), [(0.15, True), (0.0601, False), (0.03, False)])
def test_two_devices_that_are_slower_than_one_are_a_warning(build: Builder, slow_seconds: float, raised: bool) -> None:
    axes = [{"gpu.count": count, "model": model} for model in ("a", "b") for count in ("1", "2")]
    seconds = (0.06, slow_seconds, 0.06, 0.06)
    sweep, records = build.sweep(axes, [[build.point(each, facts={})] for each in seconds])
    found = sweep_summary.diagnostics_of(sweep, records)
    assert list(found) == ([1] if raised else [])
    if raised:
        assert found[1].message == "2 devices together reach 0.40 of the samples/s of 1"
        assert sweep_summary.diagnostic_lines(sweep, records)[0].startswith("warning: run 1 resnet50-1: 2 devices")
        cells = {column.title: column.cells for column in sweep_summary.runs(sweep, records).columns}
        assert cells["remarks"][1] == "multi_gpu_slower"


def test_many_devices_are_compared_with_the_best_of_fewer_and_the_worst_point_is_named(build: Builder) -> None:
    axes = [{"gpu.count": count} for count in ("1", "2", "4")]
    points = [
        [build.point(seconds, size=size) for size, seconds in zip((224, 256), times, strict=True)]
        for times in ((0.06, 0.06), (0.03, 0.03), (0.05, 0.1))
    ]
    found = sweep_summary.diagnostics_of(*build.sweep(axes, points))
    assert {job: doubt.message for job, doubt in found.items()} == {
        2: "4 devices together reach 0.30 of the samples/s of 2"
    }
