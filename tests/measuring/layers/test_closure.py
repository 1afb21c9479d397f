"""The sum against the clock, and the join with the work."""

import msgspec
import pytest

from perfexp.cost import Geometry, Work, WorkRow
from perfexp.measuring.layers import Kernel, Key, LayerTimes, Pass, RowTimes, TimeSource
from perfexp.measuring.layers.table import close, join


def key(path, which=Pass.forward, *, operation=None, kind="Conv2d"):
    return Key(path=path, call=0, operation=operation, kind=kind, which=which)


def times(busy=0.9, gap=0.1, unattributed=0.0, method=TimeSource.queue, calls=10):
    rows = [RowTimes(key=key("a"), seconds=[busy] * calls, gap_seconds=[gap] * calls)]
    lost = [RowTimes(key=None, seconds=[unattributed] * calls, gap_seconds=[0.0] * calls,
                     kernels=[Kernel(name="lost", count=calls, seconds=unattributed * calls)])]  # fmt: skip
    return LayerTimes(method=method, rows=rows, unattributed=lost if unattributed else [],
                      call_seconds=[busy + gap + unattributed] * calls)  # fmt: skip


@pytest.mark.parametrize(
    ("gap", "clean", "closes"),
    [(0.1, 0.99, True), (0.1, 0.97, False), (0.4, 0.97, True), (0.4, 0.94, False)],
)
def test_two_percent_are_tolerated_and_five_where_gaps_dominate(gap, clean, closes):
    found = close(times(1 - gap, gap), clean)
    assert found.closure.relative == pytest.approx(1 / clean - 1)
    assert found.closure.closes is closes
    assert [doubt.code for doubt in found.doubts] == ([] if closes else ["layers_disagree"])


@pytest.mark.parametrize(
    ("clean", "remedy"), [(0.9, "read the layers as shares"), (0.1, "measure again")]
)
def test_layers_that_are_far_from_the_clock_are_no_shares_either(clean, remedy):
    [doubt] = close(times(), clean).doubts
    assert remedy in doubt.help


def test_without_a_clean_time_there_is_no_closure():
    assert close(times(), None).closure is None


def test_unattributed_time_and_an_unheld_queue_are_flagged():
    found = close(times(0.8, 0.1, 0.1, TimeSource.unheld), 1.0)
    assert [doubt.code for doubt in found.doubts] == ["layers_inexact", "layers_inexact"]
    assert "lost" in found.doubts[0].message
    assert found.closure.unattributed_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("busy", "codes"),
    [(0.4, ["layers_disagree"]), (0.7, []), (0.97, []), (1.04, []), (1.08, ["layers_disagree"])],
)
def test_host_gaps_agree_but_other_kernel_times_disagree(busy, codes):
    found = close(times(busy, 3.0, method=TimeSource.unheld), 1.0)
    assert [doubt.code for doubt in found.doubts] == [*codes, "layers_inexact"]
    assert (
        f"{busy * 1e3:.4g} ms, {busy:.0%} of a call without profiling" in found.doubts[-1].message
    )


def test_one_disturbed_call_moves_no_share():
    """The optimizer's mean is 0.37 of 1.17 there, its median 0.1 of 0.9."""
    seconds = {"a": [0.3] * 10, "b": [0.5] * 10, "optimizer": [0.1] * 9 + [2.8]}
    rows = [
        RowTimes(key=key(name), seconds=each, gap_seconds=[0.0] * 10)
        for name, each in seconds.items()
    ]
    lines = join(
        LayerTimes(method=TimeSource.queue, rows=rows, call_seconds=[0.9] * 9 + [3.6]), None
    )
    assert [line.share for line in lines] == pytest.approx([0.3 / 0.9, 0.5 / 0.9, 0.1 / 0.9])


def test_one_call_that_waited_does_not_make_gaps_dominate():
    given = times(0.9, 0.1)
    given.rows[0].gap_seconds[3], given.call_seconds[3] = 9.1, 10.0
    found = close(given, 0.99).closure
    assert (found.gap_share, found.tolerance) == (pytest.approx(0.1), 0.02)


def work():
    convolution = Geometry(
        in_channels=3, out_channels=8, kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
    )
    numbers = {
        "call": 0,
        "macs": 50,
        "flops": 100,
        "input_gradient_flops": 0,
        "weight_gradient_flops": 100,
    }
    rest = {
        "bytes_min": 40,
        "activation_bytes": 8,
        "parameters": 7,
        "inputs": ((1, 3),),
        "outputs": ((1, 8),),
    }
    first = WorkRow(
        path="a", operation=None, kind="Conv2d", convolution=convolution, **numbers, **rest
    )
    view = WorkRow(path="", operation=0, kind="flatten", **numbers, **rest)
    return Work(rows=(first, view), parameters=7, backward=True, uncounted=())


def test_a_line_has_time_and_work_of_its_row_and_pass():
    given = times(0.5, 0.1)
    given.rows[0].kernels = [Kernel(name="k", count=20, seconds=5.0)]
    given.rows.append(
        RowTimes(key=key("a", Pass.backward), seconds=[0.3] * 10, gap_seconds=[0.0] * 10)
    )
    given.rows.append(
        RowTimes(key=key(None, Pass.loss, kind="loss"), seconds=[0.1] * 10, gap_seconds=[0.0] * 10)
    )
    given.call_seconds = [1.0] * 10
    forward, backward, loss, view = join(given, work())
    assert (forward.seconds.median, forward.gap_seconds.median, forward.share) == (
        0.5,
        0.1,
        pytest.approx(0.6),
    )
    assert (forward.seconds.low, forward.seconds.high) == (0.5, 0.5)
    assert (
        forward.flops,
        forward.macs,
        forward.flops_per_second,
        forward.arithmetic_intensity,
    ) == (100, 50, 200, 2.5)
    assert forward.convolution.kernel == (3, 3)
    assert forward.kernels == {"k": 2.0}
    assert (backward.flops, backward.macs, backward.bytes_min) == (100, None, None)
    assert (loss.kind, loss.flops) == ("loss", None)
    assert (view.kind, view.seconds.median, view.share) == ("flatten", 0.0, 0.0)
    assert sum(line.share for line in (forward, backward, loss, view)) == pytest.approx(1)


def operations(*kinds, which=Pass.forward):
    """Times of the operations of the model's own code."""
    keys = [key("", which, operation=number, kind=kind) for number, kind in enumerate(kinds)]
    return [RowTimes(key=each, seconds=[0.2] * 10, gap_seconds=[0.0] * 10) for each in keys]


def counted(*kinds):
    """Work whose rows are operations of the model's own code: the first has 1 FLOP, the second 2, …"""
    rest = {
        "path": "",
        "call": 0,
        "macs": 0,
        "bytes_min": 1,
        "activation_bytes": 0,
        "parameters": 0,
    }
    rows = [
        WorkRow(operation=number, kind=kind, flops=number + 1, input_gradient_flops=10 * (number + 1),
            weight_gradient_flops=0, inputs=(), outputs=(), **rest)
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    return Work(rows=tuple(rows), parameters=0, backward=True, uncounted=())


def test_operation_has_the_work_counted_at_its_place():
    given = times()
    given.rows = [*operations("add", "cat"), *operations("add", "cat", which=Pass.backward)]
    lines = join(given, counted("add", "cat", "flatten"))
    assert [(line.kind, line.flops) for line in lines] == [
        ("add", 1), ("cat", 2), ("add", 10), ("cat", 20), ("flatten", 3),
    ]  # fmt: skip
    assert lines[-1].seconds.median == 0.0


def test_operations_after_an_uncounted_loss_are_matched_again():
    """What a model computes for its losses has no work, and no row of the work is another's or stands there twice."""
    given = times()
    given.rows = operations(
        "interpolate", "cat", "interpolate", "topk", "sum", "interpolate", "cat"
    )
    lines = join(given, counted("interpolate", "cat", "interpolate", "cat"))
    assert [(line.kind, line.flops) for line in lines] == [
        ("interpolate", 1), ("cat", 2), ("interpolate", None), ("topk", None), ("sum", None),
        ("interpolate", 3), ("cat", 4),
    ]  # fmt: skip


def test_times_survive_json():
    given = close(times(0.8, 0.1, 0.1), 1.0)
    assert msgspec.json.decode(msgspec.json.encode(given), type=LayerTimes) == given


def test_too_few_calls_have_a_median_and_no_interval():
    line = join(times(calls=3), None)[0]
    assert line.seconds.median == 0.9
    assert line.seconds.low is None
