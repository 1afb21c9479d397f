"""Epochs of a training in MLflow while it runs."""

import threading
from pathlib import Path

import msgspec
import pytest
from mlflow import MlflowClient

from perfexp.records.record import Epoch, Metric
from perfexp.tracking.live import Follower
from perfexp.tracking.mlflow_sink import MlflowSink
from perfexp.tracking.payload import of_run, of_training

EPOCHS = [
    Epoch(number=number, seconds=2.0, samples_per_second=320.0, loss=1 / number, accuracy=number / 4)
    for number in (1, 2, 3)
]


@pytest.fixture
def training(make_record):
    """The record of a training, and its point as it is after an epoch, with that epoch alone."""
    record = make_record()
    [point, *_] = record.points
    record.points = [msgspec.structs.replace(point, started="2026-01-05T09:00:00+00:00", epochs=EPOCHS)]
    return record, [msgspec.structs.replace(record.points[0], epochs=[epoch]) for epoch in EPOCHS]


def test_each_epoch_is_sent_once_and_a_delivery_pauses_the_next_one(training):
    record, points = training
    sent, arrived = [], threading.Semaphore(0)

    def send(payload):
        sent.append(payload)
        arrived.release()

    with Follower(lambda: record, send, lambda: None) as follower:
        for point in points[:2]:
            follower.add(point)
            assert arrived.acquire(timeout=30)
    assert [payload.status for payload in sent] == ["RUNNING", "RUNNING"]
    steps = [{figure.step for figure in payload.figures} for payload in sent]
    assert steps == [{1}, {2}]
    assert {figure.name for figure in sent[0].figures} >= {"epoch/loss", "epoch/accuracy", "epoch/samples_per_second"}


def test_after_a_slow_delivery_nothing_is_sent_for_99_times_as_long(training):
    record, points = training
    calls, arrived = [], threading.Semaphore(0)

    def send(payload):
        calls.append(payload)
        threading.Event().wait(0.05)
        arrived.release()

    with Follower(lambda: record, send, lambda: None) as follower:
        for point in points[:2]:
            follower.add(point)
            assert arrived.acquire(timeout=30)
        follower.add(points[2])
        assert not arrived.acquire(timeout=0.3)  # of the 5 seconds that the second delivery has to be followed by
    assert len(calls) == 2


def test_a_store_that_fails_ends_the_following_and_not_the_training(training):
    record, points = training
    calls, failed = [], threading.Event()

    def send(payload):
        calls.append(payload)
        failed.set()
        raise OSError("no store")

    with Follower(lambda: record, send, lambda: None) as follower:
        follower.add(points[0])
        assert failed.wait(30)
        follower.add(points[1])
    assert len(calls) == 1


@pytest.mark.slow
def test_a_training_is_seen_while_it_runs_and_its_record_adds_nothing_twice(training, leave_run, tmp_path):
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
    sink.publish(record, tmp_path / "run")
    [run] = runs()
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "epoch/loss")
    assert [(one.step, one.value) for one in sorted(history, key=lambda one: one.step)] == [
        (epoch.number, epoch.loss) for epoch in EPOCHS
    ]


def test_an_interrupted_training_does_not_stay_open(training, tmp_path):
    record, points = training
    sent, arrived = [], threading.Semaphore(0)

    def send(payload):
        sent.append(payload.status)
        arrived.release()

    with pytest.raises(KeyboardInterrupt), Follower(lambda: record, send, lambda: None) as follower:
        follower.add(points[0])
        assert arrived.acquire(timeout=30)
        raise KeyboardInterrupt
    assert sent == ["RUNNING", "KILLED"]


def test_live_figures_have_the_names_of_the_final_ones(training):
    record, [point, *_] = training
    values = {"custom/weight norm": 2.0, "custom/a:b": 3.0, "custom/a?b": 4.0, "custom/" + "x" * 300: 5.0}
    values |= {"custom/nan": float("nan")}
    point.epochs = [
        msgspec.structs.replace(EPOCHS[0], metrics=[Metric(name=n, value=v, unit="1") for n, v in values.items()])
    ]
    record.points = [point]
    live = of_training(record, point, after=0, status="RUNNING").figures
    [run] = [payload for payload in [of_run(record, Path())] if payload.figures]
    final = [figure for figure in run.figures if figure.name.startswith("epoch/") and figure.step == 1]
    assert {figure.name for figure in live} >= {"epoch/custom.weight norm"}
    assert set(live) <= set(final)
