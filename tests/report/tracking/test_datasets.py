"""Data of a run as its input, and its points as a table of MLflow's pages."""

import json
import math

import pytest

from perfexp.records.analysis import Analysis, SweepAnalysis
from perfexp.records.record import Metric, SweepMembership
from perfexp.records.sweep_record import Sweep, SweepChild
from perfexp.report.tracking import descriptions, payload

DATA = {
    "data": {"_target_": "x", "root": "http://me:secret@host/data"},
    "choices": {"data": "cifar10"},
    "seed": 1,
}


def of(record):
    return descriptions.datasets(record, [point.key for point in record.points])


def test_each_phase_has_its_data_with_sizes(make_record):
    record = make_record(plan=DATA, sizes=(32, 64), batches=(8,), phases=("train", "inference"))
    names = {(one.name, one.context) for one in of(record)}
    assert names == {
        ("cifar10 32x32-64x64 b8", "training"),
        ("cifar10 32x32-64x64 b8", "inference"),
    }
    assert "secret" not in of(record)[0].source
    assert of(make_record()) == [], "a plan without data"


def test_other_data_has_another_digest(make_record):
    plans = [DATA, {**DATA, "seed": 2}, {**DATA, "data": {"root": "elsewhere"}}]
    assert len({of(make_record(plan=plan))[0].digest for plan in plans}) == 3


def test_logged_points_table_has_medians_and_no_nan(make_record, tmp_path):
    record = make_record(
        batches=(1, 8), metrics=[Metric(name="custom/nan", value=math.nan, unit="1")]
    )
    run = payload.of_run(Analysis.of(record), tmp_path)
    [upload] = [one for one in run.files if one.source is None]
    table = json.loads(upload.content, parse_constant=pytest.fail)
    assert table["columns"][:2] == ["point", "median_ms"]
    assert table["data"][1][:2] == ["inference · 224 · 8 · fp32", pytest.approx(80, rel=0.01)]
    assert json.loads(run.first_tags["mlflow.loggedArtifacts"]) == [
        {"path": "tables/points.json", "type": "table"}
    ]
    assert {len(line) for line in table["data"]} == {len(table["columns"])}


def test_the_table_of_a_sweep_names_its_runs(make_record, tmp_path):
    axes = {"stopping.max_seconds": "5"}
    record = make_record(sweep=SweepMembership(uid="s", job=0, axes=axes))
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "record.json").write_bytes(record.to_json())
    sweep = Sweep(uid="s", name="algorithm", started=record.started, jobs=1)
    sweep.children = [SweepChild(job=0, name="one", directory="0", status=record.status, axes=axes)]
    [upload] = [
        one
        for one in payload.of_sweep(
            SweepAnalysis.of(sweep, sweep.records(tmp_path)), tmp_path
        ).files
        if one.source is None
    ]
    assert json.loads(upload.content)["data"][0][:3] == [
        "one · inference · 224 · 1 · fp32",
        pytest.approx(10, rel=0.01),
        "5",
    ]
