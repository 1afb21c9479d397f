"""Whether the kernels that ran are those of the algorithm that was asked for; kernels_seen.json is from an H200."""

import json
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

from perfexp.convolution import convolution_plan as plan_module
from perfexp.convolution import families, proof
from perfexp.convolution.coverage import AlgorithmReport, LayerReport, LayerStatus, Pass, PassReport
from perfexp.convolution.cudnn import CODES
from perfexp.convolution.families import (
    Families,
    bare,
    forward_algorithm,
    judge,
    judge_forward,
    shipped,
)
from perfexp.convolution.forced import Forced
from tests.support.selection import slow_after

SEEN = json.loads((Path(__file__).parent / "kernels_seen.json").read_text())
RAN = {
    which: sorted({call["algorithm"] for call in SEEN if call["which"] == which}) for which in CODES
}
ENTRY = {
    "Forward": Pass.forward,
    "BackwardData": Pass.backward_data,
    "BackwardFilter": Pass.backward_filter,
}
#: What an H200's cuDNN has no kernel for: neither of two such names runs anything, so swapping them changes nothing.
NEVER = {
    Pass.forward: {"direct", "winograd"},
    Pass.backward_data: {"winograd"},
    Pass.backward_filter: {"winograd", "fft_tiling"},
}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (
            "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false>(int, int)",
            "implicit_convolve_sgemm",
        ),
        (
            "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize256x64x8_stage3_warpsize2x2x1_g1_ffma",
            "xmma_fprop",
        ),
        (
            "sm90_xmma_wgrad_indexed_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x128x64_cgasize1x1x1",
            "xmma_wgrad",
        ),
        (
            "sm80_xmma_gemm_cf32cf32_f32f32_cf32_nt_n_tilesize32x64x8_stage3_warpsize2x2x1_ffma_aligna8",
            "xmma_gemm_complex",
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4",
            "xmma_gemm",
        ),
        (
            "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(cudnn::P<float>)",
            "winogradForwardData",
        ),
        (
            "void cudnn::winograd_nonfused::winogradForwardData9x9_5x5<float, float>(cudnn::P<float>)",
            "winogradForwardData",
        ),
        (
            "void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*, int)",
            "fft2d_r2c_32x32",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm::Params)",
            "cutlass_gemm",
        ),
        (
            "void cutlass::Kernel2<cutlass_75_wmma_tensorop_s161616gemm_f16_32x32_64x2_tn_align1>(x)",
            "cutlass_gemm",
        ),
        (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_optimized_f16_64x64_64x5_nhwc_align8>(x)",
            "cutlass_fprop",
        ),
        ("nvjet_sm90_hsh_448x64_64x2_1x2_h_bz_coopB_NNN", "nvjet"),
        (
            "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, int, float>(p)",
            "conv2d_grouped_direct_kernel",
        ),
        ("Memset (Device)", "Memset"),
    ],
)
def test_a_kernels_bare_name_has_no_types_sizes_and_architecture(kernel, name):
    assert bare(kernel) == name


@pytest.mark.parametrize(
    ("which", "kernels", "algorithm"),
    [
        (Pass.forward, ["im2col4d_kernel", "explicit_convolve_sgemm"], "gemm"),
        (Pass.forward, ["conv2d_grouped_direct_kernel"], "direct"),
        (Pass.forward, ["nvjet_sm90_hsh_448x64_64x2"], "implicit_precomp_gemm"),
        (Pass.backward_filter, ["Memset (Device)", "void wgrad_alg0_engine<float>(int)"], "algo_0"),
        (Pass.backward_data, ["void cudnn::detail::dgrad_engine<float>(int)"], "algo_0"),
    ],
)
def test_kernels_belong_to_an_algorithm(which, kernels, algorithm):
    assert shipped().likely(which, kernels) == [algorithm]


def test_kernels_that_nobody_has_seen_belong_to_none():
    assert shipped().likely(Pass.forward, ["some_new_kernel"]) == []
    empty = Families(seen="nothing", architecture="sm_90", cudnn=91900, counts={})
    assert empty.likely(Pass.forward, ["im2col4d_kernel"]) == []


@pytest.mark.parametrize("which", list(CODES))
def test_nearly_all_recorded_calls_are_identified(which):
    calls = [call for call in SEEN if call["which"] == which]
    for algorithm in RAN[which]:
        own = [call for call in calls if call["algorithm"] == algorithm]
        right = sum(
            call["calls"] for call in own if algorithm in shipped().likely(which, call["kernels"])
        )
        instead = sum(call["calls"] for call in own if _substitutes(call["kernels"]))
        assert right + instead >= 0.98 * sum(call["calls"] for call in own), algorithm
        if algorithm != "algo_3":  # which cuDNN never runs: it is algo_0 or algo_1 every time
            assert right >= 0.6 * sum(call["calls"] for call in own), algorithm


def _substitutes(kernels):
    return any(
        word in kernel for word in ("direct", "alg0", "alg1") for kernel in kernels
    ) or kernels == ["implicit_convolve_sgemm"]


def _refused(which, asked, ran):
    """How many of an algorithm's calls would not be taken for another that was asked for."""
    calls = [call for call in SEEN if call["which"] == which and call["algorithm"] == ran]
    return sum(
        call["calls"] for call in calls if asked not in shipped().likely(which, call["kernels"])
    )


@pytest.mark.parametrize(
    ("which", "pair"), [(which, pair) for which in CODES for pair in combinations(RAN[which], 2)]
)
def test_any_two_codes_that_are_swapped_are_found_out(which, pair):
    one, other = pair
    assert _refused(which, one, other) + _refused(which, other, one) > _refused(
        which, one, one
    ) + _refused(which, other, other)


@pytest.mark.parametrize("which", list(CODES))
def test_every_algorithm_was_seen_or_has_no_kernel(which):
    assert {*RAN[which], *NEVER[which]} == set(CODES[which])


@pytest.fixture
def cudnn(monkeypatch, scripted):
    """A cuDNN that launches what an H200's did for a 3 × 3 convolution, whatever the binding calls it."""
    made = scripted(
        refuses=lambda which, code, *_: _spelled(ENTRY[which], code) in NEVER[ENTRY[which]],
    )
    usual = {}
    for call in sorted(SEEN, key=_tells):
        usual[call["which"], call["algorithm"]] = call["kernels"]
    true_codes = {which: dict(names) for which, names in CODES.items()}

    def _kernels(which, code):
        name = next(name for name, each in true_codes[ENTRY[which]].items() if each == code)
        if name == "algo_3" and made.half:
            return ["Memset (Device)", "wgrad_alg1_engine", "convertTensor_kernel"]
        return usual[ENTRY[which], name]

    made.half = False

    made.kernels = _kernels
    monkeypatch.setattr(
        proof, "mark", lambda: made.launched.append("void at::cuda::spin_kernel(long)")
    )

    def names(call):
        made.launched.clear()
        call()
        return ["another_kernel", *made.launched, "one_more"]

    monkeypatch.setattr(proof, "kernel_names", names)
    return made


_TRUE = {which: {code: name for name, code in names.items()} for which, names in CODES.items()}


def _tells(call):
    """How well kernels tell what they are: alone, then often."""
    likely = shipped().likely(Pass(call["which"]), call["kernels"])
    return likely == [call["algorithm"]], call["calls"]


def _spelled(which, code):
    return _TRUE[which][code]


def prove(name, **settings):
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3))
    forced, inputs = (
        Forced(name=name, backend="cudnn", verify=True, **settings),
        torch.randn(2, 4, 9, 8),
    )
    with forced.applied(SimpleNamespace(discard_compiled=lambda: None, module=model)):

        def step():
            model(inputs.requires_grad_()).sum().backward()

        step()
        assert forced.prove(step)
    return forced.report()


def statuses(report):
    return {each.status.value for layer in report.layers for each in layer.passes}


@pytest.mark.parametrize(
    "name", ["implicit_gemm", "implicit_precomp_gemm", "gemm", "fft", "winograd_nonfused"]
)
def test_what_ran_as_asked_is_proven(cudnn, name):
    report = prove(name)
    assert statuses(report) == {"ok"}
    assert report.share == 1
    first = report.layers[0].passes[0]
    assert name in first.ran
    assert first.kernels
    assert report.doubts() == []


def test_what_cudnn_runs_instead_is_told(cudnn):
    report = prove("gemm", backward_filter="algo_3")
    assert statuses(report) == {"ok", "substituted"}
    weights = report.layers[0].passes[2]
    assert (weights.selected, weights.status.value) == ("cudnn.algo_3", "substituted")
    assert weights.reason.startswith("cuDNN ran algo_0 (")
    assert report.share == pytest.approx(2 / 3)
    assert [doubt.code for doubt in report.doubts()] == ["algorithm_substituted"]
    assert "backward filter: cuDNN ran algo_0" in report.doubts()[0].message


def judged(call, kernels):
    """A pass that was handed the algorithm of a call, and these kernels."""
    report = PassReport(
        which=Pass(call["which"]),
        selected=f"cudnn.{call['algorithm']}",
        status=LayerStatus.requested,
    )
    return judge(report, kernels)


def test_one_unknown_kernel_makes_a_call_unproven():
    for call in SEEN:
        for kernel in set(call["kernels"]) - {"Memset"}:
            report = judged(
                call,
                ["a_kernel_of_tomorrow" if name == kernel else name for name in call["kernels"]],
            )
            assert report.status is LayerStatus.unproven, call
            assert "a_kernel_of_tomorrow" in report.reason


def test_nearly_no_call_that_was_learned_is_unproven():
    unproven = sum(
        call["calls"]
        for call in SEEN
        if judged(call, call["kernels"]).status is LayerStatus.unproven
    )
    assert unproven <= 0.005 * sum(call["calls"] for call in SEEN)


@pytest.mark.parametrize(
    "kernels", [["Memset (Device)"], ["void nchwToNhwcKernel<float>(int)"], ["splitKreduce_kernel"]]
)
def test_kernels_that_run_beside_any_algorithm_prove_none(kernels):
    report = judged({"which": "forward", "algorithm": "implicit_precomp_gemm"}, kernels)
    assert (report.status, report.ran) == (LayerStatus.unproven, None)


def test_unknown_winograd_kernel_is_not_a_substitute():
    fused = "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1"
    report = judged(
        {"which": "forward", "algorithm": "winograd"},
        ["nchwToNhwcKernel", fused, "nhwcToNchwKernel"],
    )
    assert report.status is LayerStatus.unproven


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A function that sets architecture and cuDNN of the device; calibrated tables are in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda *found: monkeypatch.setattr(families, "identity", lambda: found or None)


@pytest.mark.parametrize(
    ("found", "codes"),
    [
        ((), []),
        (("sm_90", 91900), []),
        (("sm_80", 91900), ["algorithm_unproven"]),
        (("sm_90", 92000), ["algorithm_unproven"]),
    ],
)
def test_proof_by_kernels_of_another_device_or_cudnn_is_flagged(cudnn, place, found, codes):
    place(*found)
    report = prove("gemm")
    assert statuses(report) == {"ok"}
    assert [doubt.code for doubt in report.doubts()] == codes
    assert not codes or f"this is {found[0]} with cuDNN {found[1]}" in report.doubts()[0].message


def test_a_calibrated_table_is_used_in_place_of_the_shipped_one(cudnn, place):
    place("sm_80", 91900)
    table = msgspec.structs.replace(shipped(), architecture="sm_80", seen="a test")
    file = families.calibrated("sm_80", 91900)
    file.parent.mkdir(parents=True)
    file.write_bytes(msgspec.json.encode(table))
    assert families.current() == table
    assert prove("gemm").doubts() == []
    file.write_text("{}")
    assert families.current() == shipped()


def test_without_a_proof_an_algorithm_of_cudnn_is_requested_only(cudnn):
    forced = Forced(name="gemm", backend="cudnn")
    model, inputs = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1)), torch.randn(2, 4, 9, 8)
    with forced.applied(SimpleNamespace(discard_compiled=lambda: None, module=model)):
        model(inputs)
    report = forced.report()
    assert statuses(report) == {"requested"}
    assert (report.share, report.doubts()) == (1, [])


def test_kernels_that_are_not_known_prove_nothing(cudnn):
    cudnn.kernels = lambda which, code: ["a_kernel_of_tomorrow"]
    report = prove("gemm")
    assert statuses(report) == {"unproven"}
    assert "a_kernel_of_tomorrow" in report.layers[0].reason
    assert [doubt.code for doubt in report.doubts()] == ["algorithm_unproven"]


#: validation/swapped_codes.py tries them with the real cuDNN.
SWAPS = [
    (which, pair)
    for which in CODES
    for pair in combinations(CODES[which], 2)
    if not set(pair) <= NEVER[which]
]


@pytest.mark.parametrize(("which", "pair"), slow_after(20, SWAPS))
def test_a_binding_with_two_codes_swapped_is_found_out(cudnn, monkeypatch, which, pair):
    one, other = pair
    wrong = {**CODES[which], one: CODES[which][other], other: CODES[which][one]}
    found = []
    for swapped in (False, True):
        if swapped:
            monkeypatch.setitem(CODES, which, wrong)
        outcomes = []
        for cudnn.half in (
            False,
            True,
        ):  # algo_3 runs algo_0's kernel in float32, and algo_1's in half precisions
            plan_module._plans.clear()
            outcomes += [_outcome(which, name) for name in pair]
        found.append(outcomes)
    right, swapped = found
    assert right != swapped
    assert swapped.count("ok") < right.count("ok") or "ok" not in right


def _outcome(which, name):
    """Of one pass by an algorithm: `ok`, or why not."""
    settings = {} if which is Pass.forward else {which.value: name}
    algorithm = name if which is Pass.forward else "gemm"
    try:
        report = prove(algorithm, **settings)
    except Exception as error:  # nothing ran as asked
        return type(error).__name__
    return next(each.status.value for each in report.layers[0].passes if each.which is which)


def handed(*layers):
    """A report of layers, each with `implicit_precomp_gemm` for all of its passes."""
    passes = tuple(
        PassReport(
            which=which, selected="cudnn.implicit_precomp_gemm", status=LayerStatus.requested
        )
        for which in CODES
    )
    reports = [
        LayerReport(name=name, requested="implicit_precomp_gemm", passes=passes) for name in layers
    ]
    return AlgorithmReport(name="implicit_precomp_gemm", layers=tuple(reports))


OTHER = "void implicit_convolve_sgemm<float, float, 1024>(int)"
OWN = "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x64x8"


def forward_of(kernels, *layers):
    judged = judge_forward(handed(*layers), kernels)
    assert {each.ran for layer in judged.layers for each in layer.passes[1:]} == {None}, (
        "backward is left alone"
    )
    return [(layer.passes[0].status.value, layer.passes[0].ran) for layer in judged.layers]


def test_kernels_of_a_forward_pass_tell_what_ran_without_a_proof():
    assert forward_of({"a": [OWN], "b": [OTHER]}, "a", "b") == [
        ("ok", "implicit_precomp_gemm"),
        ("substituted", "implicit_gemm"),
    ]


@pytest.mark.parametrize(
    "kernels",
    [
        [],
        ["Memset (Device)"],
        ["void at::native::elementwise_kernel<4>(int)"],
        ["void nchwToNhwcKernel<float>(int)", "a_kernel_of_tomorrow"],
        [OTHER, "a_kernel_of_tomorrow"],
    ],
)
def test_kernels_of_which_one_is_not_known_tell_nothing(kernels):
    assert forward_of({"a": kernels}, "a") == [("requested", None)]


def test_kernels_of_pytorch_beside_those_of_cudnn_do_not_matter():
    bias = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
    )
    assert forward_of({"a": [OTHER, bias]}, "a") == [("substituted", "implicit_gemm")]


def test_a_layer_with_two_kinds_of_inputs_is_left_alone():
    assert forward_of({"a": [OTHER]}, "a", "a") == [("requested", None), ("requested", None)]


@pytest.mark.parametrize("selected", ["torch.gemm", "default", "triton.direct"])
def test_what_cudnn_was_not_handed_is_not_judged(selected):
    passes = (PassReport(which=Pass.forward, selected=selected, status=LayerStatus.ok),)
    report = AlgorithmReport(
        name="x", layers=(LayerReport(name="a", requested="x", passes=passes),)
    )
    assert judge_forward(report, {"a": [OTHER]}) == report


@pytest.mark.parametrize(
    ("kernels", "algorithm"),
    [
        ([OTHER], "implicit_gemm"),
        (
            ["sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x64x8"],
            "implicit_precomp_gemm",
        ),
        (["a_kernel_of_tomorrow"], None),
        (
            [
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
            ],
            None,
        ),
        ([], None),
    ],
)
def test_the_kernels_of_torchs_own_choice_name_its_algorithm(kernels, algorithm):
    found = forward_algorithm(kernels)
    assert (found or "").split(" or ")[0] == (algorithm or "")


def test_nothing_is_proven_where_that_is_not_asked_for(cudnn):
    forced = Forced(name="gemm", backend="cudnn")
    with forced.applied(SimpleNamespace(discard_compiled=lambda: None, module=nn.Conv2d(1, 1, 1))):
        assert not forced.prove(lambda: None)


def test_what_nobody_saw_is_not_proven(cudnn, monkeypatch):
    monkeypatch.setattr(proof, "kernel_names", lambda call: call() or [])
    report = prove("gemm")
    assert statuses(report) == {"unproven"}
    assert report.layers[0].reason == "its kernels were not seen"


def test_a_lost_marker_proves_nothing(cudnn, monkeypatch):
    def names(call):
        cudnn.launched.clear()
        call()
        return cudnn.launched[1:]

    monkeypatch.setattr(proof, "kernel_names", names)
    assert statuses(prove("gemm")) == {"unproven"}


def test_names_between_markers():
    names = ["a", "spin_kernel", "b", "c", "spin_kernel", "d", "spin_kernel", "spin_kernel"]
    assert proof.between_markers(names) == [("b", "c"), ()]
