"""Stamps on a clock that the model itself moves."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from perfexp.cost.tape import nodes_behind
from perfexp.devices.fake import FakeDevice
from perfexp.measuring.layers import Pass, TimeSource
from perfexp.measuring.layers.profiling import stamp_layers
from perfexp.measuring.modes import State, Step


class Slow(torch.autograd.Function):
    """Known time forward and backward."""

    @staticmethod
    def forward(ctx, x, device, forward, backward):
        ctx.device, ctx.backward_seconds = device, backward
        device.launch(0.0, forward)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.device.launch(0.0, ctx.backward_seconds)
        return grad * 1.0, None, None, None


class Layer(nn.Module):
    def __init__(self, device, forward, backward):
        super().__init__()
        self.given = device, forward, backward

    def forward(self, x):
        return Slow.apply(x, *self.given)


class Net(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.first, self.second = Layer(device, 3e-3, 5e-3), Layer(device, 1e-3, 2e-3)
        self.device = device

    def forward(self, x):
        x = self.second(self.first(self.first(x)))
        self.device.launch(0.0, 0.5e-3)  # the module's own code
        return torch.add(x, Waiting(self.device))


class Waiting:
    def __init__(self, device):
        self.device = device

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args[1].device.launch(0.0, 0.25e-3)
        return func(args[0], 1.0)


def stamped(device, *, clean, train=True, leaves_loss=True):
    model, state = Net(device), State(source=list)

    def forward():
        state.outputs = model(torch.ones(2, requires_grad=train))

    def loss():
        device.launch(0.0, 0.125e-3)
        made = state.outputs.sum()
        state.loss = made if leaves_loss else None
        state.batch = made

    segments = [("forward", forward)]
    if train:
        segments += [("loss", loss), ("backward", lambda: state.batch.backward())]
    step = Step(
        call=forward,
        segments=tuple(segments),
        active=nullcontext,
        batch_size=2,
        state=state,
        trains=train,
    )
    return stamp_layers(step, model, device, clean_seconds=clean, calls=5)


def found(times):
    return {
        (row.key.path, row.key.call, row.key.operation, str(row.key.which)): pytest.approx(
            row.seconds[0]
        )
        for row in times.rows
        if row.seconds[0]
    }


FORWARD = {
    ("first", 0, None, "forward"): 3e-3,
    ("first", 1, None, "forward"): 3e-3,
    ("second", 0, None, "forward"): 1e-3,
    ("", 0, None, "forward"): 0.5e-3,
    ("", 0, 0, "forward"): 0.25e-3,
}
BACKWARD = {
    ("first", 0, None, "backward"): 5e-3,
    ("first", 1, None, "backward"): 5e-3,
    ("second", 0, None, "backward"): 2e-3,
}


def test_known_times_are_found_forward_and_backward_and_close():
    times = stamped(FakeDevice(asynchronous=False), clean=19.875e-3)
    assert found(times) == {**FORWARD, **BACKWARD, (None, 0, None, "loss"): 0.125e-3}
    assert times.method is TimeSource.stamps
    assert times.calls == 5
    assert times.own_seconds == 0
    assert times.no_backward is None
    assert times.closure.relative == pytest.approx(0)
    assert times.doubts == []


def test_the_marks_own_time_is_taken_off_and_told():
    class Ticking(FakeDevice):
        def now_ns(self):
            self.launch(0.0, 1e-6)  # every reading of the clock takes a microsecond
            return super().now_ns()

    device = Ticking(asynchronous=False)
    times = stamped(device, clean=19.875e-3)
    assert times.own_seconds > 10e-6
    assert times.closure.closes


def test_without_a_loss_there_are_forward_rows_and_a_reason():
    times = stamped(FakeDevice(asynchronous=False), clean=19.875e-3, leaves_loss=False)
    assert "loss" in times.no_backward
    outside = {(None, 0, None, "loss"): 0.125e-3, (None, 0, None, "backward"): 12e-3}
    assert found(times) == {**FORWARD, **outside}


def test_inference_has_forward_rows_only():
    times = stamped(FakeDevice(asynchronous=False), clean=7.75e-3, train=False)
    assert found(times) == FORWARD
    assert {row.key.which for row in times.rows} == {Pass.forward}
    assert times.closure.closes


def test_a_clean_time_that_differs_is_a_doubt():
    times = stamped(FakeDevice(asynchronous=False), clean=15e-3)
    assert [doubt.code for doubt in times.doubts] == ["layers_disagree"]


def test_nodes_that_add_to_parameters_are_not_followed():
    layer = nn.Linear(2, 2)
    names = [node.name() for node in nodes_behind(layer(torch.ones(1, 2)).sum())]
    assert sorted(names) == ["AddmmBackward0", "SumBackward0", "TBackward0"]
