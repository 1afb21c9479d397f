"""What a supervisor knows of its results, and how a record combines them."""

import copy
from types import SimpleNamespace

import pytest

from perfexp.records import diagnostics
from perfexp.records.record import Key, Metric, Point, Status, point_to_line
from perfexp.run import supervisor
from perfexp.run.job import _merged
from perfexp.run.supervisor import Supervisor
from perfexp.run.worker_query import Heard


def point(phase, **fields):
    key = Key(phase=phase, input_size=(224, 224), batch_size=1, precision="fp32")
    return Point(key=key, status=Status.OK, **fields)


@pytest.fixture
def reads(monkeypatch):
    reads, usual = [], supervisor.read_points
    monkeypatch.setattr(
        supervisor, "read_points", lambda path: (reads.append(path), usual(path))[1]
    )
    return reads


def test_results_are_read_again_only_after_a_change(tmp_path, reads):
    job = Supervisor(SimpleNamespace(folder=tmp_path))
    assert job.measured() == []
    first, second = point("inference"), point("train")
    file = job.paths.points
    file.parent.mkdir()
    file.write_bytes(point_to_line(first))
    reads.clear()
    assert [job.measured() for _ in range(3)] == [[first]] * 3
    assert len(reads) == 1
    with file.open("ab") as lines:  # as another process appends
        lines.write(point_to_line(second))
    assert job.measured() == [first, second]
    replaced = file.with_name("replaced")  # atomically, by as many bytes
    replaced.write_bytes(point_to_line(second) + point_to_line(first))
    replaced.replace(file)
    assert job.measured() == [second, first]
    assert len(reads) == 3


def test_a_call_has_the_figures_of_its_layers_in_the_record_only():
    shared = diagnostics.make("busy_host", load=1.0, cores=2)
    call = point("inference", metrics=[Metric.of("memory/peak_bytes", 5.0)], doubts=[shared])
    layers = point(
        "inference_layers",
        metrics=[Metric.of("layers/closure", 0.01), Metric.of("memory/peak_bytes", 6.0)],
        doubts=[shared, diagnostics.make("layers_inexact", what="", advice="", share=0.1)],
    )
    given = [call, layers]
    before = copy.deepcopy(given)
    merged, unchanged = _merged(given)
    assert given == before
    assert unchanged is layers
    assert [(metric.name, metric.value) for metric in merged.metrics] == [
        ("memory/peak_bytes", 5.0),
        ("layers/closure", 0.01),
    ]
    assert [doubt.code for doubt in merged.doubts] == ["busy_host", "layers_inexact"]
    assert _merged([merged, layers]) == [merged, layers], "points of a record"


@pytest.mark.parametrize(
    ("what", "order"), [("timed", ["start", "preload", "listen"]), ("ttfp", ["start", "listen"])]
)
def test_scipy_is_imported_while_a_worker_starts(tmp_path, monkeypatch, what, order):
    """Not while it measures, as the first result would: that uses all cores for a moment."""
    steps = []
    heard = Heard(code=0, last={})
    monkeypatch.setattr(supervisor, "WorkerProcess", lambda *_, **__: steps.append("start"))
    monkeypatch.setattr(supervisor.distributions, "preload", lambda: steps.append("preload"))
    monkeypatch.setattr(supervisor, "listen", lambda *_: (steps.append("listen"), heard)[1])
    job = Supervisor(SimpleNamespace(folder=tmp_path))
    job.paths.points.parent.mkdir()
    job.plan = SimpleNamespace(timeout_seconds=1.0)
    job.plain, job.plan_sha256 = {"process_start": "spawned"}, ""
    supervisor._one_worker(job, [f"--what={what}"])
    assert steps == order
