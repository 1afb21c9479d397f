"""Whether work of several kernels is launched at once where its addresses come again, and computes the same."""

import pytest
import torch

from perfexp.algorithms import replays as replays_module
from perfexp.algorithms.captured import CaptureError
from perfexp.algorithms.codes import Math
from perfexp.algorithms.cudnn import CudnnError
from perfexp.algorithms.forced import Forced
from perfexp.algorithms.passes import Pass
from perfexp.algorithms.plan import Plan, Shape
from perfexp.algorithms.replays import _MOST, Replays

HERE = 0


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


@pytest.fixture
def made(monkeypatch):
    """The launches that were made, in their order."""
    monkeypatch.setattr(Launched, "made", [], raising=False)
    monkeypatch.setattr(replays_module, "Launch", Launched)
    return Launched.made


@pytest.mark.parametrize("which", list(Pass))
def test_a_pass_is_launched_from_the_second_time_on_that_its_addresses_come(scripted, monkeypatch, which):
    scripted(workspace=lambda *_: 256)
    monkeypatch.setattr(Launched, "made", made := [], raising=False)
    monkeypatch.setattr(replays_module, "Launch", Launched)
    shape = Shape((2, 4, 6, 5), (6, 4, 3, 3), (1, 1), (1, 0), (1, 1), 1, torch.float32, False, Math.fma, 0)
    plan = Plan(which, "fft", shape)
    first, second = (
        torch.randn(size)
        for size in {
            Pass.forward: (shape.inputs, shape.weight),
            Pass.backward_data: (shape.weight, shape.outputs),
            Pass.backward_filter: (shape.inputs, shape.outputs),
        }[which]
    )
    out, workspace = torch.empty(plan._result), torch.empty(256, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda size, **_: workspace if size == 256 else out)
    expected = plan(first, second).clone()
    for calls in range(1, 4):
        out.zero_()
        assert torch.equal(plan(first, second), expected)
        assert [each.streams for each in made] == [[77] * calls]
    out = torch.zeros_like(out)
    assert torch.equal(plan(first, second), expected)
    assert len(made) == 1, "at another address it is enqueued"


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


@pytest.mark.parametrize("error", [CaptureError, CudnnError])
def test_what_can_not_be_captured_is_tried_once(monkeypatch, error):
    tried = []

    def refuses(enqueue, device):
        tried.append(1)
        raise error("NOT_SUPPORTED")

    monkeypatch.setattr(replays_module, "Launch", refuses)
    replays = Replays(lambda *_: None, HERE)
    assert not any(replays(77, addresses) for addresses in [(1,), (1,), (1,), (2,), (2,)])
    assert tried == [1]


def test_the_oldest_addresses_are_forgotten_first(made):
    replays_module.forget()
    one, other = Replays(lambda *_: None, HERE), Replays(lambda *_: None, HERE)
    assert [one(77, (0,)), one(77, (0,)), other(77, (0,)), other(77, (0,))] == [False, True, False, True]
    assert not any(other(77, (place,)) for place in range(1, _MOST))
    assert [each.destroyed for each in made] == [True, False]
    assert [one(77, (0,)), one(77, (0,))] == [False, True], "it may come again"
    assert len(one._launches) + len(other._launches) == _MOST


def test_everything_is_given_back_before_the_next_point(made):
    replays = Replays(lambda *_: None, HERE)
    assert [replays(77, (0,)), replays(77, (0,)), replays(77, (1,))] == [False, True, False]
    Forced(name="gemm").forget()
    assert made[0].destroyed
    assert replays._launches == {}
