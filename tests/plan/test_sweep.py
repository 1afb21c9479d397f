"""Sizes and batch sizes as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp.errors import UserError
from perfexp.plan.sweep import BatchSizes, Point, Sizes
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
    with pytest.raises(UserError, match="sweep=sizes"):
        Sizes(num_sizes=count, min_size=low, max_size=high)


def test_a_sweep_that_chooses_itself_refuses_another_choice():
    with pytest.raises(UserError, match="leave out input_size"):
        Sizes(num_sizes=2, min_size=1, max_size=9).points([(224, 224)], [1])
    with pytest.raises(UserError, match=r"sweep\.batch_sizes"):
        BatchSizes(batch_sizes=[1, 2]).points([(224, 224)], [4])
