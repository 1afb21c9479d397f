"""Sizes and batch sizes as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.cli.composition import compose
from perfexp.errors import UserError
from perfexp.plan import config
from perfexp.plan.sweep import BatchSizes, Point, Sizes
from perfexp.records.record import Metric, Status
from perfexp.records.record import Point as Measured
from perfexp.records.sizes import parse_batch_sizes, parse_sizes


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (224, [(224, 224)]),
        ("224", [(224, 224)]),
        ("512x1024", [(512, 1024)]),
        ([224, 256], [(224, 224), (256, 256)]),
        ([224, "512x1024"], [(224, 224), (512, 1024)]),
        (None, []),
    ],
)
def test_sizes(given, sizes):
    assert parse_sizes(given) == sizes


@pytest.mark.parametrize(
    "given", [0, -1, "0x5", "axb", 1.5, True, "224x", "1x2x3", [], [224, 224], {"a": 1}]
)
def test_what_is_no_size_is_refused(given):
    with pytest.raises(UserError, match="input_size"):
        parse_sizes(given)


@pytest.mark.parametrize("given", [0, -4, "4.0", 1.5, True, [], [1, 1], [1, "x"]])
def test_what_is_no_batch_size_is_refused(given):
    with pytest.raises(UserError, match="batch_size"):
        parse_batch_sizes(given)


def test_a_point_sweep_is_every_size_with_every_batch():
    assert Point().points([(1, 1), (2, 2)], [1, 8]) == [
        ((1, 1), 1),
        ((1, 1), 8),
        ((2, 2), 1),
        ((2, 2), 8),
    ]


def test_sizes_are_evenly_spaced_and_reach_both_ends():
    points = Sizes(num_sizes=10, min_size=224, max_size=512).points([], [1])
    assert [size[0] for size, _ in points] == [224, 256, 288, 320, 352, 384, 416, 448, 480, 512]


@given(st.integers(1, 400), st.integers(0, 400), st.data())
def test_sizes_are_distinct_and_ascend(smallest, span, data):
    count = data.draw(st.integers(1, span + 1))
    sides = [
        s[0]
        for s, _ in Sizes(num_sizes=count, min_size=smallest, max_size=smallest + span).points(
            [], [1]
        )
    ]
    assert len(sides) == count
    assert sides == sorted(set(sides))
    assert sides[0] == smallest


@pytest.mark.parametrize(("count", "low", "high"), [(0, 1, 2), (1, 0, 2), (1, 3, 2), (10, 1, 5)])
def test_impossible_ranges_are_refused(count, low, high):
    with pytest.raises(UserError, match=r"sweep\b.*num_sizes"):
        Sizes(num_sizes=count, min_size=low, max_size=high)


def test_a_sweep_that_chooses_itself_refuses_another_choice():
    with pytest.raises(UserError, match="leave out input_size"):
        Sizes(num_sizes=2, min_size=1, max_size=9).points([(224, 224)], [1])
    with pytest.raises(UserError, match=r"sweep\.batch_sizes"):
        BatchSizes(batch_sizes=[1, 2]).points([(224, 224)], [4])


def sparse_plan(*words):
    """The plan of a sparse sweep on the scripted device."""
    fake = "model=fake", "gpu=fake", "stopping=fixed", "sweep=sparse"
    return config.typed(compose([*fake, *words]))


def shares(plan, values):
    """Results of the plan's first points with these shares of the algorithm."""
    keys = plan.first_keys()
    results = []
    for key, value in zip(keys, values, strict=False):
        metric = Metric.of("algorithm/flops_share", value)
        results.append(Measured(key=key, status=Status.OK, metrics=[metric]))
    return results


@pytest.mark.parametrize(("anchors", "energies"), [("3", 3), ("null", 6)])
def test_estimated_time_has_energies_at_anchors_only(anchors, energies):
    words = f"sweep.anchors={anchors}", "stopping=brisk", "processes=2"
    plan = sparse_plan(*words, "probes.energy=true", "probes.energy_seconds=4")
    without = sparse_plan(*words, "probes.energy=false")
    added = (plan.point_seconds - without.point_seconds) * len(plan.timed_keys())
    assert added == pytest.approx(energies * (4 + config._PLATEAU_SECONDS))


def test_anchors_are_both_ends_and_a_point_between():
    plan = sparse_plan("processes=2", "probes.layers=true")
    sides = [key.input_size[0] for key in plan.timed_keys() if key.replicate]
    assert sides == [224, 311, 512]
    assert [size[0] for size, _ in plan.anchors([])] == sides
    assert len(plan.first_keys()) == 6
    assert [key.input_size[0] for key in plan.layer_keys()] == sides
    every = sparse_plan("processes=2", "sweep.anchors=null", "sweep.layers_every=1")
    assert len([key for key in every.timed_keys() if key.replicate]) == 6


def test_all_first_points_are_anchors_if_sizes_and_batches_vary():
    plan = sparse_plan("input_size=[224,320,512]", "batch_size=[1,4,16]", "processes=2")
    assert len([key for key in plan.timed_keys() if key.replicate]) == 6


@pytest.mark.parametrize(
    ("found", "count"), [([0, 0], 2), ([0, 0.1], 6), ([0], 6), ([None, None], 6)]
)
def test_algorithm_without_effect_ends_after_two_points(found, count):
    plan = sparse_plan("processes=2")
    results = shares(plan, found)
    assert len(plan.first_keys(results)) == count
    further = [key for key in plan.timed_keys(results) if key.replicate]
    assert {key.input_size for key in further} <= {
        key.input_size for key in plan.first_keys(results)
    }


@pytest.mark.parametrize("word", ["sweep.anchors=2", "sweep.layers_every=0"])
def test_impossible_sparse_passes_are_refused(word):
    with pytest.raises(UserError, match=word.replace(".", r"\.")):
        sparse_plan(word).timed_keys()
