"""Profiles written by hand: known truth for what a recording does not show."""

import pytest

from perfexp.layers import Key, Pass
from perfexp.layers.events import Event, Mark, Scope, parse
from perfexp.layers.partition import divide
from tests.layers.recorded import sum_ns

CALL = Mark(Scope.call, 0).name


def module(path, call=0, *, whole=True, kind="Conv2d"):
    return Mark(Scope.module, call, whole, kind, path).name


def operation(number, kind="add"):
    return Mark(Scope.operation, number, kind=kind).name


def phase(name):
    return Mark(Scope.phase, kind=name).name


def host(name, start, end, number, **more):
    return Event(name, start, end - start, False, 100 + more.get("thread", 1), number, 0, **more)


def kernel(name, start, end, linked, *, stream=7, number=None):
    return Event(
        name, start, end - start, True, stream, 9000 + start if number is None else number, linked
    )


def row(path, which=Pass.forward, *, call=0, operation=None, kind="Conv2d"):
    return Key(path=path, call=call, operation=operation, kind=kind, which=which)


def taken(call):
    return {key: (spent.busy_ns, spent.gap_ns) for key, spent in call.rows.items()}


def only(events, *, held=False):
    (call,) = divide(events, held=held)
    assert sum_ns(call) == call.span_ns
    return call


def test_a_gap_belongs_to_the_row_whose_kernel_ends_it():
    call = only([
        host(CALL, 0, 100, 1), host(module("a"), 1, 20, 2), host(module("b"), 30, 50, 3),
        kernel("ka", 200, 250, 2), kernel("kb", 263, 300, 3),
    ])  # fmt: skip
    assert call.span_ns == 100
    assert taken(call) == {row("a"): (50, 0), row("b"): (37, 13)}


def test_a_held_call_begins_where_the_hold_ends():
    call = only([
        host("cudaLaunchKernel", 0, 1, 77), kernel("spin", 2, 190, 0, number=77),
        host(CALL, 2, 100, 1), host(module("a"), 3, 20, 2), kernel("ka", 200, 250, 2),
    ], held=True)  # fmt: skip
    assert taken(call) == {row("a"): (50, 10)}
    assert not call.starved


def test_call_begun_by_the_device_before_its_issue_is_starved():
    call = only([host(CALL, 0, 100, 1), host(module("a"), 1, 20, 2), kernel("ka", 50, 150, 2)])
    assert call.starved


def test_kernels_on_two_streams_share_the_time_in_which_both_run():
    call = only([
        host(CALL, 0, 9, 1), host(module("a"), 1, 2, 2), host(module("b"), 3, 4, 3),
        kernel("ka", 100, 160, 2), kernel("kb", 140, 201, 3, stream=8),
    ])  # fmt: skip
    assert call.span_ns == 101
    assert taken(call) == {row("a"): (50, 0), row("b"): (51, 0)}


def test_odd_nanosecond_goes_to_the_earlier_kernel():
    call = only([
        host(CALL, 0, 9, 1), host(module("a"), 1, 2, 2), host(module("b"), 3, 4, 3),
        kernel("ka", 100, 111, 2), kernel("kb", 100, 111, 3, stream=8),
    ])  # fmt: skip
    assert sorted(taken(call).values()) == [(5, 0), (6, 0)]


def test_kernel_without_a_link_is_joined_by_its_launch_time():
    call = only([
        host(CALL, 0, 90, 1), host(module("a"), 1, 50, 2),
        host("cudaLaunchKernel", 10, 12, 500), kernel("ka", 100, 110, 0, number=500),
    ])  # fmt: skip
    assert taken(call) == {row("a"): (10, 0)}


def test_unknown_kernel_is_named_and_stays_in_the_sum():
    call = only([
        host(CALL, 0, 90, 1), host(module("a"), 1, 50, 2),
        kernel("ka", 100, 110, 2), kernel("mystery", 115, 120, 0), kernel("ka", 120, 130, 2),
    ])  # fmt: skip
    assert taken(call) == {row("a"): (20, 0)}
    assert {name: (spent.busy_ns, spent.gap_ns) for name, spent in call.unattributed.items()} == {
        "mystery": (5, 5)
    }


def test_zero_length_kernel_counts_with_the_gap_before_it():
    call = only([
        host(CALL, 0, 90, 1), host(module("a"), 1, 50, 2), host(module("b"), 60, 70, 3),
        kernel("ka", 100, 110, 2), kernel("kb", 115, 115, 3),
    ])  # fmt: skip
    assert taken(call) == {row("a"): (10, 0), row("b"): (0, 5)}
    assert call.rows[row("b")].kernels == {"kb": (1, 0)}


def test_the_devices_copies_of_annotations_are_no_kernels():
    copy = Event(module("a"), 100, 50, True, 7, 2, 0, annotation=True)
    call = only([host(CALL, 0, 9, 1), host(module("a"), 1, 2, 2), copy, kernel("ka", 100, 110, 2)])
    assert call.span_ns == 10
    assert not call.unattributed


def test_profiler_overhead_does_not_replace_an_operator():
    overhead = Event("Activity Buffer Request", 2, 90, False, 0, 2, 0)
    call = only(
        [host(CALL, 0, 99, 1), overhead, host(module("a"), 1, 50, 2), kernel("ka", 100, 110, 2)]
    )
    assert taken(call) == {row("a"): (10, 0)}


def test_module_that_calls_another_has_rows_of_operations():
    call = only([
        host(CALL, 0, 90, 1), host(module("block", whole=False, kind="Block"), 1, 80, 2),
        host(module("block.conv"), 5, 20, 3), host("aten::conv2d", 6, 19, 4),
        host(operation(0), 30, 40, 5), host("aten::add", 31, 39, 6), host("custom launch", 60, 61, 7),
        kernel("kc", 100, 110, 4), kernel("ka", 110, 130, 6), kernel("kx", 130, 135, 7),
    ])  # fmt: skip
    assert taken(call) == {
        row("block.conv"): (10, 0),
        row("block", operation=0, kind="add"): (20, 0),
        row("block", kind="Block"): (5, 0),
    }


def test_torch_layer_that_calls_a_module_has_rows_for_both():
    call = only([
        host(CALL, 0, 90, 1), host(module("outer", kind="Sequential"), 1, 80, 2), host(module("outer.0"), 5, 20, 3),
        kernel("kc", 100, 110, 3), kernel("ko", 110, 115, 2),
    ])  # fmt: skip
    assert set(taken(call)) == {row("outer.0"), row("outer", kind="Sequential")}


def test_a_module_in_a_loop_has_a_row_for_each_call():
    call = only([
        host(CALL, 0, 90, 1), host(module("a", 0), 1, 10, 2), host(module("a", 1), 20, 30, 3),
        kernel("k", 100, 110, 2), kernel("k", 110, 140, 3),
    ])  # fmt: skip
    assert taken(call) == {row("a"): (10, 0), row("a", call=1): (30, 0)}


def backward(*nodes, forward_sequence=7):
    """A convolution that is called in the main thread, with nodes in autograd's."""
    return [
        host(CALL, 0, 500, 1), host(phase("forward"), 1, 100, 2), host(module("a"), 2, 50, 3),
        host("aten::conv2d", 3, 40, 4, sequence=forward_sequence),
        host("aten::cudnn_convolution", 4, 39, 5), host(phase("backward"), 200, 400, 6), *nodes,
    ]  # fmt: skip


def node(name, sequence, start, end, number):
    event = host(
        f"autograd::engine::evaluate_function: {name}",
        start,
        end,
        number,
        sequence=sequence,
        thread=2,
    )
    inner = host(name, start + 1, end - 20, number + 1, sequence=sequence, thread=2)
    return [event._replace(forward_thread=1), inner._replace(forward_thread=1)]


def test_backward_thread_kernel_goes_to_its_forward_operator():
    call = only([
        *backward(*node("ConvolutionBackward0", 7, 210, 300, 20)),
        host("aten::convolution_backward", 212, 250, 30, thread=2),
        kernel("forward", 600, 610, 5), kernel("dgrad", 610, 640, 30),
    ])  # fmt: skip
    assert taken(call) == {row("a"): (10, 0), row("a", Pass.backward): (30, 0)}


def test_engine_sums_are_accumulation_other_work_is_the_nodes():
    call = only([
        *backward(*node("ConvolutionBackward0", 7, 210, 300, 20)),
        host("aten::add", 285, 290, 30, thread=2), host("aten::sum", 291, 295, 31, thread=2),
        kernel("add", 610, 640, 30), kernel("sum", 640, 645, 31),
    ])  # fmt: skip
    assert taken(call) == {row("a", Pass.accumulation): (30, 0), row("a", Pass.backward): (5, 0)}


def test_second_node_of_an_operator_belongs_to_it():
    call = only([
        *backward(*node("torch::autograd::CopySlices", 8, 210, 300, 20)),
        host("aten::copy_", 212, 250, 30, thread=2), kernel("copy", 610, 640, 30),
    ])  # fmt: skip
    assert set(taken(call)) == {row("a", Pass.backward)}


@pytest.mark.parametrize("sequence", [-1, 3])
def test_node_without_a_known_forward_operator_is_unattributed(sequence):
    call = only([
        *backward(*node("StrangeBackward", sequence, 210, 300, 20)),
        kernel("forward", 600, 610, 5), kernel("strange", 610, 640, 21),
    ])  # fmt: skip
    assert {name: spent.busy_ns for name, spent in call.unattributed.items()} == {"strange": 30}


def test_gradient_accumulation_is_a_row_of_the_parameters_module():
    events = backward(
        host(
            "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
            210,
            300,
            20,
            thread=2,
        ),
        host("torch::autograd::AccumulateGrad", 211, 290, 21, thread=2),
        host("aten::add_", 212, 250, 22, thread=2),
    )
    known = host(Mark(Scope.parameter, path="a").name, 260, 261, 23, thread=2)
    add = kernel("add", 610, 640, 22)
    for found, path in (([known], "a"), ([], None)):
        assert set(taken(only([*events, *found, add]))) == {
            row(path, Pass.accumulation, kind="AccumulateGrad")
        }


def test_recomputation_for_the_backward_pass_counts_as_backward():
    call = only([
        *backward(*node("CheckpointFunctionBackward", 7, 210, 300, 20)),
        host(module("a"), 215, 260, 40, thread=2), host("aten::relu", 220, 250, 41, thread=2),
        kernel("again", 610, 640, 41),
    ])  # fmt: skip
    assert taken(call) == {row("a", Pass.backward): (30, 0)}


def test_a_range_that_names_its_module_is_read_as_it_was_written():
    mark = Mark(Scope.module, 3, True, "Conv2d", "odd:name.0|x")
    assert parse(mark.name) == mark
    assert parse("aten::add") is None
