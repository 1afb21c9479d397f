"""The work of small models equals what one computes by hand."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from perfexp.convolutions.convolution import Convolution
from perfexp.work import Geometry
from perfexp.work.count import count
from perfexp.work.trial import Inconclusive

FLOAT = 4


def size(*shape):
    return torch.Size(shape)


def rows_by_kind(work):
    return [(row.path, row.call, row.operation, row.kind) for row in work.rows]


def only(work):
    (row,) = work.rows
    return row


def test_a_convolution_by_hand():
    layer = nn.Conv2d(8, 12, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1), groups=4)
    row = only(count(layer, size(2, 8, 17, 11)))
    # (17 + 2·1 − 2·2 − 1) // 2 + 1 = 8 rows, (11 + 2·2 − 4 − 1) // 1 + 1 = 11 columns; 8 / 4 · 15 products an output
    outputs = 2 * 12 * 8 * 11
    assert row.outputs == ((2, 12, 8, 11),)
    assert row.inputs == ((2, 8, 17, 11),)
    assert row.macs == outputs * 2 * 15
    assert row.flops == 2 * row.macs
    assert row.parameters == 12 * 2 * 15 + 12
    assert row.bytes_min == FLOAT * (2 * 8 * 17 * 11 + row.parameters + outputs)
    assert row.activation_bytes == FLOAT * outputs
    assert row.arithmetic_intensity == row.flops / row.bytes_min
    assert (row.path, row.call, row.operation, row.kind) == ("", 0, None, "Conv2d")
    assert row.convolution == Geometry(
        in_channels=8,
        out_channels=12,
        kernel=(3, 5),
        stride=(2, 1),
        padding=(1, 2),
        dilation=(2, 1),
        groups=4,
    )
    assert row.backward_flops is None


def test_work_of_1d_3d_and_transposed_convolutions_is_exact():
    assert only(count(nn.Conv1d(4, 6, 3), size(2, 4, 10))).macs == 2 * 6 * 8 * 4 * 3
    assert (
        only(count(nn.Conv3d(2, 4, 3, groups=2), size(1, 2, 5, 6, 7))).macs
        == 4 * (3 * 4 * 5) * 1 * 27
    )
    row = only(count(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), size(2, 4, 9, 9)))
    assert row.macs == (2 * 4 * 81) * (6 // 2) * 9
    assert row.convolution == Geometry(
        in_channels=4, out_channels=6, kernel=(3, 3), stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=2,
        transposed=True,
    )  # fmt: skip


def test_a_linear_layer_by_hand_in_the_data_type_at_hand():
    layer = nn.Linear(32, 10).to(torch.bfloat16)
    row = only(count(layer, size(4, 7, 32)))
    assert row.macs == 4 * 7 * 32 * 10
    assert row.bytes_min == 2 * (4 * 7 * 32 + 32 * 10 + 10 + 4 * 7 * 10)


def test_work_does_not_depend_on_precision_but_bytes_do():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    wide, narrow = (
        count(model.to(dtype), size(2, 3, 8, 8), backward=True)
        for dtype in (torch.float32, torch.float16)
    )
    assert wide.flops_model == narrow.flops_model > 0
    # num_batches_tracked stays an integer of 8 bytes, read and written
    assert wide.bytes_min - 16 == 2 * (narrow.bytes_min - 16)


def test_what_autocast_makes_of_the_data_types_is_counted():
    layer = nn.Linear(16, 8, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        row = only(count(layer, size(4, 16)))
        assert layer(torch.ones(4, 16)).dtype == torch.bfloat16
    assert row.macs == 4 * 16 * 8
    assert row.bytes_min == FLOAT * (4 * 16 + 16 * 8) + 2 * 4 * 8


class Attention(nn.Module):
    """Scaled dot products of inputs that have no gradient of their own, without weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.first(x)
        return self.last(torch.softmax(y @ y.transpose(1, 2), dim=-1) @ y)


def test_training_step_has_six_flops_per_mac_in_its_contractions():
    work = count(Attention(), size(2, 5, 8), backward=True)
    assert work.macs == 2 * (5 * 8 * 8 + 2 * 5 * 5 * 8 + 5 * 8 * 4)
    assert work.contraction_flops == 6 * work.macs
    assert work.flops_model != work.contraction_flops
    assert count(Attention(), size(2, 5, 8)).contraction_flops == 2 * work.macs


def test_frozen_layers_have_no_gradients_of_their_weights():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    model[0].requires_grad_(False)
    frozen = count(model, size(3, 8), backward=True)
    assert frozen.contraction_flops == 2 * 3 * 48 + 6 * 3 * 24


def test_running_statistics_are_moved_in_training():
    layer, elements = nn.BatchNorm2d(6), 2 * 6 * 8 * 8
    inference, training = (
        only(count(layer.train(mode), size(2, 6, 8, 8))) for mode in (False, True)
    )
    assert inference.bytes_min == FLOAT * (2 * elements + 4 * 6)
    # mean and variance are written too, and the count of batches is read and written
    assert training.bytes_min == inference.bytes_min + FLOAT * 2 * 6 + 2 * 8
    assert training.activation_bytes == FLOAT * elements


def test_other_layers_follow_the_table():
    elements = 2 * 6 * 8 * 8
    for layer, per_element, parameters in (
        (nn.BatchNorm2d(6).eval(), 4, 12),
        (nn.BatchNorm2d(6), 8, 12),
        (nn.BatchNorm2d(6, affine=False), 6, 0),
        (nn.GroupNorm(2, 6), 8, 12),
        (nn.InstanceNorm2d(6), 6, 0),
        (nn.GELU(), 1, 0),
        (nn.Hardswish(), 1, 0),
        (nn.Hardswish(inplace=True), 1, 0),
        (nn.ReLU6(), 1, 0),
        (nn.Softmax(dim=1), 5, 0),
        (nn.AdaptiveAvgPool2d(2), 1, 0),
        (nn.AdaptiveAvgPool2d(1), 1, 0),
        (nn.Upsample(scale_factor=2, mode="bilinear"), 4 * 7, 0),
        (nn.Upsample(scale_factor=2), 0, 0),
        (nn.ZeroPad2d(1), 0, 0),
        (nn.Identity(), 0, 0),
    ):
        work = count(layer, size(2, 6, 8, 8))
        assert work.flops == per_element * elements, layer
        assert work.macs == 0
        assert work.parameters == sum(row.parameters for row in work.rows) == parameters
        assert work.uncounted == ()
    assert count(nn.MaxPool2d(3, 2, 1), size(1, 6, 8, 8)).flops == 9 * 6 * 4 * 4
    assert count(nn.AvgPool2d((2, 3)), size(1, 6, 8, 9)).flops == 6 * 6 * 4 * 3


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Linear(6, 6)

    def forward(self, inputs):
        for _ in range(3):
            inputs = self.step(inputs) + inputs
        return inputs


def test_a_module_in_a_loop_is_a_row_for_each_call():
    work = count(Loop(), size(5, 6))
    assert rows_by_kind(work) == [
        ("step", 0, None, "Linear"), ("", 0, 0, "add"),
        ("step", 1, None, "Linear"), ("", 0, 1, "add"),
        ("step", 2, None, "Linear"), ("", 0, 2, "add"),
    ]  # fmt: skip
    assert work.macs == 3 * 5 * 6 * 6
    assert work.flops == 2 * work.macs + 3 * 5 * 6
    assert [row.parameters for row in work.rows if row.path == "step"] == [42, 0, 0]
    assert work.parameters == sum(row.parameters for row in work.rows) == 42


class Shared(nn.Module):
    """One module under two names, one weight of two modules, and a module that is never called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.idle = nn.Linear(6, 1000)

    def forward(self, inputs):
        return self.tied(self.second(self.first(inputs)))


def test_shared_modules_and_weights_are_not_counted_twice():
    work = count(Shared(), size(5, 6))
    assert rows_by_kind(work) == [
        ("first", 0, None, "Linear"), ("first", 1, None, "Linear"), ("tied", 0, None, "Linear")
    ]  # fmt: skip
    assert [row.parameters for row in work.rows] == [42, 0, 6]
    assert sum(row.parameters for row in work.rows) == 48
    assert work.parameters == 48 + 6 * 1000 + 1000
    assert work.macs == 3 * 5 * 36


class Functional(nn.Module):
    """Functional operations only: a convolution, addition, concatenation, and views."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2, 3, 3))

    def forward(self, inputs):
        maps = nn.functional.conv2d(inputs, self.weight, padding=1, groups=2)
        maps += inputs
        both = torch.cat([maps, inputs], dim=1).relu_()
        return {"flat": torch.flatten(both, 1), "sum": 1 - both.transpose(2, 3)}


def test_functional_operations_have_rows_of_their_own():
    work = count(Functional(), size(2, 4, 5, 5))
    one = 2 * 4 * 25
    assert [row.kind for row in work.rows] == [
        "conv2d",
        "add",
        "cat",
        "relu",
        "flatten",
        "transpose",
        "sub",
    ]
    assert [row.operation for row in work.rows] == list(range(7))
    assert [row.macs for row in work.rows] == [one * 2 * 9, 0, 0, 0, 0, 0, 0]
    assert [row.flops for row in work.rows] == [2 * one * 2 * 9, one, 0, 2 * one, 0, 0, 2 * one]
    assert [row.bytes_min for row in work.rows] == [
        FLOAT * value for value in (2 * one + 4 * 2 * 9, 3 * one, 4 * one, 4 * one, 0, 0, 4 * one)
    ]
    # what is changed in place, and views, keep nothing new
    assert [row.activation_bytes for row in work.rows] == [
        FLOAT * value for value in (one, 0, 2 * one, 0, 0, 0, 2 * one)
    ]
    assert work.rows[0].convolution.groups == 2
    assert work.rows[2].inputs == ((2, 4, 5, 5), (2, 4, 5, 5))
    assert work.rows[4].outputs == ((2, 200),)


@dataclass
class Outputs:
    scores: torch.Tensor
    others: tuple


class Dressed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, *, inputs, scale):
        scores = self.head(input=inputs)
        return Outputs(scores, (scores * scale, None))


def test_keywords_and_outputs_of_any_kind():
    work = count(Dressed(), keywords={"inputs": size(2, 4), "scale": 2.0}, backward=True)
    assert [row.kind for row in work.rows] == ["Linear", "mul"]
    assert work.rows[0].inputs == ((2, 4),)
    assert work.rows[0].weight_gradient_flops == 2 * 2 * 4 * 3


def test_matrix_products_by_any_name():
    class Products(nn.Module):
        def forward(self, left, right):
            return (
                left @ right,
                torch.einsum("bij,bjk->bik", left, right),
                torch.bmm(left, right),
                torch.baddbmm(torch.zeros(2, 3, 5), left, right),
                left[0] @ right[0, :, 0],
                torch.addmm(torch.zeros(3, 5), left[0], right[0]),
            )

    work = count(Products(), size(2, 3, 4), size(2, 4, 5))
    macs = {row.kind: row.macs for row in work.rows if row.macs and row.kind != "matmul"}
    assert macs == {"einsum": 120, "bmm": 120, "baddbmm": 120, "addmm": 60}
    assert [row.macs for row in work.rows if row.kind == "matmul"] == [120, 12]
    assert count(nn.Bilinear(3, 4, 5), size(2, 3), size(2, 4)).macs == 2 * 3 * 4 * 5


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_attention_is_counted_in_evaluation_as_in_training(surroundings):
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    by_hand = 4 * (2 * 5 * 8 * 8) + 2 * (2 * 5 * 5 * 8)
    for training in (False, True):
        for need_weights in (False, True):
            with surroundings():
                work = count(
                    layer.train(training),
                    *[torch.ones(2, 5, 8)] * 3,
                    keywords={"need_weights": need_weights},
                )
            assert only(work).macs == by_hand
            assert work.uncounted == ()
            assert sum(row.parameters for row in work.rows) == work.parameters
    encoder = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True).eval()
    with surroundings():
        assert count(encoder, size(2, 5, 8)).macs == by_hand + 2 * (2 * 5 * 8 * 16)


def test_recurrent_networks_are_counted_by_their_matrices():
    matrices = 2 * (4 * 16 * (8 + 16)) + 2 * (4 * 16 * (32 + 16))
    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=True)
    work = count(layer, size(5, 3, 8), backward=True)
    assert only(work).macs == 5 * 3 * matrices
    assert sum(row.parameters for row in work.rows) == work.parameters
    assert only(work).weight_gradient_flops >= 2 * work.macs
    # the inputs need no gradient; hidden states and the second layer's inputs do
    products = 2 * 5 * 3 * (matrices - 2 * 4 * 16 * 8)
    assert (
        products
        <= only(work).input_gradient_flops + only(work).weight_gradient_flops - 2 * work.macs
    )
    for other, gates in ((nn.GRU, 3), (nn.RNN, 1)):
        assert only(count(other(8, 16), size(5, 3, 8))).macs == 5 * 3 * gates * 16 * (8 + 16)


def test_the_forced_convolution_of_perfexp_is_counted():
    from perfexp.algorithms import operators  # noqa: F401 - defines the operator

    class Forced(nn.Conv2d):
        def forward(self, inputs):
            arguments = [2, 1], [1, 1], [1, 1], self.groups, False, "default", "default", "default"
            return torch.ops.perfexp.convolution(inputs, self.weight, *arguments)

    forced = Forced(8, 8, 3, groups=4, bias=False)
    plain = nn.Conv2d(8, 8, 3, stride=(2, 1), padding=1, groups=4, bias=False)
    inputs = torch.ones(2, 8, 9, 9, requires_grad=True)
    ours, theirs = (only(count(layer, inputs, backward=True)) for layer in (forced, plain))
    assert ours.convolution == theirs.convolution
    for field in (
        "macs",
        "flops",
        "input_gradient_flops",
        "weight_gradient_flops",
        "bytes_min",
        "parameters",
    ):
        assert getattr(ours, field) == getattr(theirs, field) > 0


def test_what_is_not_known_is_named():
    class Solver(nn.Module):
        def forward(self, matrix, other):
            return torch.linalg.solve(matrix, other)

    work = count(Solver(), size(4, 4), size(4, 2))
    assert work.uncounted and all("linalg" in name for name in work.uncounted)
    assert work.flops == 0


def test_formulas_of_users_are_asked_for():
    from torch.utils.flop_counter import flop_registry

    class Solver(nn.Module):
        def forward(self, matrix, other):
            return torch.linalg.solve(matrix, other)

    operator = torch.ops.aten._linalg_solve_ex
    assert operator not in flop_registry
    flop_registry[operator] = lambda matrix, other, **_: 2 * matrix.shape[0] ** 3
    try:
        work = count(Solver(), torch.ones(4, 4, requires_grad=True), size(4, 2), backward=True)
    finally:
        del flop_registry[operator]
    assert (work.macs, work.flops) == (64, 128)
    assert work.uncounted == ("backward of aten::_linalg_solve_ex",)


def test_what_depends_on_numbers_is_refused():
    class Sparse(nn.Module):
        def forward(self, inputs):
            return inputs * 2 if inputs.sum() > 0 else inputs

    with pytest.raises(Inconclusive):
        count(Sparse(), size(4))
    with pytest.raises(RuntimeError):
        count(nn.Linear(4, 2), size(3, 5))


SIDES = st.integers(1, 3)


@st.composite
def convolutions(draw):
    groups = draw(st.integers(1, 4))
    return Convolution(
        in_channels=groups * draw(SIDES),
        out_channels=groups * draw(SIDES),
        kernel=(draw(SIDES), draw(SIDES)),
        stride=(draw(SIDES), draw(SIDES)),
        padding=(
            width := draw(st.integers(0, 2)),
            width,
            height := draw(st.integers(0, 2)),
            height,
        ),
        dilation=(draw(SIDES), draw(SIDES)),
        groups=groups,
    )


@settings(max_examples=40, deadline=None)
@given(convolutions(), st.integers(1, 3), st.integers(8, 14), st.integers(8, 14), st.booleans())
def test_flops_of_any_convolution_and_its_gradients(
    convolution, batch, height, width, needs_gradient
):
    layer = nn.Conv2d(
        convolution.in_channels,
        convolution.out_channels,
        convolution.kernel,
        convolution.stride,
        (convolution.padding[2], convolution.padding[0]),
        convolution.dilation,
        convolution.groups,
    )
    inputs = torch.zeros(
        batch, convolution.in_channels, height, width, requires_grad=needs_gradient
    )
    row = only(count(layer, inputs, backward=True))
    flops = convolution.flops(batch, height, width)
    assert row.flops == row.weight_gradient_flops == flops
    assert row.input_gradient_flops == (flops if needs_gradient else 0)


class Calling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def test_gpu_only_operators_are_counted_like_those_of_a_cpu():
    aten = torch.ops.aten
    with torch.device("meta"):
        heads = [torch.ones(2, 3, length, 8, dtype=torch.float16) for length in (8, 16, 16)]
        sequences, state = torch.ones(5, 3, 8), torch.zeros(4, 3, 16)
        maps, of_channels = torch.ones(2, 6, 4, 4), [torch.ones(6)] * 4
    for attention in (
        aten._scaled_dot_product_flash_attention,
        lambda *tensors: aten._scaled_dot_product_efficient_attention(*tensors, None, True),
        lambda *tensors: aten._scaled_dot_product_cudnn_attention(*tensors, None, True),
    ):
        assert count(Calling(attention), *heads).macs == 2 * (2 * 3 * 8 * 16 * 8)

    def recurrent(inputs, hidden, *weights):
        settings = 2, 16, 0, 2, False, 0.0, True, True, [], None
        return aten._cudnn_rnn(inputs, list(weights), 4, None, hidden, hidden, *settings)

    layer = nn.LSTM(8, 16, num_layers=2, bidirectional=True)
    weights = [weight.detach().to("meta") for weight in layer._flat_weights]
    assert (
        count(Calling(recurrent), sequences, state, *weights).macs
        == count(layer, size(5, 3, 8)).macs
    )

    def normalised(*tensors):
        return aten.cudnn_batch_norm(*tensors, True, 0.1, 1e-5)

    assert (
        count(Calling(normalised), maps, *of_channels).flops
        == count(nn.BatchNorm2d(6), size(2, 6, 4, 4)).flops
    )


class Calls(nn.Module):
    """A model that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


A, B = torch.ones(4, 4, dtype=torch.complex64), torch.ones(3, 4, 4, dtype=torch.complex64)
IMAGE, FILTER = (
    torch.ones(2, 3, 8, 8, dtype=torch.complex64),
    torch.ones(5, 3, 3, 3, dtype=torch.complex64),
)
DIRECT = 2 * 5 * 6 * 6 * 27
COMPLEX = {
    "mm": (torch.mm, (A, A), 4 * 64, 8 * 64),
    "bmm": (torch.bmm, (B, B), 4 * 192, 8 * 192),
    "addmm": (torch.addmm, (A, A, A), 4 * 64, 8 * 64),
    "linear": (nn.functional.linear, (A, A), 4 * 64, 8 * 64),
    "vdot": (torch.vdot, (A[0], A[0]), 4 * 4, 8 * 4),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (A, A), 4 * 64, 8 * 64),
    "conv2d": (nn.functional.conv2d, (IMAGE, FILTER), 4 * DIRECT, 8 * DIRECT),
    "product and sum": (lambda a, b: (a * b).sum(), (A, A), 0, 8 * 16),
    "mul": (torch.mul, (A, A), 0, 6 * 16),
    "mul by a complex number": (lambda a: a * 2j, (A,), 0, 6 * 16),
    "mul by a real number": (lambda a: a * 2.0, (A,), 0, 2 * 16),
    "mul by a real tensor": (torch.mul, (A, torch.ones(4, 4)), 0, 2 * 16),
    "add": (torch.add, (A, A), 0, 2 * 16),
    "addcmul": (torch.addcmul, (A, A, A), 0, 8 * 16),
    "div": (torch.div, (A, A), 0, 11 * 16),
    "abs": (torch.abs, (A,), 0, 4 * 16),
    "real part": (lambda a: a.real * 2, (A,), 0, 16),
    "from parts": (torch.complex, (torch.ones(4), torch.ones(4)), 0, 0),
}


def test_complex_numbers_count_by_their_real_parts():
    class All(nn.ModuleDict):
        def forward(self, inputs):
            return [self[name](*inputs[name]) for name in self]

    model = All({name: Calls(function) for name, (function, *_) in COMPLEX.items()})
    work = count(model, {name: inputs for name, (_, inputs, *_) in COMPLEX.items()})
    found = {name: [0, 0] for name in COMPLEX}
    for row in work.rows:
        found[row.path][0] += row.macs
        found[row.path][1] += row.flops
    assert found == {name: [macs, flops] for name, (_, _, macs, flops) in COMPLEX.items()}
    assert work.uncounted == ()


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Conv2d, (2, 3, 8, 8)), (nn.ConvTranspose2d, (2, 3, 8, 8))]
)
def test_complex_convolution_has_four_times_the_real_work(kind, shape):
    real = count(kind(3, 5, 3), size(*shape), backward=True)
    work = count(kind(3, 5, 3, dtype=torch.complex64), size(*shape), backward=True)
    assert (work.macs, work.flops) == (4 * real.macs, 4 * real.flops)
    assert work.rows[0].weight_gradient_flops == 4 * real.rows[0].weight_gradient_flops > 0


def test_the_gradients_of_complex_products_are_counted():
    layer = nn.Linear(4, 4, bias=False, dtype=torch.complex64)
    work = count(nn.Sequential(layer, Calls(lambda x: x * x)), size(2, 4), backward=True)
    assert work.backward_flops == 8 * 2 * 16 + 6 * 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_and_model_functions_are_refused():
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    heads = torch.ones(1, 2, 128, 16)
    with pytest.raises(
        Inconclusive,
        match="flex_attention calls a function of the model, on which its work depends",
    ):
        count(Calls(lambda query: flex(query, query, query)), heads)
    model = nn.Module()
    model.register_buffer("matrix", torch.eye(4).to_sparse())
    model.forward = lambda inputs: torch.sparse.mm(model.matrix, inputs)
    for sparse in (model, Calls(lambda inputs: inputs.to_sparse_csr() @ inputs)):
        with pytest.raises(
            Inconclusive, match=r"tensors of the layout sparse_(coo|csr), whose work depends"
        ):
            count(sparse, torch.ones(4, 4))


class Dropping(nn.Module):
    """A model that skips each layer at random on the host."""

    def __init__(self, draw, probability=0.5):
        super().__init__()
        self.layers, self.draw, self.probability = (
            nn.ModuleList(nn.Linear(4, 4) for _ in range(8)),
            draw,
            probability,
        )

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs) if self.draw() >= self.probability else inputs
        return inputs


@pytest.mark.slow
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_layers_that_are_skipped_at_random_are_reported(draw):
    before = random.getstate()
    assert count(Dropping(draw), size(2, 4)).is_random
    assert not count(Dropping(draw, probability=0.0), size(2, 4)).is_random
    assert not count(Dropping(lambda: 1.0), size(2, 4)).is_random
    assert random.getstate() == before


def test_a_model_without_random_numbers_is_counted_once(monkeypatch):
    calls = []
    isolated = count.__globals__["isolated"]
    monkeypatch.setitem(
        count.__globals__, "isolated", lambda function: calls.append(function) or isolated(function)
    )
    count(nn.Dropout(), size(2, 4))
    assert len(calls) == 1
