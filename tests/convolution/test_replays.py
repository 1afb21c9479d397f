"""Whether work of several kernels is launched at once where its addresses come again, and computes the same."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from perfexp.convolution import replays as replays_module
from perfexp.convolution.convolution_plan import ConvolutionPlan, Shape
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES, CudnnError, Math
from perfexp.convolution.forced import Forced
from perfexp.convolution.replays import _MOST_ONCE, CaptureError, Replays


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


class SameMemory(TorchFunctionMode):
    """While entered, `torch.empty` gives a tensor of one shape at one address, as a device's allocator does."""

    def __init__(self):
        super().__init__()
        self.kept, self.before = {}, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.empty:
            return function(*args, **(kwargs or {}))
        if args not in self.kept:
            self.kept[args] = function(*args, **(kwargs or {}))
        return self.kept[args]

    def moved(self):
        """From now on the addresses are others."""
        self.before.append(self.kept)
        self.kept = {}


@pytest.fixture
def made(monkeypatch):
    """The launches that were made, in their order."""
    replays_module.forget()
    monkeypatch.setattr(Launched, "made", [], raising=False)
    monkeypatch.setattr(replays_module, "GraphLaunch", Launched)
    monkeypatch.setattr(replays_module, "current_stream", lambda device: 77)
    return Launched.made


@pytest.fixture
def work():
    """Replays, and the addresses of what was enqueued."""
    enqueued = []
    return Replays(lambda *addresses: enqueued.append(addresses), 0), enqueued


@pytest.mark.parametrize("which", list(CODES))
def test_pass_is_launched_as_a_graph_once_its_addresses_recur(scripted, monkeypatch, made, which):
    cudnn = scripted(workspace=lambda *_: 256)
    monkeypatch.setattr(replays_module, "GraphLaunch", Launched)
    shape = Shape(
        (2, 4, 6, 5), (6, 4, 3, 3), (1, 1), (1, 0), (1, 1), 1, torch.float32, False, Math.fma, 0
    )
    plan = ConvolutionPlan(which, "fft", shape)
    first, second = (
        torch.randn(size)
        for size in {
            Pass.forward: (shape.inputs, shape.weight),
            Pass.backward_data: (shape.weight, shape.outputs),
            Pass.backward_filter: (shape.inputs, shape.outputs),
        }[which]
    )
    with SameMemory() as memory:
        expected = plan(first, second).clone()
        assert made == []
        for calls in range(1, 4):
            for tensor in memory.kept.values():
                tensor.zero_()
            assert torch.equal(plan(first, second), expected)
            assert [each.streams for each in made] == [[77] * calls]
        memory.moved()
        assert torch.equal(plan(first, second), expected)
    assert len(made) == 1, "at another address it is enqueued"
    assert replays_module.launched_share() == 3 / 5
    assert len(cudnn.calls) == 5


def test_pass_is_enqueued_and_not_remembered_during_a_capture(made, work, monkeypatch):
    replays, enqueued = work
    for capturing in (True, True, False, False, True):
        monkeypatch.setattr(replays_module, "capturing", lambda capturing=capturing: capturing)
        replays((1, 2))
    assert enqueued == [(1, 2)] * 5
    assert [each.streams for each in made] == [[77]]


def test_run_eager_enqueues_everything_and_counts_nothing(made, work):
    replays, enqueued = work
    with Forced(name="gemm").run_eager(replays_module.eager):
        for _ in range(3):
            replays((1, 2))
    assert enqueued == [(1, 2)] * 3
    assert (made, replays_module.launched_share()) == ([], None)
    Forced(name="gemm").run_eager(lambda: replays((1, 2)))
    assert (len(enqueued), replays_module.launched_share()) == (4, None)
    for _ in range(2):
        replays((1, 2))
    assert replays_module.launched_share() == 1 / 2


@pytest.mark.parametrize("error", [CaptureError, CudnnError])
def test_failed_capture_is_not_retried_before_the_next_point(monkeypatch, work, error):
    tried, (replays, enqueued) = [], work

    def refuses(enqueue, device):
        tried.append(device)
        raise error("OUT_OF_MEMORY")

    monkeypatch.setattr(replays_module, "GraphLaunch", refuses)
    sequence = [(1,), (1,), (1,), (2,), (2,)]
    for addresses in sequence:
        replays(addresses)
    assert enqueued == sequence
    assert tried == [torch.device("cuda", 0)]
    replays_module.forget()
    for addresses in sequence:
        replays(addresses)
    assert len(tried) == 2


def test_addresses_that_never_come_again_cost_no_launch(made, work):
    replays, _ = work
    replays((0,))
    replays((0,))
    for place in range(1, 10 * _MOST_ONCE):
        replays((place,))
    replays((0,))
    assert [each.streams for each in made] == [[77, 77]]
    assert len(replays._once) <= _MOST_ONCE


def test_what_is_more_than_may_be_kept_is_enqueued(made, monkeypatch):
    monkeypatch.setattr(replays_module, "_MOST_LAUNCHES", 3)
    enqueued = []
    every = [Replays(lambda *addresses: enqueued.append(addresses), 0) for _ in range(5)]
    for _ in range(4):
        for replays in every:
            replays((0,))
    assert [each.streams for each in made] == [[77] * 3] * 3, "none is captured again and again"
    assert replays_module.launched_share() == 9 / 20


def test_everything_is_given_back_before_the_next_point(made, work, monkeypatch):
    replays, _ = work
    for addresses in ((0,), (0,), (1,)):
        replays(addresses)
    monkeypatch.setattr(Launched, "destroy", lost := _Lost())
    Forced(name="gemm").begin_point()
    assert lost.asked == 1, "a device that is lost is no reason to fail"
    assert (replays._launches, replays._once, replays_module.launched_share()) == ({}, {}, None)


class _Lost:
    asked = 0

    def __call__(self):
        self.asked += 1
        raise CaptureError("ILLEGAL_ADDRESS")
