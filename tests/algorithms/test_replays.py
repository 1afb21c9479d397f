"""Whether work of several kernels is launched at once where its addresses come again, and computes the same."""

import pytest
import torch

from perfexp.algorithms import plan as plan_module
from perfexp.algorithms import replays as replays_module
from perfexp.algorithms.captured import CaptureError, Node
from perfexp.algorithms.codes import Math
from perfexp.algorithms.passes import Pass
from perfexp.algorithms.plan import Plan, Shape
from perfexp.algorithms.replays import _MOST, Replays

HERE = torch.device("cpu")


class Launched:
    """In place of a launch: does what it was made from."""

    made: list["Launched"]

    def __init__(self, enqueue, device):
        self.enqueue, self.streams, self.destroyed = enqueue, [], False
        self.made.append(self)

    def __call__(self, stream):
        self.streams.append(stream)
        self.enqueue()

    def destroy(self):
        self.destroyed = True


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """The launches that were made, in their order."""
    monkeypatch.setattr(Launched, "made", [], raising=False)
    monkeypatch.setattr(replays_module, "Launch", Launched)
    return Launched.made


@pytest.fixture
def plan_of(scripted, monkeypatch):
    """A function that makes a plan of so many kernels."""

    def make(kernels, which=Pass.forward, algorithm="fft"):
        scripted()
        monkeypatch.setattr(plan_module, "nodes_of", lambda enqueue, device: [Node(0, k) for k in range(kernels)])
        shape = Shape((2, 4, 6, 5), (6, 4, 3, 3), (1, 1), (1, 0), (1, 1), 1, torch.float32, False, Math.fma, 0)
        return Plan(which, algorithm, shape)

    return make


@pytest.mark.parametrize("which", list(Pass))
def test_several_kernels_are_launched_at_once_from_the_second_time_on(plan_of, made, which):
    plan = plan_of(5, which)
    first, second = {
        Pass.forward: (plan._shape.inputs, plan._shape.weight),
        Pass.backward_data: (plan._shape.weight, plan._shape.outputs),
        Pass.backward_filter: (plan._shape.inputs, plan._shape.outputs),
    }[which]
    first, second, out = torch.randn(first), torch.randn(second), torch.empty(plan._result)
    expected = plan(first, second)
    assert plan.shorten(HERE)
    addresses = [each.data_ptr() for each in (first, second, out)]
    for calls in range(4):
        out.zero_()
        plan._enqueue(*addresses, 0)
        assert torch.equal(out, expected)
        assert [len(each.streams) for each in made] == ([calls] if calls else [])
    assert made[0].streams == [77, 77, 77]
    elsewhere = torch.empty_like(out)
    plan._enqueue(*addresses[:2], elsewhere.data_ptr(), 0)
    assert len(made) == 1, "at another address it is enqueued"
    assert torch.equal(elsewhere, expected)


def test_a_single_kernel_is_launched_by_cudnn(plan_of):
    plan = plan_of(1, algorithm="implicit_gemm")
    assert not plan.shorten(HERE)
    assert plan._replays is None


def test_while_somebody_captures_it_is_enqueued(made, monkeypatch):
    enqueued, capturing = [], True
    monkeypatch.setattr(replays_module, "capturing", lambda: capturing)
    replays = Replays(lambda *addresses: enqueued.append(addresses), HERE)
    assert [replays(77, (1, 2)) for _ in range(3)] == [False] * 3
    assert made == []
    capturing = False
    assert [replays(77, (1, 2)) for _ in range(2)] == [True] * 2
    capturing = True
    assert not replays(77, (1, 2))
    assert enqueued == [(1, 2)] * 2


def test_what_can_not_be_captured_is_tried_once(monkeypatch):
    tried = []

    def refuses(enqueue, device):
        tried.append(1)
        raise CaptureError("NOT_SUPPORTED")

    monkeypatch.setattr(replays_module, "Launch", refuses)
    replays = Replays(lambda *_: None, HERE)
    assert not any(replays(77, addresses) for addresses in [(1,), (1,), (1,), (2,), (2,)])
    assert tried == [1]


def test_addresses_that_never_come_again_are_forgotten(made):
    replays = Replays(lambda *_: None, HERE)
    assert [replays(77, (0,)), replays(77, (0,))] == [False, True]
    assert not any(replays(77, (place,)) for place in range(1, _MOST + 1))
    assert made[0].destroyed
    assert len(replays._launches) <= _MOST
    assert [replays(77, (0,)), replays(77, (0,))] == [False, True]
