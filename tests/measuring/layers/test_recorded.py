"""Profiles that were recorded on a GPU: every nanosecond has a name, and the sum is the clock's."""

import re

import pytest

from perfexp.measuring.layers import Pass, TimeSource
from perfexp.measuring.layers.partition import divide
from perfexp.measuring.layers.table import close, times_of
from tests.measuring.layers.recorded import EVERY, TRAINING, recording, sum_ns


def calls_of(name):
    return divide(recording(name)[1], held=True)


def kernels_of(name):
    """The device's work behind the spin, in the order in which it ran."""
    kernels = sorted(
        (event for event in recording(name)[1] if event.is_kernel), key=lambda event: event.start_ns
    )
    assert "spin_kernel" in kernels[0].name
    return kernels


@pytest.mark.parametrize("name", EVERY)
def test_rows_gaps_and_unattributed_time_add_up_to_the_span(name):
    calls = calls_of(name)
    assert calls
    assert all(sum_ns(call) == call.span_ns for call in calls)


@pytest.mark.parametrize("name", EVERY)
def test_calls_one_after_the_other_partition_the_time(name):
    spin, *kernels = kernels_of(name)
    assert (
        sum(call.span_ns for call in calls_of(name))
        == max(each.end_ns for each in kernels) - spin.end_ns
    )


@pytest.mark.parametrize("name", EVERY)
def test_every_kernel_is_counted_once_and_has_a_row(name):
    calls = calls_of(name)
    assert all(not call.unattributed for call in calls)
    counted = sum(
        count for call in calls for row in call.rows.values() for count, _ in row.kernels.values()
    )
    assert counted == len(kernels_of(name)) - 1


@pytest.mark.parametrize("name", EVERY)
def test_busy_time_is_what_the_device_was_busy(name):
    _, *kernels = kernels_of(name)
    busy, until = 0, 0
    for kernel in kernels:
        busy += max(0, kernel.end_ns - max(until, kernel.start_ns))
        until = max(until, kernel.end_ns)
    assert sum(row.busy_ns for call in calls_of(name) for row in call.rows.values()) == busy


@pytest.mark.parametrize("name", EVERY)
def test_calls_in_a_held_queue_add_up_to_the_unprofiled_time(name):
    calls = calls_of(name)
    assert not any(call.starved for call in calls)
    times = close(times_of(calls, TimeSource.queue), recording(name)[0])
    assert times.closure.closes, times.closure
    assert [doubt.code for doubt in times.doubts] == []
    assert times.closure.tolerance == (0.05 if times.closure.gap_share > 0.2 else 0.02)


@pytest.mark.parametrize("name", TRAINING)
def test_gradients_of_every_convolution_are_in_its_row(name):
    """Against the order of the graph: a convolution's node runs inside the engine's event of its own number."""
    events = recording(name)[1]
    of_node = {}  # sequence number: names of kernels launched while its node was under way, by time alone
    nodes = [event for event in events if event.name == "ConvolutionBackward0"]
    for kernel in (event for event in events if event.is_kernel):
        launch = next(
            each for each in events if each.is_runtime and each.correlation == kernel.correlation
        )
        for node in nodes:
            if node.thread == launch.thread and node.start_ns <= launch.start_ns < node.end_ns:
                of_node.setdefault(node.sequence, []).append(kernel.name)
    calls = calls_of(name)
    convolutions = [event for event in events if event.name == "aten::conv2d"]
    assert len(of_node) == len(convolutions) == len(nodes)
    expected = sorted(sorted(names) for names in of_node.values())
    found = [
        sorted(kernel for kernel, (count, _) in row.kernels.items() for _ in range(count))
        for call in calls
        for key, row in call.rows.items()
        if key.which is Pass.backward and is_convolution(key.path)
    ]
    assert sorted(found) == expected


@pytest.mark.parametrize("name", TRAINING)
def test_gradients_are_in_the_row_of_their_forward_module(name):
    events = recording(name)[1]
    for call in calls_of(name):
        forward = {
            key.path for key in call.rows if key.which is Pass.forward and is_convolution(key.path)
        }
        backward = {
            key.path for key in call.rows if key.which is Pass.backward and is_convolution(key.path)
        }
        assert forward == backward
        assert len(forward) == sum(event.name == "aten::conv2d" for event in events) / len(
            calls_of(name)
        )


def test_vgg16_inner_convolutions_have_two_gradients_first_one():
    call = calls_of("vgg16_8_train")[0]
    names = {
        key.path: " ".join(row.kernels)
        for key, row in call.rows.items()
        if key.which is Pass.backward and is_convolution(key.path)
    }
    assert len(names) == 13
    assert all("wgrad" in kernels for kernels in names.values())
    assert {path for path, kernels in names.items() if "dgrad" not in kernels} == {"features.0"}


def test_chain_layers_run_backward_in_reverse_order():
    rows = list(calls_of("vgg16_8_train")[0].rows)
    forward = [key.path for key in rows if key.which is Pass.forward]
    backward = [key.path for key in rows if key.which is Pass.backward and key.path is not None]
    assert backward == forward[::-1]


def test_gradients_at_resnet50_shortcuts_have_their_own_rows():
    keys = [key for key in calls_of("resnet50_16_train")[0].rows if key.which is Pass.accumulation]
    assert len(keys) == 16
    assert all(key.path.endswith(".conv1") for key in keys)


def test_what_is_in_no_module_is_named_by_its_phase():
    call = calls_of("vgg16_8_train")[0]
    outside = {(key.kind, key.which) for key in call.rows if key.path is None}
    assert outside == {
        ("loss", Pass.loss),
        ("loss", Pass.backward),
        ("backward", Pass.backward),
        ("optimizer", Pass.optimizer_step),
    }


def test_repeatedly_called_module_has_a_row_for_each_call():
    call = calls_of("resnet50_1_infer")[0]
    relus = [key.call for key in call.rows if key.path == "layer1.0.relu"]
    assert relus == [0, 1, 2]


def is_convolution(path):
    """By the paths of vgg16 and resnet50."""
    if path is None:
        return False
    number = re.fullmatch(r"features\.(\d+)", path)
    if number:
        return int(number[1]) in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
    return "conv" in path or path.endswith("downsample.0")
