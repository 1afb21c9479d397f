"""Every portable algorithm computes what torch's convolution does, forward and backward."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv2d as conv2d_of_torch

from perfexp.convolution.portable import fourier
from perfexp.convolution.portable.algorithms import (
    ALGORITHMS,
    as_torch_does,
    canonical,
    effective_dtype,
    misfit,
)
from perfexp.convolution.portable.fourier import fast_length
from perfexp.convolution.portable.geometry import Convolution
from perfexp.errors import UserError

#: Torch's own remark on an even kernel with `same`.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even")

NAMES = tuple(ALGORITHMS)
GEMMS = ("direct", "gemm", "implicit_gemm", "implicit_precomp_gemm")
#: Bounds of the relative L2 error by data type; docs/results/algorithm-errors.json has them and what was seen.
BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
#: Those of F(4 × 4, 3 × 3), whose transforms cost it digits.
NONFUSED = {torch.float64: 1e-13, torch.float32: 2e-5, torch.float16: 3e-2, torch.bfloat16: 2e-1}
UNSTRIDED = {"stride": (1, 1), "dilation": (1, 1)}


def conv2d(name, inputs, weight, bias=None, **arguments):
    """`torch.nn.functional.conv2d` by a named algorithm, with its refusals."""
    algorithm = ALGORITHMS[canonical(name, ALGORITHMS)]
    convolution = Convolution.of(weight.shape, **arguments)
    if reason := misfit(convolution, inputs.shape) or algorithm.supports(
        convolution, effective_dtype(inputs)
    ):
        raise ValueError(reason)
    return as_torch_does(algorithm.compute, convolution, inputs, weight, bias)


def bound(name, dtype):
    return (NONFUSED if name == "winograd_nonfused" else BOUNDS)[dtype]


@st.composite
def convolutions(draw, name):
    """Shapes and arguments of a convolution that an algorithm supports."""
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    in_group, out_group = draw(st.sampled_from((1, 2, 5))), draw(st.sampled_from((1, 3)))
    kernel, extra = (3, 3), dict(UNSTRIDED)
    if not name.startswith("winograd"):
        kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    if name in GEMMS:
        extra = {
            "stride": draw(st.tuples(*[st.integers(1, 3)] * 2)),
            "dilation": draw(st.tuples(*[st.integers(1, 2)] * 2)),
        }
    paddings = st.one_of(
        st.integers(0, 3), st.tuples(st.integers(0, 2), st.integers(0, 2)), st.just("valid")
    )
    if extra["stride"] == (1, 1):
        paddings = st.one_of(paddings, st.just("same"))
    needed = [
        spread * (taps - 1) + 1 for spread, taps in zip(extra["dilation"], kernel, strict=True)
    ]
    size = [
        draw(st.integers(least, least + draw(st.sampled_from((3, 12, 34))))) for least in needed
    ]
    shape = (draw(st.integers(1, 3)), groups * in_group, *size)
    weight_shape = (groups * out_group, in_group, *kernel)
    return shape, weight_shape, {**extra, "padding": draw(paddings), "groups": groups}


def results(compute, tensors):
    """Outputs and gradients, for a gradient of the outputs that depends on their shape only."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    outputs = compute(*leaves)
    generator = torch.Generator().manual_seed(outputs.numel())
    gradient = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(
        tensors[0].dtype
    )
    outputs.backward(gradient.to(outputs.dtype))
    return [outputs.detach(), *(leaf.grad for leaf in leaves)]


def check(name, tensors, arguments):
    dtype = tensors[0].dtype
    ours = results(lambda *leaves: conv2d(name, *leaves, **arguments), tensors)
    generator = torch.Generator().manual_seed(ours[0].numel())
    gradient = (
        torch.randn(ours[0].shape, generator=generator, dtype=torch.float64).to(dtype).double()
    )
    leaves = [tensor.detach().double().clone().requires_grad_() for tensor in tensors]
    outputs = conv2d_of_torch(*leaves, **arguments)
    outputs.backward(gradient)
    for found, true in zip(ours, [outputs.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert found.shape == true.shape
        assert found.dtype == dtype
        assert (found.double() - true).norm() <= bound(name, dtype) * true.norm() + 1e-30


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float64, torch.float16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_outputs_and_gradients_are_those_of_the_definition(name, dtype, data):
    shape, weight_shape, arguments = data.draw(convolutions(name))
    if ALGORITHMS[name].supports(Convolution.of(weight_shape, **arguments), dtype):
        assert dtype in (torch.bfloat16, torch.float16)
        assert name.startswith("fft")
        return
    torch.manual_seed(sum(shape))
    check(
        name,
        [
            torch.randn(size, dtype=torch.float64).to(dtype)
            for size in (shape, weight_shape, weight_shape[:1])
        ],
        arguments,
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name):
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 5, 4), (2, 1, 3, 3), (2,))
    ]
    assert torch.autograd.gradcheck(
        lambda *given: conv2d(name, *given, padding=1, groups=2), tensors, fast_mode=True
    )


FFTS = ("fft", "fft_tiling")
#: Shape of inputs and weights, and groups: several tiles both ways, and more groups, images and channels than a block.
IN_BLOCKS = [
    ((3, 14, 37, 66), (10, 7, 4, 3), 2),
    ((2, 9, 8, 7), (9, 1, 3, 3), 9),
    ((1, 40, 6, 6), (33, 40, 3, 1), 1),
]


@pytest.mark.parametrize("held", [1, 20_000, 200_000])
@pytest.mark.parametrize("name", FFTS)
@pytest.mark.parametrize(("shape", "weight_shape", "groups"), IN_BLOCKS)
def test_ffts_in_blocks_are_exact_and_hold_few_numbers(
    monkeypatch, name, held, shape, weight_shape, groups
):
    sizes, spectra = [], fourier._spectra
    monkeypatch.setattr(fourier, "_NUMBERS_OF_A_CPU", held)
    monkeypatch.setattr(
        fourier, "_spectra", lambda *given: sizes.append(spectra(*given).numel()) or spectra(*given)
    )
    tensors = [
        torch.randn(size, dtype=torch.float64) for size in (shape, weight_shape, weight_shape[:1])
    ]
    check(name, tensors, {"padding": 1, "groups": groups})
    one = 70 * 40 if name == "fft" else 32 * 17
    assert max(sizes) <= max(held, one)


@pytest.mark.parametrize("name", FFTS)
def test_between_the_passes_ffts_keep_no_spectra(name):
    kept = []
    inputs, weight = (
        torch.randn(1, 4, 9, 8, requires_grad=True),
        torch.randn(6, 4, 3, 3, requires_grad=True),
    )
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        conv2d(name, inputs, weight)
    assert [tuple(tensor.shape) for tensor in kept] == [(1, 4, 9, 8), (6, 4, 3, 3)]


@pytest.mark.parametrize("name", FFTS)
def test_gradients_of_ffts_have_gradients(name):
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 5, 34), (2, 1, 3, 2))
    ]
    assert torch.autograd.gradgradcheck(
        lambda *given: conv2d(name, *given, groups=2), tensors, fast_mode=True
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch 2.13 itself does
@pytest.mark.parametrize("name", FFTS)
def test_gradients_of_ffts_can_be_compiled(monkeypatch, name):
    monkeypatch.setattr(fourier, "_NUMBERS", 20_000)
    torch.compiler.reset()
    tensors = [torch.randn(2, 6, 9, 40), torch.randn(8, 3, 3, 3)]

    def compute(*leaves):
        return conv2d(name, *leaves, padding=1, groups=2)

    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True, dynamic=False)
    for ours, eager in zip(results(compiled, tensors), results(compute, tensors), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", ["inputs", "weight", "neither"])
@pytest.mark.parametrize("taps", [1, 3])
def test_the_memory_format_of_the_result_is_that_of_torch(name, which, taps):
    if taps == 1 and name.startswith("winograd"):
        return
    inputs, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 4, taps, taps)
    if which == "inputs":
        inputs = inputs.to(memory_format=torch.channels_last)
    if which == "weight":
        weight = weight.to(memory_format=torch.channels_last)
    ours, theirs = conv2d(name, inputs, weight), conv2d_of_torch(inputs, weight)
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_need_not_be_contiguous(name):
    inputs, weight = (
        torch.randn(9, 3, 8, 2).permute(3, 1, 0, 2)[..., ::2],
        torch.randn(3, 3, 6, 6)[..., ::2, ::2],
    )
    torch.testing.assert_close(
        conv2d(name, inputs, weight, padding=1),
        conv2d_of_torch(inputs, weight, padding=1),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_picture_needs_no_batch(name):
    picture, weight, bias = torch.randn(3, 9, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    ours, theirs = conv2d(name, picture, weight, bias), conv2d_of_torch(picture, weight, bias)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_gives_an_empty_result_and_zero_gradients(name):
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    outputs = conv2d(name, torch.randn(0, 3, 9, 8), weight, padding="same")
    outputs.sum().backward()
    assert outputs.shape == (0, 4, 9, 8)
    assert not weight.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_autocast_casts_as_torch_does_and_keeps_gradient_dtype(name):
    inputs, weight = torch.randn(2, 3, 9, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    if name.startswith("fft"):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(ValueError, match="bfloat16"),
        ):
            conv2d(name, inputs, weight)
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = conv2d(name, inputs, weight)
    assert outputs.dtype is torch.bfloat16
    outputs.float().sum().backward()
    assert weight.grad.dtype is torch.float32


def test_indices_made_in_inference_serve_training_too():
    weight = torch.randn(2, 3, 3, 3, requires_grad=True)
    with torch.inference_mode():
        conv2d("implicit_precomp_gemm", torch.randn(1, 3, 11, 13), weight)
        conv2d("winograd", torch.randn(1, 3, 11, 13), weight)
    for name in ("implicit_precomp_gemm", "winograd"):
        conv2d(name, torch.randn(1, 3, 11, 13), weight).sum().backward()


@pytest.mark.parametrize(
    ("name", "weight_shape", "arguments", "reason"),
    [
        ("winograd", (4, 3, 5, 5), {}, "kernel is 5×5, not 3×3"),
        ("winograd_nonfused", (4, 3, 3, 3), {"stride": 2}, "stride is 2×2"),
        ("winograd", (4, 3, 3, 3), {"dilation": (1, 2)}, "dilation is 1×2"),
        ("fft", (4, 3, 3, 3), {"stride": (1, 2)}, "stride is 1×2"),
        ("fft_tiling", (4, 3, 33, 3), {}, "larger than a tile of 32×32"),
    ],
)
def test_what_an_algorithm_can_not_compute_it_says(name, weight_shape, arguments, reason):
    convolution = Convolution.of(weight_shape, **arguments)
    assert reason in ALGORITHMS[name].supports(convolution, torch.float32)
    with pytest.raises(ValueError, match=reason):
        conv2d(name, torch.randn(1, 3, 40, 40), torch.randn(weight_shape), **arguments)


@pytest.mark.parametrize("name", NAMES)
def test_no_algorithm_takes_complex_numbers(name):
    assert "complex64" in ALGORITHMS[name].supports(Convolution.of((4, 3, 3, 3)), torch.complex64)


@pytest.mark.parametrize("shape", [(1, 4, 9, 9), (1, 3, 2, 9), (3, 9)])
def test_inputs_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"channels|does not fit|dimensions"):
        conv2d("gemm", torch.randn(shape), torch.randn(4, 3, 3, 3))


def test_algorithm_name_may_have_spaces_and_typos_get_a_hint():
    inputs, weight = torch.randn(1, 3, 6, 6), torch.randn(4, 3, 3, 3)
    assert torch.equal(
        conv2d("implicit precomp gemm", inputs, weight),
        conv2d("Implicit-Precomp-GEMM", inputs, weight),
    )
    with pytest.raises(UserError, match="Did you mean winograd"):
        conv2d("winogrand", inputs, weight)


def test_fast_lengths_are_even_and_have_small_factors_only():
    assert [fast_length(length) for length in (1, 7, 16, 17, 22, 113, 226)] == [
        2,
        8,
        16,
        18,
        24,
        120,
        240,
    ]
