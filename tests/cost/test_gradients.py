"""The backward pass is counted as autograd runs it, and as the definition of each gradient has it."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from perfexp.cost.count import count
from perfexp.cost.tensors import tensors_in
from perfexp.cost.trial import isolated, replace_tensors
from perfexp.models.torchvision_import import import_torchvision
from tests.support.published_models import build
from tests.support.selection import first_always

#: One of each kind.
MODELS = ["resnet18", "mnasnet0_5", "regnet_y_400mf", "googlenet", "swin_t", "densenet121"]


def size(*shape):
    return torch.Size(shape)


class Multiplications(TorchDispatchMode):
    """Counts what the operators of a real backward pass multiply, written down once more and apart from perfexp."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        elif packet is torch.ops.aten.convolution_backward:
            grad, weight, mask = args[0], args[2], args[10]
            assert not args[7], "no transposed convolution in these models"
            self.flops += 2 * grad.numel() * weight[0].numel() * sum(mask[:2])
        return returned


def multiplied_by_autograd(model, shape):
    """FLOPs of products in the backward pass that autograd runs for the sum of all outputs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    replace_tensors(model, mode)
    with mode:
        loss = sum(tensor.sum() for tensor in tensors_in(model(torch.empty(shape))))
        with Multiplications() as counter:
            loss.backward()
    return counter.flops


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", first_always("FLOPs of the backward pass", MODELS))
def test_backward_flops_are_those_of_autograd(name, training):
    models = import_torchvision().models
    model = (
        build(models, name, 64) if name != "googlenet" else models.googlenet(init_weights=False)
    ).train(training)
    shape = size(2, 3, 224, 224)
    work = count(model, shape, backward=True)
    # rows that multiply and do nothing else
    ours = sum(row.backward_flops for row in work.rows if row.macs)
    assert all(row.flops == 2 * row.macs for row in work.rows if row.macs)
    assert ours == isolated(multiplied_by_autograd)(model, shape) > work.macs


def test_a_depthwise_convolution_has_the_gradients_of_its_groups():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
    )
    pointwise, depthwise = count(model, size(2, 3, 10, 10), backward=True).rows
    flops = 2 * (2 * 16 * 10 * 10) * 9
    assert (
        depthwise.flops
        == depthwise.input_gradient_flops
        == depthwise.weight_gradient_flops
        == flops
    )
    assert pointwise.input_gradient_flops == 0, "nobody needs the gradient of the pictures"
    assert pointwise.weight_gradient_flops == pointwise.flops == 2 * (2 * 16 * 100) * 3


def test_frozen_layers_and_detached_branches_have_no_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    first, frozen, last = count(model, size(2, 4), backward=True).rows
    assert (first.input_gradient_flops, first.weight_gradient_flops) == (0, 64)
    assert (frozen.input_gradient_flops, frozen.weight_gradient_flops) == (64, 0)
    assert (last.input_gradient_flops, last.weight_gradient_flops) == (64, 64)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.cut, self.unused, self.silent = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, inputs):
            self.unused(inputs)
            with torch.no_grad():
                silent = self.silent(inputs)
            return self.used(inputs), self.cut(inputs).detach(), silent

    rows = {row.path: row for row in count(Branches(), size(2, 4), backward=True).rows}
    assert {path: rows[path].backward_flops for path in ("used", "cut", "unused", "silent")} == {
        "used": 64, "cut": 0, "unused": 0, "silent": 0
    }  # fmt: skip


def test_weights_that_are_computed_from_weights_stay_weights():
    class Standardised(nn.Conv2d):
        def forward(self, inputs):
            weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
            return nn.functional.conv2d(inputs, weight)

    model = nn.Sequential(Standardised(4, 8, 3))
    (row,) = count(model, size(1, 4, 5, 5), backward=True).rows
    flops = 2 * 8 * 9 * 4 * 9
    assert row.kind == "Standardised"
    assert row.macs == flops // 2
    # mean: 1 for each weight, difference: 1 for each weight; their gradients likewise, of one and of two operands
    assert row.flops == flops + 2 * 8 * 4 * 9
    assert row.weight_gradient_flops == flops + 2 * 8 * 4 * 9
    assert row.input_gradient_flops == 0


def test_attention_takes_twice_as_much_backward():
    class Attention(nn.Module):
        def forward(self, query, key, value):
            return nn.functional.scaled_dot_product_attention(query, key, value)

    tensors = [torch.ones(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7)]
    (row,) = count(Attention(), *tensors, backward=True).rows
    products, softmax = 2 * 2 * (2 * 3 * 5 * 7 * 8), 5 * 2 * 3 * 5 * 7
    assert row.flops == products + softmax
    assert row.input_gradient_flops == 2 * products + softmax
    only_values = count(
        Attention(), *(tensor.detach() for tensor in tensors[:2]), tensors[2], backward=True
    ).rows[0]
    assert only_values.input_gradient_flops == products // 2


def test_what_is_changed_in_place_in_a_view_keeps_its_gradient():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs):
            return nn.functional.relu_(self.layer(inputs))

    relu = count(InPlace(), size(2, 3, 4), backward=True).rows[-1]
    assert (relu.kind, relu.flops, relu.input_gradient_flops) == ("relu", 24, 24)


def test_a_python_function_of_the_model_is_named():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Model(nn.Linear):
        def forward(self, inputs):
            return Doubled.apply(super().forward(inputs))

    assert count(Model(4, 4), size(2, 4), backward=True).uncounted == (
        "backward of DoubledBackward",
    )
    assert count(Model(4, 4), size(2, 4)).uncounted == ()
