"""Saved views of MLflow, which are tags of the experiment."""

import base64
import json
import zlib

import pytest

from perfexp.tracking import store
from perfexp.tracking.views import VIEWS, has_views


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.key)
def test_a_view_has_a_state_that_mlflow_unpacks(view):
    content = json.loads(view.value())
    method, _, packed = content["state"].partition(";")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert method == "deflate"
    assert state["orderByKey"] in state["selectedColumns"]
    assert state["searchFilter"] == view.query
    assert set(state["selectedColumns"]) <= set(state["columnOrder"]) == set(state["columnWidths"])
    assert view.key in store.view_page("http://127.0.0.1:5000", "1", view.key)


@pytest.mark.parametrize(
    ("version", "expected"), [("3.17.2", True), ("3.20.0", True), ("3.16.9", False), ("4.0.0", False), ("x", False)]
)
def test_views_are_for_known_versions(version, expected):
    assert has_views(version) is expected


def test_views_are_for_the_kind_of_device_that_was_measured():
    by_device = {device: [view.order for view in VIEWS if view.device == device] for device in ("gpu", "cpu")}
    assert by_device == {"gpu": ["metrics.`device/p50_ms`"] * 2, "cpu": ["metrics.`latency/p50_ms`"] * 2}
    assert len({view.key for view in VIEWS}) == len(VIEWS)


@pytest.mark.parametrize("view", [view for view in VIEWS if view.device], ids=lambda view: view.key)
def test_batch_size_precision_and_warnings_are_before_the_interval(view):
    columns = list(view.columns)
    conditions = ["params.`batch_size`", "params.`precision`", "tags.`perfexp.doubts`"]
    time = columns.index(view.order)
    assert columns[time + 1 : time + 4] == conditions
    assert columns[time + 4].endswith("/ci_low_ms`")
