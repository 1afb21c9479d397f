"""A model computes its convolutions by the algorithm that is asked for, as long as it is applied, and says so."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from perfexp.algorithms import OnUnsupported
from perfexp.algorithms.forced import Forced, choose
from perfexp.algorithms.layer import Layer
from perfexp.convolutions.portable import ALGORITHMS
from perfexp.errors import Unsupported, UserError

NAMES = tuple(ALGORITHMS)


class Functional(nn.Conv2d):
    """A convolution with a forward pass of its own, as weight standardisation has."""

    def forward(self, inputs):
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return nn.functional.conv2d(inputs, weight, self.bias, stride=[1, 1], padding=self.padding)


class Net(nn.Module):
    """A stem, convolutions of several kinds, one of them used twice, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3)
        self.features = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular", groups=4),
        )
        self.own = Functional(8, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding="same", bias=False)
        self.again = self.twice
        self.head = nn.Linear(8, 5)

    def forward(self, inputs):
        maps = self.own(self.features(self.stem(inputs)))
        return self.head(self.again(self.twice(maps)[..., ::2]).mean(dim=(2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def session(module):
    return SimpleNamespace(discard_compiled=lambda: None, module=module)


def outputs_and_gradients(module, inputs):
    module.zero_grad()
    outputs = module(inputs)
    outputs.square().sum().backward()
    return outputs.detach(), {
        name: parameter.grad.clone() for name, parameter in module.named_parameters()
    }


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_of_a_model_stay_what_they_were(net, name):
    for size in (32, 45):
        inputs = torch.randn(2, 3, size, size)
        outputs, gradients = outputs_and_gradients(net, inputs)
        with Forced(name=name).applied(session(net)):
            ours, our_gradients = outputs_and_gradients(net, inputs)
        torch.testing.assert_close(ours, outputs, rtol=1e-3, atol=1e-4)
        for key, gradient in gradients.items():
            assert (our_gradients[key] - gradient).norm() <= 1e-4 * gradient.norm(), key


def test_what_is_asked_for_is_what_computes(net, monkeypatch):
    called = []
    monkeypatch.setitem(
        ALGORITHMS, "gemm", SimpleNamespace(supports=lambda *_: None, compute=recording(called))
    )
    with Forced(name="gemm").applied(session(net)):
        net(torch.randn(1, 3, 32, 32))
    assert len(called) == 6


def recording(called):
    def compute(inputs, weight, convolution):
        called.append(convolution)
        left, _, top, _ = convolution.padding
        settings = (convolution.stride, (top, left), convolution.dilation, convolution.groups)
        return nn.functional.conv2d(inputs, weight, None, *settings)

    return compute


def test_names_classes_weights_and_hooks_stay(net):
    before, hooked = copy.deepcopy(net.state_dict()), []
    net.stem.register_forward_hook(lambda *_: hooked.append("after"))
    net.stem.register_forward_pre_hook(lambda *_: hooked.append("before"))
    with Forced(name="gemm").applied(session(net)):
        assert net.state_dict().keys() == before.keys()
        assert type(net.stem) is nn.Conv2d
        net(torch.randn(1, 3, 32, 32))
    assert hooked == ["before", "after"]
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())


def test_it_is_undone_on_leaving_also_by_an_exception(net):
    attributes = [set(module.__dict__) for module in net.modules()]
    with pytest.raises(KeyError), Forced(name="gemm").applied(session(net)):
        raise KeyError
    assert [set(module.__dict__) for module in net.modules()] == attributes


def test_the_inner_of_two_computes_and_the_outer_comes_back(net):
    outer, inner, inputs = Forced(name="gemm"), Forced(name="direct"), torch.randn(1, 3, 32, 32)
    with outer.applied(session(net)):
        with inner.applied(session(net)):
            net(inputs)
        assert outer.report().share is None
        net(inputs)
    assert inner.report().share == outer.report().share == 1.0


def test_unsupported_layer_is_left_to_torch_with_its_reason(net):
    forced = Forced(name="winograd")
    with forced.applied(session(net)), torch.inference_mode():
        net(torch.randn(2, 3, 32, 32))
    report = forced.report()
    assert [(layer.name, layer.used, layer.status.value) for layer in report.layers] == [
        ("stem", "default", "fallback"),
        ("features.0", "winograd", "ok"),
        ("features.2", "winograd", "ok"),
        ("own", "winograd", "ok"),
        ("twice", "winograd", "ok"),
        ("twice", "winograd", "ok"),
    ]
    assert report.layers[0].reason == "the kernel is 7×7, not 3×3"
    stem, others = report.layers[0].flops, sum(layer.flops for layer in report.layers[1:])
    assert stem == 2 * 2 * 8 * 16 * 16 * 3 * 49
    assert report.layers[2].flops == 2 * 2 * 8 * 16 * 16 * 2 * 9
    assert report.share == others / (stem + others)


def test_a_report_is_json_a_metric_and_a_doubt(net):
    forced = Forced(name="winograd")
    with forced.applied(session(net)):
        net(torch.randn(1, 3, 32, 32))
    report = forced.report()
    facts = json.loads(json.dumps(report.facts()))
    assert facts["layers"][0]["status"] == "fallback"
    assert facts["backends"] == ["torch"]
    share, proven, workspace = report.metrics()
    assert share.value == proven.value == report.share
    assert workspace.value is None
    assert "stem: the kernel is 7×7" in report.doubts()[0].message
    assert Forced(name="gemm").report().doubts() == []
    assert Forced(name="gemm").report().metrics()[0].value is None


def test_the_passes_of_a_training_count_too(net):
    forced = Forced(name="winograd")
    with forced.applied(session(net)):
        net(torch.randn(2, 3, 32, 32)).sum().backward()
        report = forced.report()
        with torch.no_grad():
            net(torch.randn(2, 3, 32, 32))  # an evaluation afterwards changes nothing
    assert forced.report() == report
    stem, first, *_ = report.layers
    assert [each.which.value for each in stem.passes] == ["forward", "backward_filter"]
    assert [each.which.value for each in first.passes] == [
        "forward",
        "backward_data",
        "backward_filter",
    ]
    assert stem.flops == 2 * 2 * 2 * 8 * 16 * 16 * 3 * 49


def test_layer_report_counts_calls_and_splits_kinds_of_inputs():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.once = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, inputs):
            for _ in range(5):
                inputs = self.often(inputs)
            return self.once(inputs) + self.once(inputs.to(memory_format=torch.channels_last))

    loop, forced = Loop(), Forced(name="winograd")
    with torch.inference_mode(), forced.applied(session(loop)):
        loop(torch.randn(1, 4, 8, 8))
        forced.begin_call()
        loop(torch.randn(1, 4, 8, 8))
        often, *once = forced.report().layers
    assert (often.calls, [each.calls for each in once]) == (5, [1, 1])
    assert often.flops == 5 * 2 * 4 * 4 * 9 * 64
    assert forced.report().share == pytest.approx(45 / (45 + 2))


def test_pruned_weights_are_computed_as_they_are(net):
    net.features[0].weight.data, net.features[0].bias.data = (
        net.features[0].weight[:4],
        net.features[0].bias[:4],
    )
    inputs = torch.randn(1, 8, 16, 16)
    with torch.inference_mode(), Forced(name="gemm").applied(session(net.features)):
        assert net.features[0](inputs).shape == (1, 4, 16, 16)


def test_a_convolution_that_somebody_has_patched_stays_patched(net):
    layer, inputs = net.features[0], torch.randn(1, 8, 16, 16)
    layer._conv_forward = lambda inputs, weight, bias: nn.functional.conv2d(
        inputs * 2, weight, bias, padding=1
    )
    with torch.inference_mode():
        reference, forced = layer(inputs), Forced(name="gemm")
        with forced.applied(session(net.features)):
            torch.testing.assert_close(layer(inputs), reference, rtol=1e-4, atol=1e-5)
    assert forced.report().layers[0].used == "gemm"


def test_a_model_can_be_copied_while_an_algorithm_is_applied(net):
    inputs = torch.randn(1, 3, 32, 32)
    with torch.inference_mode(), Forced(name="gemm").applied(session(net)):
        net(inputs)
        torch.testing.assert_close(copy.deepcopy(net)(inputs), net(inputs))


def test_a_report_tells_of_what_ran_since_the_last_forget(net):
    forced = Forced(name="gemm")
    with forced.applied(session(net)):
        net(torch.randn(1, 3, 64, 64))
        forced.begin_point()
        assert {layer.status.value for layer in forced.report().layers} == {"unseen"}
        net(torch.randn(1, 3, 32, 32))
    assert forced.report().layers[0].input_shape == (1, 3, 32, 32)
    assert len(forced.report().layers) == 6


def test_layers_have_algorithms_of_their_own(net):
    forced = Forced(
        name="gemm",
        layers={"features.0": "direct", "features.*": "implicit gemm", "stem": "default"},
    )
    with forced.applied(session(net)):
        net(torch.randn(1, 3, 32, 32))
    assert {layer.name: layer.used for layer in forced.report().layers} == {
        "stem": "default",
        "features.0": "direct",
        "features.2": "implicit_gemm",
        "own": "gemm",
        "twice": "gemm",
    }
    assert forced.report().share == 1.0


def test_an_exact_name_beats_a_pattern_and_then_the_last_wins():
    layers = [["a.0"], ["a.1", "shared"], ["b"]]
    assert choose(layers, "gemm", {"a.0": "fft", "a.*": "direct", "*": "winograd"}) == [
        "fft",
        "winograd",
        "winograd",
    ]
    assert choose(layers, "gemm", {"*": "winograd", "a.*": "direct"}) == [
        "direct",
        "direct",
        "winograd",
    ]
    assert choose(layers, "gemm", {"shared": "fft"}) == ["gemm", "fft", "gemm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gem"}, "Did you mean gemm"),
        ({"name": "gemm", "layers": {"stem": "windograd"}}, "Did you mean winograd"),
        (
            {"name": "gemm", "layers": {"feature.0": "direct"}},
            "'feature.0'. Did you mean features.0",
        ),
        (
            {"name": "gemm", "layers": {"head": "direct"}},
            "no 2-D convolution of the model matches 'head'",
        ),
        ({"name": "gemm", "layers": ["stem"]}, "give layers and algorithms"),
        (
            {"name": "gemm", "layers": {"stem": "onednn"}},
            "onednn is for a whole model: algorithm=onednn",
        ),
        ({"name": "gemm", "layers": {"stem": None}}, "stem has no algorithm"),
        ({"name": "gemm", "layers": {0: "direct"}}, "no 2-D convolution of the model matches '0'"),
        (
            {"name": "gemm", "verify": True},
            "algorithm.verify=true profiles cuDNN's kernels: cuDNN is for NVIDIA",
        ),
        (
            {"name": "native", "backend": "torch"},
            "algorithm.backend=torch has no meaning for algorithm=native",
        ),
        ({"name": "fastest", "max_error": float("nan")}, "max_error=nan: give a positive number"),
        ({"name": "winograd", "layers": {"[!s]*": "default"}}, "1 of 1 convolutions can't"),
        (
            {"name": "winograd", "on_unsupported": "error"},
            r"1 of 5 convolutions can't .* stem \(winograd: the kernel is 7×7",
        ),
        (
            {"name": "winograd", "on_unsupported": "error"},
            "What can: direct, gemm, implicit_gemm, implicit_precomp_gemm, def",
        ),
    ],
)
def test_what_can_not_be_meant_is_an_error(net, arguments, message):
    with pytest.raises(UserError, match=message), Forced(**arguments).applied(session(net)):
        pass


def test_model_without_convolutions_is_an_error():
    for other in (session(nn.Linear(2, 2)), SimpleNamespace()):
        with (
            pytest.raises(UserError, match="algorithm=default"),
            Forced(name="gemm").applied(other),
        ):
            pass


def test_a_point_is_skipped_where_that_is_asked_for(net):
    forced = Forced(name="winograd", on_unsupported=OnUnsupported.skip)
    with (
        forced.applied(session(net)),
        pytest.raises(
            Unsupported, match=r"stem .winograd: the kernel is 7×7.*What can: direct, gemm"
        ),
    ):
        net(torch.randn(1, 3, 32, 32))


def test_the_search_of_cudnn_is_refused_where_there_is_no_cudnn(net):
    with (
        pytest.raises(UserError, match="algorithm=benchmark needs cuDNN: cuDNN is for NVIDIA GPUs"),
        Forced(name="benchmark").applied(session(net)),
    ):
        pass


def test_what_only_the_inputs_tell_is_refused_when_they_come(net):
    inputs = torch.randn(1, 8, 16, 16)
    for choice, kind in (("error", UserError), ("skip", Unsupported)):
        with Forced(name="fft", on_unsupported=choice).applied(session(net.features)):
            net.features(inputs)
            with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(kind, match="bfloat16"):
                net.features(inputs)


def test_under_autocast_a_layer_computes_in_its_data_type(net):
    net.eval()
    inputs = torch.randn(1, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        reference = net(inputs)
        for name in ("gemm", "fft"):
            forced = Forced(name=name)
            with forced.applied(session(net)):
                ours = net(inputs)
            assert ours.dtype is reference.dtype
            torch.testing.assert_close(ours, reference, rtol=0.1, atol=0.05)
            if name == "gemm":
                assert forced.report().share == 1.0
            else:
                with pytest.raises(
                    Unsupported, match=r"FFT does not take bfloat16.*What can: direct, gemm"
                ):
                    forced.report()


def test_inputs_that_do_not_fit_get_the_error_of_torch(net):
    with Forced(name="gemm").applied(session(net)):
        for wrong in (
            torch.randn(1, 4, 32, 32),
            torch.randn(3),
            torch.randn(1, 3, 32, 32).double(),
        ):
            with pytest.raises(RuntimeError, match=r"expected|Expected|same|should be"):
                net(wrong)


def test_a_trial_on_fake_tensors_leaves_nothing_behind(net):
    from perfexp.work.trial import isolated, trial_outputs

    def shape_of_outputs(*arguments):
        return tuple(trial_outputs(*arguments).shape)

    for name in ("implicit_precomp_gemm", "winograd"):
        with Forced(name=name).applied(session(net.features)):
            shape = (1, 8, 50, 38)
            assert (
                isolated(shape_of_outputs)(net.features, shape, torch.float32, torch.device("cpu"))
                == shape
            )
            assert type(net.features(torch.randn(shape))) is torch.Tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_model_is_one_graph_and_follows_the_algorithm(net, name):
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    compiled, inputs = torch.compile(net, dynamic=False, backend=counter), torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        reference = compiled(inputs)
        plain = counter.op_count
        forced = Forced(name=name)
        with forced.applied(session(net)):
            for _ in range(3):
                torch.testing.assert_close(compiled(inputs), reference, rtol=1e-3, atol=1e-4)
        assert counter.frame_count == 2
        assert counter.op_count > 2 * plain + 5
        assert forced.report().share > 0.3
        assert torch.equal(compiled(inputs), reference)
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_model_is_skipped_too(net):
    torch.compiler.reset()
    compiled = torch.compile(net, dynamic=False, backend="eager")
    forced = Forced(name="winograd", on_unsupported="skip")
    with (
        forced.applied(session(net)),
        torch.inference_mode(),
        pytest.raises(Unsupported, match="stem"),
    ):
        compiled(torch.randn(1, 3, 32, 32))
    torch.compiler.reset()


def test_a_shape_is_decided_upon_once(net, monkeypatch):
    decided, decide = [], Layer._decide
    monkeypatch.setattr(
        Layer, "_decide", lambda self, *key: decided.append(key) or decide(self, *key)
    )
    with Forced(name="gemm").applied(session(net)):
        for _ in range(3):
            net(torch.randn(1, 3, 32, 32))
    assert len(decided) == 6
