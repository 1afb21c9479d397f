"""What is said of a sweep's runs."""

from builders import Builder

from perfexp.record import Status
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
