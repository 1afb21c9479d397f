"""Epochs of a training in MLflow while it runs."""

import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from mlflow import MlflowClient

from perfexp.records.record import Epoch, Metric
from perfexp.summaries.analysis import Analysis
from perfexp.tracking import mlflow_sink, payload
from perfexp.tracking.delivery import Epochs
from perfexp.tracking.mlflow_sink import MlflowSink
from perfexp.tracking.send import next_request

EPOCHS = [
    Epoch(
        number=number, seconds=2.0, samples_per_second=320.0, loss=1 / number, accuracy=number / 4
    )
    for number in (1, 2, 3)
]


@pytest.fixture
def training(make_record):
    """The record of a training, and its point as it is after an epoch, with that epoch alone."""
    record = make_record()
    [point, *_] = record.points
    record.points = [
        msgspec.structs.replace(point, started="2026-01-05T09:00:00+00:00", epochs=EPOCHS)
    ]
    return record, [msgspec.structs.replace(record.points[0], epochs=[epoch]) for epoch in EPOCHS]


@pytest.fixture
def live(training):
    """A sender of epochs in a thread: its requests, what it delivered, and what is released after each delivery."""
    requests, sent, arrived, answers = queue.SimpleQueue(), [], threading.Semaphore(0), []

    def deliver(epochs):
        sent.append(epochs.payload)
        answer = answers.pop() if answers else {"link": ""}
        arrived.release()
        return answer() if callable(answer) else answer

    thread = threading.Thread(target=next_request, args=[requests, deliver])
    thread.start()
    yield SimpleNamespace(requests=requests, sent=sent, arrived=arrived, answers=answers)
    requests.put(None)
    thread.join()


def epochs_of(training, number):
    record, points = training
    content = payload.of_training(record, points[number])
    content.figures = payload.epochs_of(points[number], 2.0 * number)
    return Epochs(
        uri="",
        request_timeout_seconds=1,
        deadline_seconds=1,
        experiment="",
        artifacts=None,
        payload=content,
    )


def test_each_epoch_is_sent_exactly_once_while_training_runs(training, live):
    for number in range(2):
        live.requests.put(epochs_of(training, number))
        assert live.arrived.acquire(timeout=30)
    assert [payload.status for payload in live.sent] == ["RUNNING", "RUNNING"]
    steps = [{figure.step for figure in payload.figures} for payload in live.sent]
    assert steps == [{1}, {2}]
    names = {figure.name for figure in live.sent[0].figures}
    assert names >= {"epoch/loss", "epoch/accuracy", "epoch/samples_per_second"}


def test_slow_delivery_pauses_sending_for_199_times_as_long(training, live):
    live.answers += [lambda: threading.Event().wait(0.05) or {"link": ""}] * 2
    for number in range(2):
        live.requests.put(epochs_of(training, number))
        assert live.arrived.acquire(timeout=30)
    live.requests.put(epochs_of(training, 2))
    assert not live.arrived.acquire(
        timeout=0.3
    )  # of the 10 seconds that follow the second delivery
    assert len(live.sent) == 2


def test_epochs_that_wait_are_sent_together(training):
    requests, sent = queue.SimpleQueue(), []
    for number in range(3):
        requests.put(epochs_of(training, number))

    def deliver(epochs):
        sent.append(epochs.payload)
        requests.put(None)
        return {"link": ""}

    assert next_request(requests, deliver) is None
    [whole] = sent
    assert {figure.step for figure in whole.figures} == {1, 2, 3}


def test_failing_store_ends_live_tracking_but_not_the_training(training, live):
    live.answers.append({"error": "no store", "is_late": False})
    live.requests.put(epochs_of(training, 0))
    assert live.arrived.acquire(timeout=30)
    live.requests.put(epochs_of(training, 1))
    assert not live.arrived.acquire(timeout=0.3)
    assert len(live.sent) == 1


@pytest.mark.slow
def test_live_training_is_seen_in_mlflow_without_duplicates(training, leave_run, tmp_path):
    record, points = training
    sink = MlflowSink(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="live")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")

    def runs():
        found = client.get_experiment_by_name("live")
        return client.search_runs([found.experiment_id]) if found else []

    with sink.following(lambda: record) as follow:
        follow(points[0])
        for _ in range(600):
            if runs() and "epoch/loss" in runs()[0].data.metrics:
                break
            threading.Event().wait(0.1)
        [run] = runs()
        assert (run.info.status, run.data.metrics["epoch/accuracy"]) == ("RUNNING", 0.25)
    leave_run(record, tmp_path / "run")
    sink.publish(Analysis.of(record), tmp_path / "run")
    [run] = runs()
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "epoch/loss")
    assert [(one.step, one.value) for one in sorted(history, key=lambda one: one.step)] == [
        (epoch.number, epoch.loss) for epoch in EPOCHS
    ]


def test_an_interrupted_training_does_not_stay_open(training, tmp_path, monkeypatch):
    record, points = training
    sent = []
    monkeypatch.setattr(mlflow_sink, "start_sender", lambda: SimpleNamespace(put=sent.append))
    monkeypatch.setattr(mlflow_sink, "deliver", sent.append)
    sink = MlflowSink(uri=f"sqlite:///{tmp_path}/mlflow.db", deadline_seconds=1000)
    with pytest.raises(KeyboardInterrupt), sink.following(lambda: record) as follow:
        follow(points[0])
        assert [(request.payload.status, len(request.payload.figures) > 0) for request in sent] == [
            ("RUNNING", True)
        ]
        raise KeyboardInterrupt
    assert (sent[1].payload.status, sent[1].payload.figures) == ("KILLED", [])
    assert sent[1].payload.identity == payload.of_run(Analysis.of(record), tmp_path).identity
    assert sent[1].deadline_seconds < 10


def test_live_figures_have_the_names_of_the_final_ones(training):
    record, [point, *_] = training
    values = {
        "custom/weight norm": 2.0,
        "custom/a:b": 3.0,
        "custom/a?b": 4.0,
        "custom/" + "x" * 300: 5.0,
    }
    values |= {"custom/nan": float("nan")}
    point.epochs = [
        msgspec.structs.replace(
            EPOCHS[0], metrics=[Metric(name=n, value=v, unit="1") for n, v in values.items()]
        )
    ]
    record.points = [point]
    live = payload.epochs_of(point, 0.0)
    final = [
        figure
        for figure in payload.of_run(Analysis.of(record), Path()).figures
        if figure.name.startswith("epoch/") and figure.step == 1
    ]
    assert {figure.name for figure in live} >= {"epoch/custom.weight norm"}
    assert set(live) <= set(final)
