"""Attention backends: forced, proven, raced and taken home, with torch's own backends on a CPU."""

import json

import msgspec
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import perfexp
from perfexp.convolution import attention, proof
from perfexp.convolution.attention import AttentionBackends
from perfexp.convolution.backends import PassChoice
from perfexp.convolution.coverage import LayerStatus, Pass, PassReport
from perfexp.convolution.race import software_of
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Attention, tf32
from perfexp.records import algorithm_plan
from perfexp.records.record import Metric

FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"


def drawn(*shape, gradient=True):
    return torch.randn(*(shape or (2, 4, 16, 8)), requires_grad=gradient)


def operators(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages() if "dot_product" in event.key}


def trained(query):
    scaled_dot_product_attention(query, query, query).sum().backward()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def forced(cache):
    def make(wanted, **settings):
        return AttentionBackends(Attention(wanted), CpuDevice(), **settings).applied()

    return make


@pytest.mark.parametrize(("wanted", "ran"), [("flash", FUSED), ("math", MATH), ("auto", FUSED)])
def test_a_backend_computes_before_and_after_the_report(forced, wanted, ran):
    query = drawn()
    with forced(wanted) as backends:
        before = operators(lambda: trained(query))
        backends.report()
        after = operators(lambda: trained(query))
    assert ran in before
    assert ran in after
    assert {FUSED, MATH} - {ran} <= {FUSED, MATH} - before - after


def test_after_it_torch_chooses_again(forced):
    with forced("math"):
        pass
    assert FUSED in operators(lambda: trained(drawn()))
    assert torch.backends.mha.get_fastpath_enabled()


def test_recomputation_uses_the_backend(forced):
    query = drawn()

    def attend(inputs):
        return scaled_dot_product_attention(inputs, inputs, inputs).sum()

    with forced("math") as backends:
        seen = operators(lambda: checkpoint(attend, query, use_reentrant=False).backward())
        [layer] = backends.report().layers
    assert FUSED not in seen
    assert layer.calls == 2


@pytest.mark.parametrize("wanted", ["flash", "math"])
def test_each_pass_is_proven_by_its_operators(forced, wanted):
    query = drawn()
    with forced(wanted, verify=True) as backends:
        backends.begin_point()
        trained(query)
        assert {one.status for one in backends.report().layers[0].passes} == {LayerStatus.requested}
        assert backends.prove(lambda: trained(query))
        report = backends.report()
    passes = report.layers[0].passes
    assert [(one.which, one.status, one.ran) for one in passes] == [
        (Pass.forward, LayerStatus.ok, wanted),
        (Pass.backward, LayerStatus.ok, wanted),
    ]
    assert [metric.value for metric in report.metrics()] == [1.0, 1.0]
    assert not report.doubts()


def test_swapped_backends_are_found_out(forced, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "flash", attention.BACKENDS["math"])
    monkeypatch.setattr(attention, "why_not", lambda *_: None)
    query = drawn()
    with forced("flash", verify=True) as backends:
        trained(query)
        backends.prove(lambda: trained(query))
        report = backends.report()
    assert report.layers[0].status is LayerStatus.substituted
    assert "attention_substituted" in {doubt.code for doubt in report.doubts()}


def test_a_shape_that_a_backend_cannot_compute_is_left_to_torch(forced):
    mask = torch.zeros(16, 16, requires_grad=True)
    query = drawn(gradient=False)
    with forced("flash") as backends:
        scaled_dot_product_attention(query, query, query)
        scaled_dot_product_attention(query, query, query, attn_mask=mask)
        report = backends.report()
    assert [layer.status for layer in report.layers] == [
        LayerStatus.requested,
        LayerStatus.fallback,
    ]
    assert report.share == 0.5
    assert [doubt.code for doubt in report.doubts()] == ["attention_fallback"]


def test_a_backend_that_computes_nothing_is_refused_in_one_line(forced):
    query = drawn(gradient=False)
    mask = torch.zeros(16, 16, requires_grad=True)
    with forced("flash") as backends:
        scaled_dot_product_attention(query, query, query, attn_mask=mask)
        with pytest.raises(Unsupported, match=r"^execution\.attention=flash can't .*choose auto"):
            backends.report()


def test_a_model_without_attention_is_refused_only_if_forced(forced):
    with forced("auto") as backends:
        assert not backends.report().layers
    with (
        forced("math") as backends,
        pytest.raises(UserError, match=r"no scaled_dot_product_attention"),
    ):
        backends.report()


def test_the_report_tells_shapes_apart(forced):
    query, key = drawn(1, 4, 16, 8), drawn(1, 2, 32, 8)
    with forced("auto") as backends:
        scaled_dot_product_attention(query, query, query, is_causal=True)
        scaled_dot_product_attention(query, key, key, enable_gqa=True)
        layers = backends.report().layers
    assert [layer.name for layer in layers] == [
        "1×4×16×8 causal",
        "1×4×16×8 key-value 2×32",
    ]
    # 2 × (queries × keys × width) for each of two products
    assert [layer.passes[0].flops for layer in layers] == [4 * 16 * 16 * 8 * 4, 4 * 16 * 32 * 8 * 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("wanted", ["fastest", "math"])
def test_compiled_attention_uses_the_backend(forced, wanted):
    torch.compiler.reset()
    query = drawn()
    compiled = torch.compile(lambda one: scaled_dot_product_attention(one, one, one), dynamic=False)
    with forced(wanted, compiled=True) as backends:
        outputs = compiled(query)
        outputs.sum().backward()
        [layer] = backends.report().layers
    assert layer.used in ({"math"} if wanted == "math" else {"flash", "math"})
    torch.testing.assert_close(outputs, scaled_dot_product_attention(query, query, query))


def test_fastest_races_once_and_reads_the_cache_later(forced, cache):
    query = drawn(1, 2, 32, 8)
    for kept in (False, True):
        with forced("fastest") as backends:
            trained(query)
            [layer] = backends.report().layers
        first = layer.passes[0]
        assert set(first.errors) == {"flash", "math"}
        assert first.seconds
        if first.not_cached is None and kept:
            assert first.kept_since is not None or not list(cache.rglob("*.json"))


@pytest.mark.parametrize(("winner", "is_left"), [("flash", True), ("math", False)])
def test_fastest_leaves_fast_paths_to_torch_if_it_agrees(forced, monkeypatch, winner, is_left):
    def choose(_, problem):
        return {which: PassChoice(engine=winner) for which in problem.passes}

    monkeypatch.setattr(attention.FastestBackend, "choose", choose)
    query = drawn(gradient=False)
    with forced("fastest") as backends:
        scaled_dot_product_attention(query, query, query)
        assert not torch.backends.mha.get_fastpath_enabled()
        backends.report()
        assert torch.backends.mha.get_fastpath_enabled() is is_left
        assert backends.run_baseline("auto", torch.backends.mha.get_fastpath_enabled)
        assert torch.backends.mha.get_fastpath_enabled() is is_left


def test_fastest_races_with_dropout_by_errors_without_it(forced):
    query = drawn(1, 2, 16, 8)
    state = torch.random.get_rng_state()
    with forced("fastest") as backends:
        scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        [layer] = backends.report().layers
    assert layer.passes[0].errors["math"] < 1e-5
    torch.random.set_rng_state(state)


@pytest.mark.parametrize(
    ("kernel", "backend"),
    [
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd>", "flash"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "flash"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "efficient"),
        ("fmha_cutlassB_f32_aligned_64x64_k64_sm80", "efficient"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "cudnn"),
        ("void at::native::vectorized_elementwise_kernel<4>", None),
    ],
)
def test_a_kernel_belongs_to_its_backend(kernel, backend):
    assert proof.fused_backend(kernel) == backend


def test_products_and_softmax_alone_are_math():
    gemm = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n"
    assert proof.backend_of([gemm, "softmax_warp_forward", gemm]) == "math"
    assert proof.backend_of([gemm]) is None
    assert proof.backend_of(["flash_fwd_kernel", "fmha_cutlassF"]) is None


def test_an_unknown_kernel_proves_nothing():
    seen = proof.AttentionSeen(everything=["mystery"])
    seen.add(Pass.forward, ["mystery"])
    report = PassReport(which=Pass.forward, selected="flash", status=LayerStatus.requested)
    proven = seen.proven(report)
    assert proven.status is LayerStatus.unproven
    assert "mystery" in str(proven.reason)


def test_reasons_of_torch_are_those_of_the_backend_alone():
    texts = [
        "Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:1.)",
        "Expected query to have type float. (Triggered internally at sdp_utils.cpp:2.)",
        "Flash attention kernel not used because: (Triggered internally at sdp_utils.cpp:3.)",
        "Flash attention has been runtime disabled. (Triggered internally at sdp_utils.cpp:4.)",
        "Expected head dimension of at most 256. (Triggered internally at sdp_utils.cpp:5.)",
    ]
    assert list(attention._reasons("flash", texts)) == ["Expected head dimension of at most 256"]


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 4, 4)
        self.block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, images):
        return self.block(self.first(images).flatten(2).transpose(1, 2)).mean(1)


def plan_of(**changed):
    place = {name: software_of(CpuDevice())[name] for name in ("device", "torch", "cudnn")}
    layer = {"name": "first", "input_shape": [1, 3, 16, 16], "dtype": "float32"}
    shape = {"name": "1×2×16×4", "input_shape": [1, 2, 16, 4], "dtype": "float32"}
    plan = {
        "model": "small",
        **place,
        "layers": [{**layer, "passes": {"forward": "torch.gemm"}}],
        "attention": [{**shape, "passes": {"forward": "math"}}],
    }
    return plan | changed


@pytest.fixture
def written(tmp_path):
    def write(**changed):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan_of(**changed)))
        return path

    return write


def test_a_plan_computes_within_its_block_only(written):
    module, images = Small().eval(), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        expected = module(images)
        with perfexp.apply(module, plan=written()):
            seen = operators(lambda: module(images))
            torch.testing.assert_close(module(images), expected)
            assert "_conv_forward" in module.first.__dict__
    assert MATH in seen
    assert "_conv_forward" not in module.first.__dict__


def test_a_plan_stays_without_a_block_and_trains(written):
    module, images = Small(), torch.randn(1, 3, 16, 16)
    applied = perfexp.apply(module, plan=written())
    module(images).sum().backward()
    assert module.first.weight.grad is not None
    applied.remove()
    assert "_conv_forward" not in module.first.__dict__


def test_the_gain_of_a_plan_has_an_interval(written):
    module, images = Small().eval(), torch.randn(1, 3, 16, 16)
    with torch.no_grad(), perfexp.apply(module, plan=written()) as applied:
        gain = perfexp.gain(applied, lambda: module(images))
    assert gain.low <= gain.value <= gain.high


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"device": "NVIDIA H200"}, "for device NVIDIA H200, not .*: measure here, or pass"),
        ({"torch": "1.0"}, "for torch 1.0, not"),
        ({"cudnn": 91900}, "for cudnn 91900, not None"),
        ({"format": 2}, "has format 2; this perfexp reads 1"),
        ({"layers": 3}, "is not an algorithm plan"),
    ],
)
def test_a_plan_of_another_place_is_refused_in_one_line(written, changed, message):
    module = Small()
    with pytest.raises(UserError, match=message) as caught:
        perfexp.apply(module, plan=written(**changed))
    assert "\n" not in str(caught.value)
    assert "_conv_forward" not in module.first.__dict__


def test_a_plan_for_another_tf32_flag_is_refused(written):
    path = written(cudnn_allow_tf32=not tf32.allowed()[1])
    with pytest.raises(UserError, match=r"for cudnn_allow_tf32 .*, not "):
        perfexp.apply(Small(), plan=path)


def test_a_plan_promises_the_interval_over_processes(make_record):
    layer = {"name": "first", "input_shape": [1, 3, 8, 8], "dtype": "float32"}
    passes = [{"which": "forward", "selected": "torch.gemm", "status": "ok"}]
    record = make_record()
    [first] = (point for point in record.points if point.key.is_timed)
    first.facts["algorithm"] = {"name": "fastest", "layers": [{**layer, "passes": passes}]}
    first.metrics[:] = [Metric.of("algorithm/speedup_over_default", 1.2, low=1.199, high=1.201)]
    [single] = algorithm_plan.of_record(record).gains.values()
    assert single == (1.2, 1.199, 1.201)
    again = Metric.of("algorithm/speedup_over_default", 1.25, low=1.249, high=1.251)
    key = msgspec.structs.replace(first.key, replicate=1)
    record.points.append(msgspec.structs.replace(first, key=key, metrics=[again]))
    [(value, low, high)] = algorithm_plan.of_record(record).gains.values()
    assert low < 1.2 < value < 1.25 < high


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"algorithm": {"name": "default"}}, "measure with algorithm=fastest or execution"),
        ({"algorithm": {"name": "fastest"}}, "torch's own choice was the fastest everywhere"),
        ({"execution": {"attention": "fastest"}}, "torch's own choice"),
    ],
)
def test_a_run_that_chose_nothing_has_no_plan(make_record, plan, why):
    with pytest.raises(UserError, match=f"^This run has no plan: .*{why}"):
        algorithm_plan.of_record(make_record(plan=plan))


def test_a_plan_of_another_model_is_refused(written):
    with pytest.raises(UserError, match="no 2-D convolution 'first'"):
        perfexp.apply(torch.nn.Linear(1, 1), plan=written())


@pytest.mark.parametrize(
    "engine", ["os.system", "torch.nothing", "cudnn.gemm", "triton.direct", ""]
)
def test_an_engine_that_a_device_lacks_is_left_to_torch(written, engine):
    layer = {"name": "first", "input_shape": [1, 3, 16, 16], "dtype": "float32"}
    path = written(layers=[{**layer, "passes": {"forward": engine}}])
    module, images = Small().eval(), torch.randn(1, 3, 16, 16)
    with torch.no_grad(), perfexp.apply(module, plan=path):
        assert module(images).isfinite().all()


@pytest.mark.slow
def test_another_device_is_measured_again_where_asked(written, cache):
    module, images = Small().eval(), torch.randn(1, 3, 16, 16)
    with torch.no_grad(), perfexp.apply(module, plan=written(torch="1.0"), remeasure=True):
        assert module(images).isfinite().all()
    assert list(cache.rglob("*.json"))


@pytest.mark.slow
def test_a_run_records_its_attention(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"input_size": 16, "gpu": "cpu", "stopping": "coarse", "tracking": "none"}
    settings |= {"mode": "train", "execution__attention_verify": True}
    record = perfexp.measure(
        Small(), execution__attention="math", output_dir=str(tmp_path / "run"), **settings
    )
    [point] = [point for point in record.points if point.key.is_timed]
    [shape] = point.facts["attention"]["layers"]
    assert shape["name"] == "1×2×16×4"
    assert [one["status"] for one in shape["passes"]] == ["ok", "ok"]
    assert point.metric("attention/proven_share").value == 1
    [table] = (tmp_path / "run").glob("*_attention.csv")
    assert len(table.read_text().splitlines()) == 3
    report = (tmp_path / "run" / "report.md").read_text()
    assert "math (proven): 1 of 1×2×16×4 float32" in report
