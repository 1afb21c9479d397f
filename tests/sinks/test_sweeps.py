"""What is said of a sweep's runs."""

from builders import Builder

from perfexp.record import Metric, Point, Status
from perfexp.sinks import sweeps


def test_an_interrupted_run_has_neither_ended_nor_failed(build: Builder) -> None:
    axes = [{"batch_size": str(size)} for size in (1, 2, 4)]
    points = [build.point()], [build.failed()], [build.failed(Status.INTERRUPTED)]
    sweep, _ = build.sweep(axes, list(points))
    sweep.jobs = 4
    assert sweeps.headline(sweep) == "sweep over resnet50 sweep: 2 of 4 runs ended, 1 failed, 1 interrupted"
    sweep.children.pop()
    sweep.jobs = None
    assert sweeps.headline(sweep) == "sweep over resnet50 sweep: 2 runs ended, 1 failed"


def test_the_share_that_ran_as_asked_stands_beside_the_times(build: Builder) -> None:
    """Of a run by torch's own choice nothing was asked; a phase is a line of its own."""

    def point(phase: str, share: float | None) -> Point:
        found = build.point(phase=phase)
        found.metrics += [] if share is None else [Metric(name="algorithm/flops_share", value=share, unit="1")]
        return found

    axes = [{"algorithm": name} for name in ("default", "gemm", "fft")]
    shares = (None, None), (1.0, 1.0), (0.19, 0.106)
    runs = [[point("train", one), point("inference", other)] for one, other in shares]
    grid = sweeps.runs(*build.sweep(axes, runs))
    cells = {column.title: column.cells for column in grid.columns}
    assert cells["ran as asked"] == ("", "", "100 %", "100 %", "19 %", "11 %")
    assert cells["phase"] == ("train", "inference") * 3
    assert cells["algorithm"] == ("default", "default", "gemm", "gemm", "fft", "fft")
    assert all(cells["samples/s"]), "of one point each"
    nothing_asked = sweeps.runs(*build.sweep(axes[:1], runs[:1]))
    assert "ran as asked" not in [column.title for column in nothing_asked.columns]


def test_processes_that_measured_one_point_say_its_time_together(build: Builder) -> None:
    axes = [{"model": "alexnet"}, {"model": "resnet18"}]
    processes = [build.point(seconds, replicate=index, noise=0) for index, seconds in enumerate((0.01, 0.0101, 0.0102))]
    sizes = [build.point(0.02, noise=0), build.point(0.021, size=96, noise=0)]
    grid = sweeps.runs(*build.sweep(axes, [processes, sizes]))
    cells = {column.title: column.cells for column in grid.columns}
    assert cells["latency p50 ± CI95"] == ("10.1 ms (9.854 … 10.35 ms, 3 processes)", "20.00 ms … 21.00 ms")
