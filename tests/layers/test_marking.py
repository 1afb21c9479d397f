"""Calls of real models on the CPU: rows are those of `perfexp.work`, and the models are left as they were."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from perfexp.layers import Pass
from perfexp.layers.events import Event, Scope
from perfexp.layers.marking import Opaque, Ranges, marking, outline_of, ranged
from perfexp.layers.partition import divide
from perfexp.layers.profiling import event_of
from perfexp.work.count import count
from tests.layers.recorded import sum_ns


class Block(nn.Module):
    """A shortcut, a layer that is called twice, and functions."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        y = self.relu(self.norm(self.conv(x)))
        y = self.relu(self.conv(y) + x)
        assert y.shape[1] == x.size(1)
        return torch.cat([y, torch.nn.functional.max_pool2d(y, 3, 1, 1)], 1)[:, :4]


class Net(nn.Module):
    """Blocks in a loop, one of them under two names, a module that is never called, attention, a custom gradient."""

    def __init__(self):
        super().__init__()
        self.block, self.never = Block(), nn.Linear(3, 3)
        self.again = self.block
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Doubling())
        self.hooked = 0
        self.tail[0].register_forward_hook(self.hook)

    def hook(self, *_):
        self.hooked += 1

    def forward(self, x):
        for block in (self.block, self.again):
            x = block(x)
        x = x.flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.tail(x).mean(dim=1)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Doubling(nn.Module):
    def forward(self, x):
        return Double.apply(x) + 1


def seen(run):
    """What torch's profiler sees on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        run()
    return [event_of(event) for event in profiler.profiler.kineto_results.events()]


def on_a_device(events):
    """A device that runs a kernel of 10 ns for every operator that calls no other: where it was launched is known."""
    operators = [event for event in events if event.name.startswith("aten::")]
    begin = max(event.end_ns for event in events)
    return [
        *events,
        *(
            Event(event.name, begin + 10 * place, 10, True, 7, 10**9 + place, event.correlation)
            for place, event in enumerate(operators)
        ),
    ]


def marked(model, call):
    outline = outline_of(call, model)
    with marking(model, outline, Ranges()) as marker:

        def run():
            marker.restart()
            with ranged(Scope.call):
                call()

        events = seen(run)
    assert marker.strayed is None
    (times,) = divide(on_a_device(events), held=False)
    assert sum_ns(times) == times.span_ns
    return times


def forward(model, inputs):
    def run():
        with torch.no_grad():
            model(inputs)

    return run


def training(model, inputs):
    def run():
        model.zero_grad()
        with ranged(Scope.phase, kind="forward"):
            outputs = model(inputs)
        with ranged(Scope.phase, kind="loss"):
            loss = outputs.square().mean()
        with ranged(Scope.phase, kind="backward"):
            loss.backward()

    return run


def places(keys, *passes):
    return [
        (key.path, key.call, key.operation)
        for key in keys
        if key.path is not None and key.which in passes
    ]


@pytest.mark.parametrize("train", [False, True])
def test_forward_rows_equal_the_counted_work_in_the_same_order(train):
    model, inputs = Net().train(train), torch.rand(2, 4, 6, 6)
    rows = [(row.path, row.call, row.operation) for row in count(model, inputs).rows]
    found = places(marked(model, forward(model, inputs)).rows, Pass.forward)
    # a hook or an operator of the profile may have no work, but every row of the work was seen
    assert [place for place in found if place in rows] == rows
    assert [place for place in found if place not in rows] == []


def test_training_operators_have_rows_gradients_beside_forward():
    model, inputs = Net().train(), torch.rand(2, 4, 6, 6)
    times = marked(model, training(model, inputs))
    assert not times.unattributed
    found = set(places(times.rows, Pass.forward))
    assert set(places(times.rows, Pass.backward)) <= found
    for path, call in (("block.conv", 0), ("block.conv", 3), ("tail.0", 0), ("attention", 0)):
        assert (path, call, None) in places(times.rows, Pass.backward)
    assert {(key.kind, str(key.which)) for key in times.rows if key.path is None} == {
        ("loss", "loss"), ("loss", "backward"), ("backward", "backward"),
    }  # fmt: skip


def test_gradient_accumulation_is_in_rows_of_its_modules():
    model, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.rand(2, 4)

    def run():
        training(model, inputs)()
        model(inputs).sum().backward()  # now there is something to add to

    times = marked(model, run)
    keys = [key for key in times.rows if key.kind == "AccumulateGrad"]
    assert {key.path for key in keys} == {"0", "1"}
    assert {key.which for key in keys} == {Pass.accumulation}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_count_as_backward(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, inputs = Checkpointed(), torch.rand(2, 4, requires_grad=True)
    times = marked(model, training(model, inputs))
    assert set(places(times.rows, Pass.forward)) >= {("inner.0", 0, None), ("inner.1", 0, None)}
    assert set(places(times.rows, Pass.backward)) >= {("inner.0", 0, None), ("inner.1", 0, None)}
    assert all(call == 0 for _, call, _ in places(times.rows, *Pass))


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_left_as_it_was(fails):
    model, inputs = Net().eval(), torch.rand(2, 4, 6, 6)
    before = copy.deepcopy(model.state_dict())
    call = nn.Module.__call__
    hooks = {
        name: (dict(module._forward_hooks), dict(module._forward_pre_hooks))
        for name, module in model.named_modules()
    }

    @contextmanager
    def expected():
        if fails:
            with pytest.raises(RuntimeError):
                yield
        else:
            yield

    outline = outline_of(forward(model, inputs), model)
    with expected(), marking(model, outline, Ranges()):
        model(torch.rand(2, 5, 6, 6) if fails else inputs)
    assert nn.Module.__call__ is call
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    for name, module in model.named_modules():
        assert (dict(module._forward_hooks), dict(module._forward_pre_hooks)) == hooks[name]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch._C._len_torch_function_stack() == 0


def test_hook_of_a_marked_model_runs_once_per_call():
    model, inputs = Net().eval(), torch.rand(2, 4, 6, 6)
    outline = outline_of(forward(model, inputs), model)
    model.hooked = 0
    with marking(model, outline, Ranges()):
        model(inputs)
    assert model.hooked == 1


def test_a_compiled_model_has_a_reason_and_no_rows():
    model = Net().eval()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(Opaque, match="compiled"):
        outline_of(lambda: compiled(torch.rand(2, 4, 6, 6)), model)
    with pytest.raises(Opaque, match="compiled"):
        outline_of(lambda: compiled(torch.rand(2, 4, 6, 6)), compiled)
    model.tail[0].compile(backend="eager")
    with pytest.raises(Opaque, match="compiled"):
        outline_of(lambda: model(torch.rand(2, 4, 6, 6)), model)


def test_a_model_whose_code_does_not_run_has_a_reason():
    with pytest.raises(Opaque, match="does not run"):
        outline_of(lambda: None, Net())
    with pytest.raises(Opaque, match="scripted"):
        outline_of(lambda: None, torch.jit.ScriptModule())


def test_a_model_that_takes_another_way_is_told():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mood = nn.Linear(2, 2), 0

        def forward(self, x):
            self.mood += 1
            return self.layer(x) if self.mood == 1 else self.layer(self.layer(x))

    class Changing(Moody):
        def forward(self, x):
            self.mood += 1
            x = self.layer(x)
            return x + 1 if self.mood == 1 else x * 2

    for kind, what in ((Moody, "more often"), (Changing, "other operations")):
        model = kind()
        outline = outline_of(lambda model=model: model(torch.rand(1, 2)), model)
        with marking(model, outline, Ranges()) as marker:
            model(torch.rand(1, 2))
        assert what in marker.strayed


def test_attention_keeps_its_fast_path_when_marked(monkeypatch):
    model, inputs = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.rand(2, 3, 4)
    fast = []
    original = torch._native_multi_head_attention
    monkeypatch.setattr(
        torch, "_native_multi_head_attention", lambda *args: fast.append(1) or original(*args)
    )
    outline = outline_of(lambda: model(inputs, inputs, inputs), model)
    fast.clear()
    with torch.no_grad(), marking(model, outline, Ranges()):
        model(inputs, inputs, inputs)
    assert fast == [1]


def test_own_convolution_gradients_are_in_their_layer_row():
    from perfexp.algorithms import engines  # noqa: F401 - registers the operator

    class Convolution(nn.Conv2d):
        def forward(self, x):
            sizes = ((1, 1), (1, 1), (1, 1), 1, False)
            return torch.ops.perfexp.convolution(
                x, self.weight, *sizes, "default", "default", "default"
            )

    model, inputs = (
        nn.Sequential(nn.Conv2d(3, 4, 1), Convolution(4, 4, 3), nn.ReLU()),
        torch.rand(1, 3, 6, 6),
    )
    operators = {}
    outline = outline_of(training(model, inputs), model)
    with marking(model, outline, Ranges()) as marker:

        def run():
            marker.restart()
            with ranged(Scope.call):
                training(model, inputs)()

        events = seen(run)
    (times,) = divide(on_a_device(events), held=False)
    assert not times.unattributed
    for key, spent in times.rows.items():
        operators.setdefault((key.path, str(key.which)), set()).update(spent.kernels)
    assert "aten::convolution_backward" in operators["1", "backward"]
    assert "aten::convolution_backward" in operators["0", "backward"]
    assert sum(event.name == "perfexp::convolution_backward_data" for event in events) == 1
