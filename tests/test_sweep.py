"""Sizes and batch sizes as users write them."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfexp import sweep
from perfexp.errors import UserError
from perfexp.records.record import Key, Series, Status
from perfexp.records.record import Point as MeasuredPoint
from perfexp.records.summary import rows
from perfexp.sweep import BatchSizes, Point, Sizes, parse_batch_sizes, parse_sizes


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


@pytest.mark.parametrize("given", [0, -1, "0x5", "axb", 1.5, True, "224x", "1x2x3", [], [224, 224], {"a": 1}])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(UserError, match="input_size"):
        parse_sizes(given)


@pytest.mark.parametrize("given", [0, -4, "4", 1.5, True, [], [1, 1], [1, "x"]])
def test_what_is_no_batch_size_is_refused(given):
    with pytest.raises(UserError, match="batch_size"):
        parse_batch_sizes(given)


def test_a_point_sweep_is_every_size_with_every_batch():
    assert Point().points([(1, 1), (2, 2)], [1, 8]) == [((1, 1), 1), ((1, 1), 8), ((2, 2), 1), ((2, 2), 8)]


def test_sizes_are_evenly_spaced_and_reach_both_ends():
    points = Sizes(num_sizes=10, min_size=224, max_size=512).points([], [1])
    assert [size[0] for size, _ in points] == [224, 256, 288, 320, 352, 384, 416, 448, 480, 512]


@given(st.integers(1, 400), st.integers(0, 400), st.data())
def test_sizes_are_distinct_and_ascend(smallest, span, data):
    count = data.draw(st.integers(1, span + 1))
    sides = [s[0] for s, _ in Sizes(num_sizes=count, min_size=smallest, max_size=smallest + span).points([], [1])]
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


def test_further_processes_measure_odd_sizes_and_their_neighbors(finished):
    """The scripted model takes 38 % longer at 352 than at 384, each time that it is measured."""
    sizes, rule = "input_size=[224,256,288,320,352,384,416,448]", ("stopping=brisk", "stopping.processes=2")
    run = finished("model=fake", "gpu=fake", sizes, *rule, "model.stairs=0.3", "ttfp=false", "tracking=none")
    processes = Counter(point.key.input_size[0] for point in run.record.points)
    alone = [size for size, number in processes.items() if number == 1]
    assert {352, 320, 384} <= {size for size, number in processes.items() if number == 2}
    assert alone
    assert all(point.status is Status.OK for point in run.record.points)
    (message,) = [
        doubt.message for row in rows(run.record) for doubt in row.doubts if doubt.code == "scaling_unexpected"
    ]
    assert "1.38 times that of the larger size 384" in message
    assert message.endswith(": measured by 2 processes")


def test_nothing_is_odd_before_the_first_process_has_measured_all_sizes(build_points):
    points = build_points
    keys = [point.key for point in points]
    again = sweep.odd_sizes(points, keys, 3)
    assert sorted({key.input_size[0] for key in again}) == [190, 200, 210]
    assert sorted({key.replicate for key in again}) == [1, 2]
    assert sweep.odd_sizes(points[:-1], keys, 3) == []


@pytest.fixture
def build_points():
    """`device` of ten sizes in milliseconds, of which 200 is 12 % above the next ones."""
    milliseconds = {160: 2.58, 170: 2.68, 180: 2.78, 190: 2.90, 200: 3.33, 210: 2.98, 220: 3.02, 230: 3.08}
    return [
        MeasuredPoint(
            key=Key(phase="inference", input_size=(size, size), batch_size=1, precision="fp32"),
            status=Status.OK,
            series=[Series(name="device", samples=[1e-3 * ms * (1 + 1e-3 * (-1) ** index) for index in range(20)])],
        )
        for size, ms in milliseconds.items()
    ]
