"""cuDNN's algorithms by name, on a cuDNN that computes on the processor."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from perfexp.convolution import cudnn as library_module
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CODES, CudnnError, Library, why_no_cudnn
from perfexp.convolution.engines import Engines
from perfexp.convolution.forced import Forced
from perfexp.errors import Unsupported, UserError
from tests.convolution.scripted_cudnn import ScriptedCudnn

#: As NVIDIA's documentation of cuDNN lists the enumerations.
FORWARD = [
    "IMPLICIT_GEMM",
    "IMPLICIT_PRECOMP_GEMM",
    "GEMM",
    "DIRECT",
    "FFT",
    "FFT_TILING",
    "WINOGRAD",
    "WINOGRAD_NONFUSED",
]
BACKWARD_DATA = ["0", "1", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"]
BACKWARD_FILTER = ["0", "1", "FFT", "3", "WINOGRAD", "WINOGRAD_NONFUSED", "FFT_TILING"]


@pytest.fixture
def cudnn(scripted):
    return scripted


def session(module):
    return SimpleNamespace(discard_compiled=lambda: None, module=module)


def of_training(module, inputs, forced=None):
    module.zero_grad()
    inputs = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    if forced is None:
        outputs = module(inputs)
    else:
        with forced.applied(session(module)):
            outputs = module(inputs)
    outputs.square().mean().backward()
    return [outputs.detach(), inputs.grad, *(each.grad.clone() for each in module.parameters())]


def test_codes_are_those_of_the_header():
    def spelled(names):
        return {
            ("algo_" if name.isdigit() else "") + name.lower(): code
            for code, name in enumerate(names)
        }

    assert {
        Pass.forward: spelled(FORWARD),
        Pass.backward_data: spelled(BACKWARD_DATA),
        Pass.backward_filter: spelled(BACKWARD_FILTER),
    } == CODES


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("implicit_gemm", (0, 1, 1)),
        ("implicit_precomp_gemm", (1, 1, 1)),
        ("gemm", (2, 1, 1)),
        ("direct", (3, 1, 1)),
        ("fft", (4, 2, 2)),
        ("fft_tiling", (5, 3, 6)),
        ("winograd", (6, 4, 5)),
        ("winograd_nonfused", (7, 5, 5)),
    ],
)
def test_each_pass_is_handed_the_code_of_the_name(cudnn, name, codes):
    scripted = cudnn()
    layer = nn.Conv2d(4, 6, 3, padding=1)
    reference = of_training(layer, torch.randn(2, 4, 9, 8))
    of_training(layer, torch.randn(2, 4, 9, 8), Forced(name=name, backend="cudnn"))
    ran = dict.fromkeys((which, code) for which, code, *_ in scripted.calls)
    assert list(ran) == list(
        zip(("Forward", "BackwardData", "BackwardFilter"), codes, strict=True)
    ), reference


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_outputs_and_gradients_are_those_of_torch(cudnn, data):
    cudnn()
    groups, kernel = (
        data.draw(st.sampled_from([1, 1, 2, 3])),
        data.draw(st.sampled_from([(1, 1), (3, 3), (2, 4), (5, 1)])),
    )
    dilation = data.draw(st.sampled_from([1, 2]))
    stride = data.draw(st.sampled_from([1, 2, (2, 1)]))
    padding = data.draw(st.sampled_from([0, 1, (2, 0), "same"] if stride == 1 else [0, 1, (2, 0)]))
    mode = data.draw(st.sampled_from(["zeros", "zeros", "reflect"]))
    bias, last = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    layer = nn.Conv2d(
        2 * groups, 3 * groups, kernel, stride, padding, dilation, groups, bias, mode, dtype=dtype
    )
    batch = data.draw(st.sampled_from([0, 1, 3]))
    inputs = torch.randn(batch, 2 * groups, 11, 12, dtype=dtype)
    if last:
        layer, inputs = (
            layer.to(memory_format=torch.channels_last),
            inputs.to(memory_format=torch.channels_last),
        )
    forced = Forced(
        name=data.draw(st.sampled_from(["gemm", "fft", "winograd_nonfused"])), backend="cudnn"
    )
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    for ours, theirs in zip(
        of_training(layer, inputs, forced), of_training(layer, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_stride=True)
    with torch.inference_mode():
        reference = layer(inputs)
        with forced.applied(session(layer)):
            torch.testing.assert_close(
                layer(inputs), reference, rtol=tolerance, atol=tolerance, check_stride=True
            )
            if batch:
                torch.testing.assert_close(
                    layer(inputs[0]), reference[0], rtol=tolerance, atol=tolerance
                )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_half_precisions_and_autocast(cudnn, dtype, last):
    scripted = cudnn()
    layer, inputs = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 9, 8)
    if last:
        layer, inputs = (
            layer.to(memory_format=torch.channels_last),
            inputs.to(memory_format=torch.channels_last),
        )
    forced = Forced(name="gemm", backend="cudnn")
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            reference = of_training(layer, inputs)
            ours = of_training(layer, inputs, forced)
        for one, other in zip(ours, reference, strict=True):
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)
    assert {math for _, _, math, _ in scripted.calls} == {1}
    with torch.inference_mode(), forced.applied(session(layer.to(dtype))):
        assert layer(inputs.to(dtype)).dtype is dtype


@pytest.mark.parametrize(("allowed", "math"), [(True, 0), (False, 3)])
def test_tf32_is_what_torch_allows(cudnn, monkeypatch, allowed, math):
    scripted = cudnn()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    forced, layer = Forced(name="gemm", backend="cudnn"), nn.Conv2d(4, 6, 3)
    of_training(layer, torch.randn(1, 4, 8, 8), forced)
    assert {each for _, _, each, _ in scripted.calls} == {math}
    assert forced.report().layers[0].math == {0: "default", 3: "fma"}[math]


def test_a_pass_that_cudnn_refuses_is_torchs_and_says_so(cudnn):
    scripted = cudnn(refuses=lambda which, code, *_: which == "BackwardFilter")
    layer, inputs = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    forced = Forced(name="fft", backend="cudnn")
    ours, reference = of_training(layer, inputs, forced), of_training(layer, inputs)
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other)
    (row,) = forced.report().layers
    assert [(each.selected, each.status.value) for each in row.passes] == [
        ("cudnn.fft", "requested"),
        ("cudnn.fft", "requested"),
        ("default", "fallback"),
    ]
    assert row.status.value == "fallback"
    assert row.reason == "backward filter: cuDNN: NOT_SUPPORTED"
    assert forced.report().share == pytest.approx(2 / 3)
    assert {which for which, *_ in scripted.calls} == {"Forward", "BackwardData"}


def test_a_layer_left_to_torch_tries_no_other_algorithm(cudnn):
    scripted = cudnn(refuses=lambda which, code, *_: code == 4)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3))
    forced = Forced(name="fft", layers={"1": "gemm"}, backend="cudnn")
    with torch.inference_mode(), forced.applied(session(model)):
        model(torch.randn(1, 4, 8, 8))
    assert [each.status.value for each in forced.report().layers] == ["fallback", "requested"]
    assert {code for _, code, *_ in scripted.calls} == {2}


def test_late_cudnn_refusals_are_found_before_the_model_runs(cudnn):
    cudnn(fails=lambda which, code, *_: code == 4)
    layer, forced = nn.Conv2d(4, 6, 3), Forced(name="fft", backend="cudnn")
    with torch.inference_mode(), forced.applied(session(layer)):
        layer(torch.randn(1, 4, 8, 8))
    with pytest.raises(
        Unsupported, match=r"fft: cuDNN: NOT_SUPPORTED.*What can: direct, gemm, implicit_gemm, "
    ):
        forced.report()


def test_the_most_native_backend_that_can_computes(cudnn):
    cudnn(refuses=lambda which, code, *_: which == "Forward" and code in (3, 6))
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3))
    forced = Forced(name="winograd", layers={"1": "gemm"})
    with torch.inference_mode(), forced.applied(session(model)):
        model(torch.randn(1, 4, 8, 8))
    assert [each.passes[0].selected for each in forced.report().layers] == [
        "torch.winograd",
        "cudnn.gemm",
    ]
    assert forced.report().facts()["backends"] == ["cudnn", "torch"]
    assert forced.report().share == 1


def test_a_workspace_has_a_limit_and_is_told(cudnn):
    cudnn(workspace=lambda which, code: 4096 if code == 2 else 0)
    layer = nn.Conv2d(4, 6, 3)
    for limit, status in ((None, "requested"), (4096, "requested"), (4095, "fallback")):
        forced = Forced(name="gemm", workspace_bytes=limit, layers={"0": "gemm"}, backend="cudnn")
        model = nn.Sequential(layer, nn.Conv2d(6, 6, 1))
        with (
            torch.inference_mode(),
            Forced(name="implicit_gemm", backend="cudnn").applied(session(model)),
        ):
            with forced.applied(session(model)):
                model(torch.randn(1, 4, 8, 8))
            row = next(iter(layer for each in forced._layers for layer in each.reports()))
            assert row.status.value == status
            if status == "requested":
                assert forced.report().workspace_peak_bytes == 4096
            else:
                assert (
                    row.reason
                    == "it needs 4.00 KiB of workspace, more than algorithm.workspace_bytes=4095"
                )
    with pytest.raises(UserError, match="give 0 or more"):
        Forced(name="gemm", workspace_bytes=-1)


def test_backward_algorithms_can_be_named(cudnn):
    scripted = cudnn()
    forced = Forced(name="gemm", backend="cudnn", backward_data="Algo 0", backward_filter="algo_3")
    of_training(nn.Conv2d(4, 6, 3), torch.randn(1, 4, 8, 8), forced)
    assert {(which, code) for which, code, *_ in scripted.calls} == {
        ("Forward", 2),
        ("BackwardData", 0),
        ("BackwardFilter", 3),
    }
    with pytest.raises(
        UserError, match=r"backward_data algorithm of cuDNN's 'algo_3'. Did you mean"
    ):
        Forced(name="gemm", backward_data="algo_3")


def test_deterministic_runs_refuse_unrepeatable_algorithms(cudnn):
    cudnn()
    forced = Forced(name="gemm", backend="cudnn", backward_data="algo_0")
    torch.use_deterministic_algorithms(True)
    try:
        of_training(nn.Conv2d(4, 6, 3), torch.randn(1, 4, 8, 8), forced)
    finally:
        torch.use_deterministic_algorithms(False)
    assert forced.report().layers[0].reason == "backward data: algo_0 is not deterministic"


def test_the_heuristic_chooses_for_each_layer_within_the_limit(cudnn):
    scripted = cudnn(
        ranking={"Forward": [7, 1, 0], "BackwardData": [5], "BackwardFilter": [0]},
        refuses=lambda which, code, first, *_: code == 7 and first["shape"][1] == 4,
        workspace=lambda which, code: 100 if code == 5 else 0,
    )
    model, inputs = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3)), torch.randn(1, 4, 8, 8)
    forced = Forced(name="guess", workspace_bytes=99)
    of_training(model, inputs, forced)
    first, second = forced.report().layers
    assert [each.selected for each in first.passes] == [
        "cudnn.implicit_precomp_gemm",
        "default",
        "cudnn.algo_0",
    ]
    assert second.used == "winograd_nonfused"
    assert "no choice within the limit" in first.reason
    assert scripted.calls


def test_each_thread_has_a_handle_on_the_current_stream(cudnn, monkeypatch):
    scripted = cudnn()
    layer, inputs, stream = nn.Conv2d(4, 6, 3), torch.randn(1, 4, 8, 8), [5]
    monkeypatch.setattr(library_module, "current_stream", lambda device: stream[0])
    with torch.inference_mode(), Forced(name="gemm", backend="cudnn").applied(session(layer)):

        def call():
            with torch.inference_mode():
                layer(inputs)

        call()
        call()
        stream[0] = 6
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert scripted.streams == [(1, 5), (1, 6), (2, 6)]
    assert scripted.calls[-1][-1] == 2


@pytest.mark.slow
def test_the_operators_are_what_torch_wants_of_operators(cudnn):
    cudnn()
    for last, engine in (
        (False, "cudnn.gemm"),
        (True, "cudnn.implicit_gemm"),
        (False, "default"),
        (True, "benchmark"),
    ):
        layout = torch.channels_last if last else torch.contiguous_format
        inputs = torch.randn(2, 4, 9, 8).to(memory_format=layout).requires_grad_()
        weight = torch.randn(6, 2, 3, 3).to(memory_format=layout).requires_grad_()
        backward = "cudnn.algo_1" if engine.startswith("cudnn") else engine
        common = ([1, 2], [1, 0], [1, 1], 2, last)
        torch.library.opcheck(
            torch.ops.perfexp.convolution, (inputs, weight, *common, engine, backward, backward)
        )
        grad = torch.randn(2, 6, 9, 3).to(memory_format=layout)
        for name in ("data", "filter"):
            operator = getattr(torch.ops.perfexp, f"convolution_backward_{name}")
            torch.library.opcheck(
                operator, (grad, inputs.detach(), weight.detach(), *common, backward)
            )


@pytest.mark.slow
def test_a_compiled_model_computes_by_cudnn(cudnn):
    scripted = cudnn()
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 1))
    compiled, inputs = (
        torch.compile(model, dynamic=False, backend="aot_eager"),
        torch.randn(2, 4, 9, 8),
    )
    reference, forced = of_training(model, inputs), Forced(name="fft", backend="cudnn")
    with forced.applied(session(model)):
        for _ in range(2):
            for one, other in zip(of_training(compiled, inputs), reference, strict=True):
                torch.testing.assert_close(one, other)
    assert {(which, code) for which, code, *_ in scripted.calls} == {
        ("Forward", 4),
        ("BackwardData", 2),
        ("BackwardFilter", 2),
    }
    torch.compiler.reset()


def test_gradients_of_kernels_of_ours_come_by_the_same_kernel(monkeypatch):
    from perfexp.convolution import operators
    from perfexp.convolution.portable import algorithms

    called = []

    def kernel(inputs, weight, convolution):
        called.append(convolution)
        return algorithms.ALGORITHMS["direct"].compute(inputs, weight, convolution)

    monkeypatch.setitem(operators._KERNELS, "triton.direct", kernel)
    words = Engines("triton.direct", "triton.direct", "default")
    for groups, padding, dilation in ((1, 1, 1), (2, (2, 0), 2)):
        layer = nn.Conv2d(
            4, 6, 3, padding=padding, dilation=dilation, groups=groups, dtype=torch.float64
        )
        inputs = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
        convolution = operators.Convolution.of(layer.weight.shape, 1, padding, dilation, groups)
        grad = torch.randn_like(layer(inputs))
        ours = torch.autograd.grad(
            words.compute(convolution, inputs, layer.weight, layer.bias), inputs, grad
        )
        theirs = torch.autograd.grad(layer(inputs), inputs, grad)
        torch.testing.assert_close(ours, theirs)
    assert len(called) == 4


def test_a_cudnn_without_the_interface_says_what_is_missing():
    with pytest.raises(CudnnError, match="no v7 interface: cudnnConvolutionForward"):
        Library(ScriptedCudnn(lacks=("cudnnConvolutionForward",)))


def test_a_device_without_cudnn_says_so():
    assert why_no_cudnn(torch.device("cpu")) == "cuDNN is for NVIDIA GPUs"
    for arguments, message in (
        (
            {"name": "gemm", "backend": "cudnn"},
            "algorithm=gemm algorithm.backend=cudnn: cuDNN is for NVIDIA GPUs",
        ),
        ({"name": "guess"}, "guess is cuDNN's own"),
    ):
        forced = Forced(**arguments)
        with pytest.raises(UserError, match=message), forced.applied(session(nn.Conv2d(1, 1, 1))):
            pass


@pytest.mark.parametrize(("name", "taken"), [("onednn", True), ("native", False)])
def test_on_a_processor_torch_has_two_of_its_own(name, taken):
    layer, forced = nn.Conv2d(16, 16, 3), Forced(name=name)
    inputs, before = torch.randn(2, 16, 32, 32), torch.backends.mkldnn.enabled
    with torch.inference_mode():
        reference = layer(inputs)
        with forced.applied(session(layer)):
            assert torch.backends.mkldnn.enabled is taken
            torch.testing.assert_close(layer(inputs), reference, rtol=1e-4, atol=1e-4)
            names = [each.key for each in _operators(layer, inputs)]
    assert any("mkldnn" in each for each in names) is taken
    assert forced.report().share == 1
    assert forced.report().layers[0].used == name
    assert torch.backends.mkldnn.enabled == before


def _operators(layer, inputs):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        layer(inputs)
    return seen.key_averages()


def test_what_torch_does_not_compute_so_is_no_success():
    layer, forced = nn.Conv2d(4, 4, 3, dtype=torch.float64), Forced(name="onednn")
    with torch.inference_mode(), forced.applied(session(layer)):
        layer(torch.randn(1, 4, 8, 8, dtype=torch.float64))
    with pytest.raises(Unsupported, match="torch takes Slow2d for it"):
        forced.report()
