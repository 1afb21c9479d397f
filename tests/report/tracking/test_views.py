"""Saved views of MLflow, which are tags of the experiment."""

import base64
import json
import zlib

import pytest

from perfexp.report.tracking import store
from perfexp.report.tracking.views import VIEWS


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.key)
def test_a_view_has_a_state_that_mlflow_unpacks(view):
    content = json.loads(view.value())
    method, _, packed = content["state"].partition(";")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert method == "deflate"
    assert state == view.state
    assert state["orderByKey"] in [*state["selectedColumns"], "attributes.start_time"]
    assert set(state["selectedColumns"]) <= set(state["columnOrder"]) == set(state["columnWidths"])
    assert view.key in store.view_page("http://127.0.0.1:5000", "1", view.key)


def test_views_are_for_the_kind_of_device_that_was_measured():
    by_device = {
        device: [view.state["orderByKey"] for view in VIEWS if view.made_with == device]
        for device in ("gpu", "cpu")
    }
    assert by_device == {
        "gpu": ["metrics.`device/p50_ms`"] * 2,
        "cpu": ["metrics.`latency/p50_ms`"] * 2,
    }
    assert len({view.key for view in VIEWS}) == len(VIEWS)


@pytest.mark.parametrize(
    "view", [view for view in VIEWS if view.made_with in ("gpu", "cpu")], ids=lambda view: view.key
)
def test_view_columns_order_figures_conditions_intervals(view):
    columns = view.state["selectedColumns"]
    conditions = [
        f"params.`{name}`"
        for name in ("batch_size", "precision", "execution", "algorithm", "device")
    ]
    figures = [view.state["orderByKey"], "metrics.`throughput/samples_per_second`"]
    assert columns[:8] == [*figures, *conditions, "tags.`perfexp.doubts`"]
    assert [column.rpartition("/")[2] for column in columns[8:11]] == [
        "ci_low_ms`",
        "ci_high_ms`",
        "processes_count`",
    ]
    assert {f"metrics.`throughput/samples_per_second_{end}`" for end in ("low", "high")} <= set(
        columns[11:]
    )
