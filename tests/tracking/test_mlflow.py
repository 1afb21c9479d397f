"""What arrives in a real store of MLflow."""

import logging
import math
import multiprocessing
import os
import re
import socket
from pathlib import Path

import msgspec
import pytest

from perfexp.errors import PerfexpError, UserError
from perfexp.records.record import Artifact, Epoch, Metric, Status, SweepMembership
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.summaries.analysis import Analysis, SweepAnalysis
from perfexp.tracking import mlflow_sink, payload, send
from perfexp.tracking.mlflow_sink import MlflowSink
from perfexp.tracking.store import TrackingFailed
from perfexp.tracking.views import VIEWS
from tests.conftest import PHASES, TTFP


@pytest.fixture
def experiment(request):
    return request.node.name


@pytest.fixture
def sink(store, experiment):
    return MlflowSink(uri=store, experiment=experiment)


@pytest.fixture
def in_process(monkeypatch):
    """Payloads are sent by the process of the test, which can get in between."""
    monkeypatch.setattr(mlflow_sink, "deliver", send.send)


@pytest.fixture
def runs(store, experiment):
    """A function that reads back the runs of the test's experiment, as they are in the store."""

    def read():
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=store)
        return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))

    return read


def of_kind(kind, runs):
    return [run for run in runs if run.data.tags["perfexp.kind"] == kind]


@pytest.fixture
def history(store):
    def read(run, name):
        from mlflow import MlflowClient

        found = MlflowClient(tracking_uri=store).get_metric_history(run.info.run_id, name)
        return [
            (metric.step, metric.value) for metric in sorted(found, key=lambda metric: metric.step)
        ]

    return read


@pytest.fixture
def listed(store, experiment):
    """A function that returns the uids of the runs in a view of the test's experiment, in the view's order."""

    def read(view, question="attributes.status LIKE '%'"):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=store)
        place = [client.get_experiment_by_name(experiment).experiment_id]
        query, order = f"{view.state['searchFilter']} and {question}", [view.state["orderByKey"]]
        return [
            run.data.tags["perfexp.uid"] for run in client.search_runs(place, query, order_by=order)
        ]

    return read


@pytest.fixture
def files(store):
    def read(run, folder=None):
        from mlflow import MlflowClient

        return [
            file.path
            for file in MlflowClient(tracking_uri=store).list_artifacts(run.info.run_id, folder)
        ]

    return read


def test_a_run_has_the_records_times_status_and_name(sink, runs, make_record, leave_run, tmp_path):
    record = make_record()
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    (run,) = runs()
    assert run.info.run_name == "resnet50 fp32 224 b1 inf"
    assert run.info.status == "FINISHED"
    assert run.info.start_time == 1772359200000  # 2026-03-01T10:00:00Z
    assert run.info.end_time - run.info.start_time == 330_000


def test_tags_and_params_are_those_that_queries_use(sink, runs, make_record, leave_run, tmp_path):
    record = make_record(
        batches=(1, 8),
        command=[
            "model=resnet50",
            "stopping.max_seconds=5",
            "+stopping.x=1",
            "quiet=true",
            "--config-dir=mine",
        ],
        plan={"stopping": {"max_seconds": 5.0}, "choices": {"stopping": "fine"}},
    )
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    run = next(run for run in runs() if run.data.tags["perfexp.kind"] == "run")
    expected = {
        "perfexp.kind": "run",
        "perfexp.uid": record.uid,
        "perfexp.point": record.plan_hash,
        "perfexp.points": "2 ok",
        "gpu": "NVIDIA H200",
        "driver": "580.65",
        "cuda": "13.0",
        "cudnn": "9.19",
        "torch": "2.11.0",
        "host": "node7",
        "mlflow.source.git.commit": "0123abcd",
    }
    assert expected.items() <= run.data.tags.items()
    assert "busy_host" in run.data.tags["perfexp.doubts"]
    assert run.data.params == {
        "model": "resnet50",
        "algorithm": "default",
        "mode": "inference",
        "precision": "fp32",
        "execution": "eager",
        "phase": "inference",
        "batch_size": "1, 8",
        "input_size": "224",
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "cudnn": "9.19",
        "stopping": "fine",
        "stopping.max_seconds": "5.0",
        "stopping.x": "1",
    }


def test_points_of_a_size_sweep_use_their_width_as_step(
    sink, runs, history, make_record, leave_run, tmp_path
):
    record = make_record(sizes=(224, 256, 288), failing={256: Status.OOM})
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    (run,) = of_kind("run", runs())
    assert history(run, "point/input_height") == [(224, 224), (256, 256), (288, 288)]
    assert history(run, "point/ok") == [(224, 1), (256, 0), (288, 1)]
    assert [step for step, _ in history(run, "latency/p50_ms")] == [224, 288]
    assert run.data.metrics["ttfp/total_ms"] == pytest.approx(3200)
    assert run.data.metrics["memory/peak_mib"] == 501


def test_the_view_of_sizes_has_all_runs_over_several_sizes(
    sink, listed, make_record, leave_run, tmp_path
):
    for uid, sizes in {"two": (224, 256), "five": (224, 256, 288, 320, 352), "one": (224,)}.items():
        sink.publish(
            Analysis.of(record := make_record(uid=uid, sizes=sizes)),
            leave_run(record, tmp_path / uid),
        )
    assert listed(VIEWS[-1]) == ["five", "two"], "those without an exponent come last"


@pytest.mark.slow
def test_one_filter_finds_a_measurement_wherever_it_was_measured(
    sink, listed, make_record, leave_run, tmp_path
):
    graph = {"execution": {"compile": None, "cuda_graph": True}}
    cpu = {"device": {"kind": "cpu", "name": "Example CPU"}}
    for uid, fields in {
        "one": {},
        "sizes": {"sizes": (192, 224, 256)},
        "batches": {"batches": (1, 8)},
        "both": {"sizes": (224, 256), "batches": (1, 8), "phases": ("train", "inference")},
        "other batch": {"batches": (8,)},
        "other size": {"sizes": (256, 288)},
        "graph": {"plan": graph},
        "cpu": {"environment": cpu},
    }.items():
        record = make_record(uid=uid.replace(" ", "-"), **fields)
        sink.publish(Analysis.of(record), leave_run(record, tmp_path / record.uid))
    question = (
        "params.model = 'resnet50' and params.phase = 'inference' and params.input_size = '224' and "
        "params.batch_size = '1' and params.precision = 'fp32' and params.execution = 'eager' and "
        "params.device LIKE 'NVIDIA H200%'"
    )
    assert sorted(listed(VIEWS[0], question)) == ["batches", "both", "one", "sizes"]


@pytest.mark.slow
def test_a_size_has_a_run_of_its_own_with_the_figures_at_it(
    sink, runs, make_record, leave_run, tmp_path
):
    record = make_record(sizes=(224, 256), batches=(1, 8))
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    sink.publish(Analysis.of(record), tmp_path)
    sizes = {
        (run.data.params["input_size"], run.data.params["batch_size"]): run
        for run in of_kind("size", runs())
    }
    assert set(sizes) == {(size, batch) for size in ("224", "256") for batch in ("1", "8")}
    for (size, batch), run in sizes.items():
        assert run.data.metrics["latency/p50_ms"] == pytest.approx(
            10 * int(batch) * (int(size) / 224) ** 2, rel=0.02
        )
        assert run.data.metrics["point/input_width"] == int(size)
        assert run.data.tags["perfexp.points"] == "1 ok"
        assert ("ttfp/total_ms" in run.data.metrics) is ((size, batch) == ("224", "1"))


def test_more_than_64_sizes_get_no_runs_of_their_own(make_record, tmp_path):
    assert (
        len(payload.of_run(Analysis.of(make_record(sizes=range(32, 96))), tmp_path).children) == 64
    )
    assert payload.of_run(Analysis.of(make_record(sizes=range(32, 97))), tmp_path).children == []


def test_marked_figures_are_tagged_and_marked_in_mlflow(make_record, tmp_path):
    few = payload.of_run(Analysis.of(make_record(calls=4)), tmp_path)
    assert {"latency/p50_ms", "throughput/samples_per_second"} <= set(
        few.tags["perfexp.estimated_metrics"].split(", ")
    )
    assert "no interval" in few.note
    assert "samples/s: ≈ " in few.note
    many = payload.of_run(Analysis.of(make_record()), tmp_path)
    assert "p50" not in many.tags.get("perfexp.estimated_metrics", "")
    assert "samples/s: ≈ " not in many.note
    several = payload.of_run(Analysis.of(make_record(calls=4, sizes=(224, 256))), tmp_path)
    assert re.search(r"\| 224 \| [\d.]+ ms, no interval \|", several.note)
    batches = payload.of_run(Analysis.of(make_record(calls=4, batches=(1, 8))), tmp_path)
    assert (
        batches.tags["perfexp.estimated_metrics"] == "best/latency_p50_ms, best/samples_per_second"
    )


@pytest.fixture
def parts(runs):
    """A function that reads back the run of a record, and by phase and batch size the runs below it."""

    def read():
        found = runs()
        (run,) = of_kind("run", found)
        points, sizes = of_kind("point", found), of_kind("size", found)
        assert {point.data.tags["mlflow.parentRunId"] for point in points + sizes} <= {
            run.info.run_id
        }
        assert len(found) == 1 + len(points) + len(sizes)
        return run, {
            (point.data.params["phase"], point.data.params["batch_size"]): point for point in points
        }

    return read


def test_phases_and_batch_sizes_are_runs_with_the_same_metrics(
    sink, parts, history, files, make_record, leave_run, tmp_path
):
    record = make_record(sizes=(224, 256), batches=(1, 8), phases=("train", "inference"))
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    run, points = parts()
    assert set(points) == {
        (phase, batch) for phase in ("train", "inference") for batch in ("1", "8")
    }
    names = {pair: set(point.data.metrics) for pair, point in points.items()}
    assert names["inference", "1"] - names["inference", "8"] == {
        f"ttfp/{part}_ms" for part in (*TTFP, "total")
    }
    assert names["train", "8"] - names["inference", "8"] == {
        f"train_phase/{part}_ms" for part in PHASES
    }
    assert {"latency/p50_ms", "throughput/samples_per_second", "memory/peak_mib"} <= names[
        "train", "1"
    ]
    assert history(points["inference", "8"], "point/batch_size") == [(224, 8), (256, 8)]
    inference = points["inference", "8"]
    assert inference.info.run_name == "b8 inf fp32 224-256"
    assert (inference.info.status, inference.info.start_time) == ("FINISHED", run.info.start_time)
    axes = {
        "model": "resnet50",
        "precision": "fp32",
        "phase": "inference",
        "batch_size": "8",
        "input_size": "224, 256",
    }
    assert axes.items() <= inference.data.params.items()
    assert {
        "gpu": "NVIDIA H200",
        "perfexp.points": "2 ok",
        "perfexp.uid": record.uid,
    }.items() <= inference.data.tags.items()
    assert "perfexp.point" not in inference.data.tags, (
        "what has been measured already is asked of whole runs"
    )
    assert files(inference) == []
    assert files(run) == ["config", "data", "logs", "tables"]
    rates = {
        pair: point.data.metrics["throughput/samples_per_second"] for pair, point in points.items()
    }
    best = ("latency_p50_ms", "samples_per_second")
    assert set(run.data.metrics) == {
        f"best/{phase}_{name}" for phase in ("train", "inference") for name in best
    }
    assert run.data.metrics["best/train_samples_per_second"] > rates["train", "1"]
    assert run.data.params["phase"] == "train, inference"


@pytest.mark.parametrize(
    "alone", [{}, {"sizes": (224, 256)}, {"metrics": [Metric(name="mfu", value=0.5, unit="1")]}]
)
def test_names_do_not_depend_on_what_else_a_run_measured(alone, make_record, tmp_path):
    (one,) = [payload.of_run(Analysis.of(make_record(**alone)), tmp_path)]
    both = payload.of_run(
        Analysis.of(make_record(**alone, batches=(1, 8), phases=("train", "inference"))), tmp_path
    )
    inference = next(child for child in both.children if child.name.startswith("b1 inf "))
    assert [figure.name for figure in inference.figures] == [figure.name for figure in one.figures]
    assert [figure.step for figure in inference.figures] == [figure.step for figure in one.figures]
    sizes = [child.params["input_size"] for child in one.children]
    assert sizes == ([str(size) for size in alone["sizes"]] if "sizes" in alone else [])


@pytest.mark.slow
def test_child_runs_are_found_again_completed_and_recreated(
    sink, store, parts, runs, history, make_record, leave_run, tmp_path, monkeypatch, in_process
):
    from mlflow import MlflowClient

    record = make_record(sizes=(224, 256), batches=(1, 8, 16))
    folder = leave_run(record, tmp_path)
    fill, left = send.fill, [2]

    def until_the_power_fails(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError("no power")
        fill(*arguments)

    monkeypatch.setattr(send, "fill", until_the_power_fails)
    with pytest.raises(TrackingFailed, match="no power"):
        sink.publish(Analysis.of(record), folder)
    monkeypatch.setattr(send, "fill", fill)
    assert {run.info.status for run in runs()} == {"FINISHED"}
    sink.publish(Analysis.of(record), folder)
    before, points = parts()
    assert [len(history(point, "latency/p50_ms")) for point in points.values()] == [2, 2, 2]
    sink.publish(Analysis.of(record), folder)
    whole = {run.info.run_id for kind in ("run", "point") for run in of_kind(kind, runs())}
    assert whole == {run.info.run_id for run in (before, *points.values())}
    assert [len(history(point, "latency/p50_ms")) for point in points.values()] == [2, 2, 2]
    client = MlflowClient(tracking_uri=store)
    client.delete_run(before.info.run_id)
    client.delete_run(points["inference", "8"].info.run_id)
    sink.publish(Analysis.of(record), folder)
    after, again = parts()
    assert after.info.run_id != before.info.run_id
    same = {pair for pair in points if points[pair].info.run_id == again[pair].info.run_id}
    assert same == {("inference", "1"), ("inference", "16")}


def test_child_runs_follow_the_earlier_of_two_concurrent_runs(
    sink, store, parts, runs, make_record, leave_run, tmp_path, monkeypatch, in_process
):
    from mlflow import MlflowClient

    record, upload = make_record(batches=(1, 8)), send.upload
    client = MlflowClient(tracking_uri=store)

    def while_another_makes_the_same_run(*arguments):
        upload(*arguments)
        (own,) = [run for run in runs() if run.data.tags["perfexp.kind"] == "run"]
        tags = {name: own.data.tags[name] for name in ("perfexp.kind", "perfexp.uid")}
        client.create_run(own.info.experiment_id, start_time=own.info.start_time - 1, tags=tags)

    monkeypatch.setattr(send, "upload", while_another_makes_the_same_run)
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    run, points = parts()
    assert run.info.start_time == 1772359200000 - 1
    assert len(points) == 2


def test_the_parts_of_a_run_of_a_sweep_are_below_that_run(
    sink, runs, make_record, leave_run, tmp_path
):
    record = make_record(batches=(1, 8), sweep=SweepMembership(uid="s1", job=0, jobs=1))
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    by_kind = {run.data.tags["perfexp.kind"]: run for run in runs()}
    above = {kind: run.data.tags.get("mlflow.parentRunId") for kind, run in by_kind.items()}
    ids = {kind: run.info.run_id for kind, run in by_kind.items()}
    assert above == {"sweep": None, "run": ids["sweep"], "point": ids["run"]}
    assert by_kind["point"].data.tags["perfexp.sweep"] == "s1"


def test_a_phase_that_failed_says_so_on_its_own_run(sink, parts, make_record, leave_run, tmp_path):
    record = make_record(batches=(1, 8))
    record.points[1].status = Status.FAILED
    record.points[1].series = []
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    run, points = parts()
    assert {pair[1]: point.info.status for pair, point in points.items()} == {
        "1": "FINISHED",
        "8": "FAILED",
    }
    assert run.info.status == "FAILED"


@pytest.mark.slow
def test_many_sizes_and_batch_sizes_take_few_calls(
    sink, make_record, leave_run, tmp_path, monkeypatch, in_process
):
    from mlflow.tracking._tracking_service.client import TrackingServiceClient

    calls = []
    for name in (
        "log_batch",
        "search_runs",
        "create_run",
        "update_run",
        "set_terminated",
        "set_tag",
        "log_metric",
    ):
        whole = getattr(TrackingServiceClient, name)
        monkeypatch.setattr(
            TrackingServiceClient,
            name,
            lambda *a, _whole=whole, _name=name, **k: calls.append(_name) or _whole(*a, **k),
        )
    record = make_record(sizes=range(224, 424, 2), batches=(1, 8), phases=("train", "inference"))
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    assert calls.count("log_metric") == 0
    assert calls.count("log_batch") < 20
    assert len(calls) < 60


def test_a_second_publication_changes_nothing(
    sink, runs, history, files, make_record, leave_run, tmp_path
):
    record = make_record(
        sizes=(224, 256), plan={"data": {"root": "x"}, "choices": {"data": "cifar10"}}
    )
    folder = leave_run(record, tmp_path)
    first = sink.publish(Analysis.of(record), folder)
    before = [(run.info.run_id, run.data.to_dictionary()) for run in runs()]
    assert sink.publish(Analysis.of(record), folder) == first
    assert [(run.info.run_id, run.data.to_dictionary()) for run in runs()] == before
    [whole] = of_kind("run", runs())
    assert len(history(whole, "latency/p50_ms")) == 2
    assert files(whole) == ["config", "data", "logs", "tables"]
    assert "tables/points.json" in files(whole, "tables")
    [data] = whole.inputs.dataset_inputs
    assert (data.dataset.name, data.tags[0].value) == ("cifar10 224x224-256x256 b1", "inference")


def test_a_record_that_has_grown_completes_its_run(
    sink, runs, history, make_record, leave_run, tmp_path
):
    killed = make_record(sizes=(224, 256), failing={256: Status.INTERRUPTED}, status=Status.KILLED)
    sink.publish(Analysis.of(killed), leave_run(killed, tmp_path))
    assert [run.info.status for run in of_kind("run", runs())] == ["KILLED"]
    resumed = make_record(sizes=(224, 256), command=["stopping.max_seconds=9"], doubts=[])
    sink.publish(Analysis.of(resumed), tmp_path)
    (run,) = of_kind("run", runs())
    assert run.info.status == "FINISHED"
    assert len(history(run, "latency/p50_ms")) == 2
    assert len(history(run, "latency/p50_ms")) == 2
    assert run.data.params["stopping.max_seconds"] == "9"
    assert "busy_host" not in run.data.tags.get("perfexp.doubts", ""), (
        "a tag that is true no more is gone"
    )


def test_what_a_person_wrote_stays(sink, runs, store, make_record, leave_run, tmp_path):
    from mlflow import MlflowClient

    record = make_record()
    folder = leave_run(record, tmp_path)
    sink.publish(Analysis.of(record), folder)
    client, run_id = MlflowClient(tracking_uri=store), runs()[0].info.run_id
    assert "10.0 ms" in runs()[0].data.tags["mlflow.note.content"]
    client.set_tag(run_id, "mlflow.note.content", "mine")
    client.set_tag(run_id, "reviewed", "yes")
    client.set_tag(run_id, "mlflow.loggedArtifacts", "with a table of mine")
    client.update_run(run_id, name="the good one")
    sink.publish(Analysis.of(record), folder)
    (run,) = runs()
    assert run.data.tags["mlflow.note.content"] == "mine"
    assert run.data.tags["reviewed"] == "yes"
    assert run.data.tags["mlflow.loggedArtifacts"] == "with a table of mine"
    assert run.info.run_name == "the good one"


def test_custom_metrics_of_epochs_have_the_number_of_the_epoch(
    sink, runs, history, make_record, leave_run, tmp_path
):
    record = make_record(phases=("train",), metrics=[Metric(name="custom/f1", value=0.7, unit="1")])
    record.points[0].epochs = [
        Epoch(
            number=number,
            seconds=1.0,
            samples_per_second=1.0,
            metrics=[Metric(name="custom/f1", value=f1, unit="1")],
        )
        for number, f1 in ((1, 0.5), (2, 0.7))
    ]
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    [run] = [run for run in runs() if "custom/f1" in run.data.metrics]
    assert run.data.metrics["custom/f1"] == 0.7
    assert history(run, "epoch/custom.f1") == [(1, 0.5), (2, 0.7)]


def test_values_and_names_that_mlflow_rejects_are_named_in_a_tag(
    sink, runs, make_record, leave_run, tmp_path
):
    metrics = [
        Metric(name="custom/gradient norm (L2)/last", value=3.5, unit="1"),
        Metric(name="custom/nan_ratio", value=math.nan, unit="1"),
        Metric(name="custom/inf_ratio", value=math.inf, unit="1"),
        Metric(name="energy/per_call_joules", value=None, unit="joules", reason="no meter"),
        Metric(name="custom/é", value=1, unit="1"),
        Metric(name="custom/è", value=2, unit="1"),
        Metric(name="epoch_seconds", value=1.5, unit="seconds", estimated=True),
    ]
    record = make_record(metrics=metrics)
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    (run,) = runs()
    assert run.data.metrics["custom/gradient norm _L2_.last"] == 3.5
    assert run.data.metrics["custom/_"] == 1
    assert run.data.metrics["inference/epoch_ms"] == 1500
    assert (
        run.data.tags["perfexp.estimated_metrics"]
        == "latency/p95_ms, latency/p99_ms, inference/epoch_ms"
    )
    dropped = run.data.tags["perfexp.dropped_metrics"]
    for name in (
        "custom/nan_ratio",
        "custom/inf_ratio",
        "custom/_",
        "energy/per_call_joules: no meter",
    ):
        assert name in dropped
    assert not {"custom/nan_ratio", "custom/inf_ratio"} & run.data.metrics.keys()


def test_long_texts_are_cut_knowingly_and_nul_and_passwords_go(
    sink, runs, make_record, leave_run, tmp_path, caplog
):
    command = [f"long={'x' * 7_000}", "nul=a\0b", "data.root=postgresql://me:secret@db/mlflow"]
    record = make_record(sizes=range(224, 512, 2), command=command)
    with caplog.at_level(logging.WARNING):
        sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    (run,) = runs()
    assert len(run.data.params["long"]) == 6_000
    assert run.data.params["long"].endswith("(cut)")
    assert run.data.params["nul"] == "ab"
    assert run.data.params["data.root"] == "postgresql://***@db/mlflow"
    note = run.data.tags["mlflow.note.content"]
    assert len(note) <= 8_000
    assert "more: see report.md" in note
    assert "To measure it again" in note
    assert "secret" not in note
    assert not [entry for entry in caplog.records if "truncated" in entry.getMessage()]


def test_more_than_a_batch_of_everything_arrives(
    sink, runs, history, make_record, leave_run, tmp_path
):
    record = make_record(
        sizes=range(224, 512, 2), command=[f"many.key{number}={number}" for number in range(230)]
    )
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    (run,) = runs()
    assert len(run.data.params) == 25
    assert len(history(run, "latency/ci_high_ms")) == 144


def test_artifacts_keep_folders_links_and_missing_are_reported(
    sink, runs, files, make_record, leave_run, tmp_path
):
    record = make_record()
    folder = leave_run(record, tmp_path / "run")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (folder / "link.log").symlink_to(secret)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "a b é.png").write_bytes(b"png")
    (folder / "report.md").write_text("# report")
    record.artifacts += [
        Artifact(path="link.log", kind="logs"),
        Artifact(path="linked/secret.txt", kind="data"),
        Artifact(path="../secret.txt", kind="data"),
        Artifact(path=str(secret), kind="data"),
        Artifact(path="gone.csv", kind="tables"),
        Artifact(path="a b é.png", kind="plots"),
        Artifact(path="report.md", kind="report"),
    ]
    sink.publish(Analysis.of(record), folder)
    (run,) = runs()
    assert files(run) == ["config", "data", "logs", "plots", "report.md", "tables"]
    assert files(run, "data") == ["data/record.json"]
    assert files(run, "logs") == ["logs/run.log"]
    assert files(run, "plots") == ["plots/a-b-.png"]
    skipped = run.data.tags["perfexp.skipped_files"]
    note = run.data.tags["mlflow.note.content"].replace(
        "&#8203;", ""
    )  # where a long name may be broken
    for name in (
        "link.log",
        "linked/secret.txt",
        "../secret.txt",
        str(secret),
        "gone.csv: missing",
    ):
        assert name in skipped
        assert name.split(":")[0].replace("_", "\\_") in note


def test_a_sweep_is_a_parent_that_ends_as_its_runs_did(
    sink, runs, files, make_record, leave_run, tmp_path
):
    sweep = Sweep(
        uid="s1",
        name="batches",
        started="2026-03-01T10:00:00+00:00",
        command=["-m", "batch_size=1,8"],
        jobs=2,
    )
    for job, batch in enumerate((1, 8)):
        record = make_record(
            uid=f"child{job}",
            batches=(batch,),
            name=f"b{batch}-resnet50",
            sweep=SweepMembership(uid="s1", job=job, jobs=2, axes={"batch_size": str(batch)}),
        )
        sink.publish(Analysis.of(record), leave_run(record, tmp_path / str(job)))
        child = SweepChild(
            job=job,
            name=record.name,
            directory=str(job),
            status=record.status,
            axes={"batch_size": str(batch)},
        )
        sweep.children.append(child)
        if job == 0:
            sink.publish_sweep(SweepAnalysis.of(sweep, sweep.records(tmp_path)), tmp_path)
            parent = next(run for run in runs() if run.data.tags["perfexp.kind"] == "sweep")
            assert (parent.info.status, parent.info.run_name) == (
                "SCHEDULED",
                "batches resnet50 fp32",
            )
            assert not parent.data.params
    sweep.ended = "2026-03-01T11:00:00+00:00"
    (tmp_path / "sweep.csv").write_text("job\n0\n1\n")
    (tmp_path / "sweep.png").write_bytes(b"png")
    sink.publish_sweep(SweepAnalysis.of(sweep, sweep.records(tmp_path)), tmp_path)
    (parent,) = [run for run in runs() if run.data.tags["perfexp.kind"] == "sweep"]
    children = [
        run for run in runs() if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    ]
    assert sorted(run.info.run_name for run in children) == [
        "b1 resnet50 fp32 224 inf",
        "b8 resnet50 fp32 224 inf",
    ]
    assert (parent.info.status, parent.info.run_name) == ("FINISHED", "2 batches resnet50 fp32")
    assert {
        "batch_size": "1, 8",
        "model": "resnet50",
        "device": "NVIDIA H200",
    }.items() <= parent.data.params.items()
    assert parent.data.metrics["best/latency_p50_ms"] == pytest.approx(10, rel=0.01)
    assert parent.data.metrics["best/samples_per_second"] == pytest.approx(100, rel=0.01)
    assert parent.info.end_time - parent.info.start_time == 3_600_000
    counts = {"perfexp.expected": "2", "perfexp.finished": "2", "perfexp.failed": "0"}
    counts["mlflow.source.git.commit"] = "0123abcd"
    assert counts.items() <= parent.data.tags.items()
    assert files(parent) == ["plots", "tables"]
    assert "10.0 ms" in parent.data.tags["mlflow.note.content"]


def test_the_experiment_is_the_plans_stage_unless_named(store, make_record, leave_run, tmp_path):
    from mlflow import MlflowClient

    record = make_record(plan={"stage": "2_quick"})
    MlflowSink(uri=store).publish(Analysis.of(record), leave_run(record, tmp_path))
    found = MlflowClient(tracking_uri=store).get_experiment_by_name("2_quick")
    assert (
        found.artifact_location
        == (Path(store.removeprefix("sqlite:///")).parent / "mlartifacts").as_uri()
    )


@pytest.mark.slow
def test_the_users_environment_does_not_leak_in(
    sink, runs, make_record, leave_run, tmp_path, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    mlflow_sink.end_sender()  # the next one starts with these variables
    before = dict(os.environ)
    record = make_record()
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    assert dict(os.environ) == before
    assert len(runs()) == 1


def test_default_store_is_absolute_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert MlflowSink().uri == f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert MlflowSink(uri="sqlite:///other.db").uri == f"sqlite:///{tmp_path}/other.db"


def test_unreachable_server_is_one_error_with_a_remedy(make_record, leave_run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    record = make_record()
    with pytest.raises(
        TrackingFailed, match=rf"127.0.0.1:{port}.*perfexp sync {tmp_path}"
    ) as caught:
        MlflowSink(uri=f"http://me:secret@127.0.0.1:{port}").publish(
            Analysis.of(record), leave_run(record, tmp_path)
        )
    assert isinstance(caught.value, PerfexpError)
    assert caught.value.exit_code == 3
    assert "secret" not in str(caught.value)


def test_a_database_that_cannot_be_made_is_one_message(make_record, leave_run, tmp_path):
    record = make_record()
    with pytest.raises(TrackingFailed, match="Nothing is lost"):
        MlflowSink(uri="sqlite:////proc/nowhere/mlflow.db").publish(
            Analysis.of(record), leave_run(record, tmp_path)
        )


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        ("", "no store of this kind"),
        ("localhost:5000", "no store of this kind"),
        ("bogus://x", "no store of this kind"),
        ("databricks", "no store of this kind"),
        ("databricks://profile", "no store of this kind"),
        ("mlruns", "no store of this kind"),
        ("/var/mlruns", "no store of this kind"),
        ("file:///var/mlruns", "no store of this kind"),
        ("sqlite://", "file's name is missing"),
        ("sqlite:///", "file's name is missing"),
        ("sqlite:///:memory:", "file's name is missing"),
        ("sqlite:////tmp", "a folder"),
        ("sqlite:///nowhere/", "a folder"),
        ("http://", "name or port is missing"),
        ("http://:5000", "name or port is missing"),
        ("http://host:port", "not the address of a server"),
        ("http://me:secret@host:99999", "not the address of a server"),
        ("http://me:secret/word@host", "%2F"),
        ("http://host:5000/#/experiments", "address only"),
        ("postgresql://", "database is missing"),
        ("http://host\n", "do not print"),
    ],
)
def test_a_store_that_cannot_be_is_refused_at_once(uri, fault):
    with pytest.raises(UserError, match=fault) as caught:
        MlflowSink(uri=uri)
    assert "sqlite:///FILE" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///mlflow.db",
        "http://host",
        "https://me:secret@host:5000/base/",
        "http://[::1]:5000",
        "postgresql+psycopg://me:secret@host/mlflow",
        "mysql://host/mlflow",
        "mssql+pyodbc:///?odbc_connect=DSN",
    ],
)
def test_a_store_that_can_be_is_not_asked_before_it_is_needed(uri):
    assert MlflowSink(uri=uri)


@pytest.mark.parametrize("name", ["deadline_seconds", "request_timeout_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
def test_limits_are_positive(name, seconds):
    with pytest.raises(UserError, match=rf"tracking\.{name}={seconds:g}: set a positive number"):
        MlflowSink(**{name: seconds})


def test_a_deleted_experiment_is_told(sink, store, experiment, make_record, leave_run, tmp_path):
    from mlflow import MlflowClient

    record = make_record()
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    client = MlflowClient(tracking_uri=store)
    client.delete_experiment(client.get_experiment_by_name(experiment).experiment_id)
    with pytest.raises(TrackingFailed, match="deleted"):
        sink.publish(Analysis.of(record), tmp_path)


def _publish(uri, record, folder):
    import warnings

    warnings.simplefilter("ignore")
    MlflowSink(uri=uri, experiment="race").publish(Analysis.of(record), folder)


@pytest.mark.slow
def test_processes_that_share_a_fresh_store_do_not_collide(make_record, leave_run, tmp_path):
    from mlflow import MlflowClient

    uri, context, processes = (
        f"sqlite:///{tmp_path}/fresh/mlflow.db",
        multiprocessing.get_context("spawn"),
        [],
    )
    for job in range(2):
        record = make_record(uid=f"race{job}", sweep=SweepMembership(uid="s2", job=job, jobs=2))
        folder = leave_run(record, tmp_path / str(job))
        processes.append(context.Process(target=_publish, args=(uri, record, folder)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    client = MlflowClient(tracking_uri=uri)
    found = client.search_runs([client.get_experiment_by_name("race").experiment_id])
    assert sorted(run.data.tags["perfexp.kind"] for run in found) == ["run"] * 2 + ["sweep"]


def test_mlflow_variables_name_store_and_experiment_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/own.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    assert (MlflowSink().uri, MlflowSink().experiment) == (f"sqlite:///{tmp_path}/own.db", "mine")
    named = MlflowSink(uri=f"sqlite:///{tmp_path}/named.db", experiment="named")
    assert (named.uri, named.experiment) == (f"sqlite:///{tmp_path}/named.db", "named")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI"):
        MlflowSink()


def test_run_continued_by_another_process_shows_its_last_figures(
    sink, runs, make_record, leave_run, tmp_path, in_process
):
    record = make_record()
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    (before,) = of_kind("run", runs())
    further = msgspec.convert(msgspec.to_builtins(record.points[0]), type(record.points[0]))
    further.key, further.started = (
        msgspec.structs.replace(further.key, replicate=1),
        "2030-01-01T00:00:00+00:00",
    )
    for series in further.series:
        series.samples = [0.5 * seconds for seconds in series.samples]
    record.points.append(further)
    sink.publish(Analysis.of(record), leave_run(record, tmp_path))
    (after,) = of_kind("run", runs())
    medians = [run.data.metrics["latency/p50_ms"] for run in (before, after)]
    assert after.info.run_id == before.info.run_id
    assert medians[1] == pytest.approx(medians[0] / 2**0.5, rel=0.01), (
        "the geometric mean of both processes"
    )
