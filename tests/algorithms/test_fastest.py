"""Who wins a race for a convolution, what is remembered of it, and what the whole model gains."""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from perfexp.algorithms import fastest
from perfexp.algorithms.difference import with_statistics
from perfexp.algorithms.fastest import race
from perfexp.algorithms.forced import Forced
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.fake import FakeDevice
from perfexp.errors import Unsupported, UserError
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.measure import baselines
from perfexp.records.record import Key, Point, Status


@pytest.fixture
def times(monkeypatch):
    """Times by engine, in place of a race; who had one is remembered."""
    asked = []

    def use(seconds):
        def told(calls, device, where):
            for call in calls.values():
                call()
            asked.append(sorted(calls))
            return {name: seconds.get(name, 1.0) for name in calls}

        monkeypatch.setattr(fastest, "race", told)
        return asked

    return use


@pytest.fixture
def cudnn(scripted):
    return scripted


def session(module):
    @contextmanager
    def inferring():
        with torch.inference_mode():
            yield

    return SimpleNamespace(module=module, device=CpuDevice(), inferring=inferring, eager=module)


def forced(tmp_path, **settings):
    return Forced(name="fastest", cache_dir=str(tmp_path), **settings)


def train(module, algorithm, inputs):
    with algorithm.applied(session(module)):
        module(inputs.requires_grad_()).sum().backward()
    return algorithm.report().layers


def test_each_pass_has_a_race_of_its_own(cudnn, times, tmp_path):
    scripted = cudnn(refuses=lambda which, code, *_: which == "Forward" and code in (3, 6))
    asked = times({"cudnn.winograd_nonfused": 0.5, "cudnn.fft": 0.9, "benchmark": 0.99})
    (row,) = train(nn.Conv2d(4, 6, 3, padding=1), forced(tmp_path), torch.randn(2, 4, 9, 8))
    assert [each.selected for each in row.passes] == ["cudnn.winograd_nonfused"] * 3
    assert row.passes[0].seconds["cudnn.fft"] == 0.9
    assert row.passes[0].errors["cudnn.gemm"] < 1e-5
    assert len(asked) == 3
    assert asked[0] == sorted(
        [
            "default",
            "benchmark",
            *(f"cudnn.{name}" for name in ("gemm", "fft", "fft_tiling", "winograd_nonfused")),
            *("cudnn.implicit_gemm", "cudnn.implicit_precomp_gemm"),
        ]
    )
    assert scripted.calls[-1][:2] == ("BackwardFilter", 5)


def test_torch_stays_where_nobody_is_clearly_faster(cudnn, times, tmp_path):
    cudnn()
    times({"cudnn.gemm": 0.985})
    layer, inputs = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    (row,) = train(layer, forced(tmp_path), inputs)
    assert [each.selected for each in row.passes] == ["default"] * 3
    assert row.status.value == "ok"


def test_who_is_wrong_does_not_win(cudnn, times, tmp_path, monkeypatch):
    cudnn()
    asked = times({"cudnn.gemm": 0.1, "cudnn.implicit_gemm": 0.2, "cudnn.fft": 0.5})
    original = fastest._runner

    def spoiled(which, engine, problem, tensors):
        run = original(which, engine, problem, tensors)
        factor = {"cudnn.gemm": 1.01, "cudnn.implicit_gemm": float("nan")}.get(engine, 1.0)
        return lambda: run() * factor

    monkeypatch.setattr(fastest, "_runner", spoiled)
    layer, inputs = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.inference_mode():
        for limit, winner in ((None, "cudnn.fft"), (0.02, "cudnn.gemm")):
            algorithm = forced(tmp_path, max_error=limit)
            with algorithm.applied(session(layer)):
                layer(inputs)
            (row,) = algorithm.report().layers
            assert row.passes[0].selected == winner
            assert row.passes[0].errors["cudnn.gemm"] == pytest.approx(0.01, rel=0.01)
            assert row.passes[0].errors["cudnn.implicit_gemm"] == float("inf")
    assert "cudnn.implicit_gemm" not in asked[0]


def test_a_choice_is_remembered_for_the_same_question_only(cudnn, times, tmp_path):
    cudnn()
    asked = times({"cudnn.gemm": 0.5})
    layer, inputs = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)

    def ask(inputs=inputs, **settings):
        algorithm = forced(tmp_path, **settings)
        with torch.inference_mode(), algorithm.applied(session(layer)):
            layer(inputs)
        assert algorithm.report().layers[0].used == "gemm"
        dates.append(algorithm.report().layers[0].passes[0].kept_since)
        return len(asked)

    dates: list[str | None] = []
    assert ask() == 1
    assert ask() == 1
    assert dates[0] is None
    assert abs(datetime.now(UTC) - datetime.fromisoformat(dates[1])) < timedelta(hours=1)
    assert ask(torch.randn(2, 4, 9, 9)) == 2
    assert ask(workspace_bytes=10**9) == 3
    assert ask(max_error=1e-3) == 4
    assert ask(reuse=False) == 5
    assert ask() == 5
    for path in tmp_path.glob("*.json"):
        assert json.loads(path.read_text())["context"]["torch"] == torch.__version__
        path.write_text("{torn")
    assert ask() == 6
    for path in tmp_path.glob("*.json"):
        path.write_text(json.dumps({"findings": {"a": 1}}))
    assert ask() == 7
    for path in tmp_path.glob("*.json"):
        content = json.loads(path.read_text())
        for kept in content["findings"].values():
            if isinstance(kept, dict):
                kept["forward"]["engine"] = "cudnn.winograd_of_tomorrow"
        path.write_text(json.dumps(content))
    assert ask() == 8


def test_equal_layers_have_one_race_and_a_regret_is_kept(cudnn, times, tmp_path):
    cudnn()
    asked = times({"cudnn.gemm": 0.5})
    model, inputs = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))), torch.randn(2, 4, 9, 8)
    for reuse in (False, True):
        algorithm = forced(tmp_path, reuse=reuse)
        with torch.inference_mode(), algorithm.applied(session(model)):
            model(inputs)
            algorithm.begin_point()
            model(inputs)
            assert len(asked) == 1
            algorithm.discard_choices() if reuse else None
    with torch.inference_mode(), forced(tmp_path).applied(session(model)):
        model(inputs)
    assert len(asked) == 2


def test_a_cache_that_can_not_be_written_costs_nothing(cudnn, times):
    cudnn()
    times({"cudnn.gemm": 0.5})
    layer, algorithm = nn.Conv2d(4, 6, 3), Forced(name="fastest", cache_dir="/proc/nowhere")
    with torch.inference_mode(), algorithm.applied(session(layer)):
        layer(torch.randn(2, 4, 9, 8))
    assert algorithm.report().layers[0].used == "gemm"


def test_elsewhere_algorithms_in_torchs_operations_compete_with_all_their_passes(times, tmp_path):
    asked = times({"torch.fft": 0.5})
    layer, inputs = nn.Conv2d(4, 6, 3, stride=1), torch.randn(2, 4, 9, 8)
    (row,) = train(layer, forced(tmp_path), inputs)
    assert [each.selected for each in row.passes] == ["torch.fft"] * 3
    assert [bool(each.seconds) for each in row.passes] == [True, False, False]  # they are those of all passes
    assert len(asked) == 1
    assert len(asked[0]) == 9
    strided, half = nn.Conv2d(4, 6, 3, stride=2), nn.Conv2d(4, 6, 3, dtype=torch.bfloat16)
    for other, values in ((strided, inputs.detach()), (half, inputs.detach().bfloat16())):
        train(other, forced(tmp_path), values)
        assert "torch.fft" not in asked[-1]


def test_a_race_is_won_by_the_fastest():
    device = FakeDevice(enqueue_seconds=1e-6, queue_depth=1000)
    calls = {name: lambda s=seconds: device.launch(s) for name, seconds in (("a", 30e-6), ("b", 20e-6), ("c", 90e-6))}
    here = lambda name: lambda work: work()  # noqa: E731
    seconds = race(calls, device, here)
    assert min(seconds, key=seconds.get) == "b"
    assert seconds["a"] == pytest.approx(30e-6, rel=0.05)
    host = FakeDevice(asynchronous=False, enqueue_seconds=0.0)
    calls = {name: lambda s=seconds: host.launch(s) for name, seconds in (("a", 30e-6), ("b", 20e-6))}
    assert race(calls, host, here)["b"] == pytest.approx(20e-6, rel=0.05)


KEY = Key(phase="inference", input_size=(8, 8), batch_size=2, precision="fp32")


class Rivalling:
    """An algorithm whose calls take another time while a rival computes."""

    name = "fastest"

    def __init__(self):
        self.now, self.order = self.name, []

    def baselines(self):
        return ("default", "benchmark")

    def run_baseline(self, baseline, work):
        self.now = baseline
        self.order.append(baseline)
        try:
            return work()
        finally:
            self.now = self.name

    @property
    def seconds(self):
        return {"fastest": 1e-3, "default": 3e-3, "benchmark": 2e-3}[self.now]


SPEEDUPS = {
    "algorithm/speedup_over_default": pytest.approx(3, rel=1e-3),
    "algorithm/speedup_over_benchmark": pytest.approx(2, rel=1e-3),
}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_whole_model_is_compared_with_its_rivals_in_turns(asynchronous):
    device, algorithm = FakeDevice(asynchronous=asynchronous, enqueue_seconds=1e-6), Rivalling()
    compared = baselines.compare(algorithm, lambda: device.launch(algorithm.seconds), device, capture=None)
    series, metrics, unsure, method = compared
    assert method == ("queue" if asynchronous else "clock")
    assert {metric.name: metric.value for metric in metrics} == SPEEDUPS
    assert [each.name for each in series] == ["rival/fastest", "rival/default", "rival/benchmark"]
    assert np.median(series[1].measured) == pytest.approx(3e-3, rel=1e-2)
    assert algorithm.order[-4:] == ["default", "benchmark"] * 2
    assert unsure == []


@pytest.mark.parametrize(("spread", "codes"), [(0.01, []), (0.9, ["speedup_unsure"])])
def test_rounds_that_do_not_agree_who_is_faster_are_a_doubt(spread, codes):
    """The rival takes a tenth more, give or take what changes from turn to turn."""
    device, algorithm, noise = FakeDevice(enqueue_seconds=1e-6), Rivalling(), np.random.default_rng(1)
    turns: dict[int, float] = {}

    def call():
        if algorithm.now == "fastest":
            return device.launch(1e-3)
        return device.launch(1.1e-3 * turns.setdefault(len(algorithm.order), 1 + spread * noise.uniform(-1, 1)))

    unsure = baselines.compare(algorithm, call, device, capture=None).doubts
    assert sorted({doubt.code for doubt in unsure}) == codes


def test_an_algorithm_that_is_called_as_a_rival_is_compared_with_it():
    class Mixed(Rivalling):
        name = "default"
        mixed = True

        def run_baseline(self, baseline, work):
            self.mixed = False
            try:
                return super().run_baseline(baseline, work)
            finally:
                self.mixed = True

    device, algorithm = FakeDevice(enqueue_seconds=1e-6), Mixed()

    def call():
        device.launch(1e-3 if algorithm.mixed else {"default": 3e-3, "benchmark": 2e-3}[algorithm.now])

    series, metrics, *_ = baselines.compare(algorithm, call, device, capture=None)
    assert {metric.name: metric.value for metric in metrics} == SPEEDUPS
    assert [each.name for each in series] == ["rival/default+layers", "rival/default", "rival/benchmark"]


def test_a_choice_that_is_slower_as_a_whole_is_doubted_and_not_kept():
    class Slower(Rivalling):
        seconds = property(lambda self: {"fastest": 3e-3, "default": 2e-3, "benchmark": 4e-3}[self.now])
        discarded = False

        def discard_choices(self):
            self.discarded = True

    device, algorithm = FakeDevice(enqueue_seconds=1e-6), Slower()
    point = Point(key=KEY, status=Status.OK)
    baselines.judge(point, algorithm, lambda: device.launch(algorithm.seconds), device, capture=None)
    assert [doubt.code for doubt in point.doubts] == ["choice_slower"]
    assert "1.50 of the time of default" in point.doubts[0].message
    assert algorithm.discarded
    assert point.facts == {"rivals_method": "queue"}


def test_rivals_whose_call_the_queue_does_not_take_are_captured():
    device, algorithm = FakeDevice(enqueue_seconds=1e-6, queue_depth=100), Rivalling()

    def call():
        for _ in range(200):
            device.launch(algorithm.seconds / 200)

    def capture():
        seconds = algorithm.seconds
        return lambda: device.launch(seconds)

    compared = baselines.compare(algorithm, call, device, capture)
    assert {metric.name: metric.value for metric in compared.metrics} == SPEEDUPS
    assert compared.method == "graph"
    with pytest.raises(Unsupported, match="does not fit the launch queue even as a CUDA graph"):
        baselines.compare(algorithm, call, device, lambda: call)


@pytest.mark.parametrize(("own", "codes"), [("queue", ["rivals_by_graph"]), ("graph", [])])
def test_rivals_that_were_timed_otherwise_than_the_call_are_a_doubt(own, codes):
    """The algorithm's call is one launch, which the queue takes; each rival's is too many."""
    device, algorithm = FakeDevice(enqueue_seconds=1e-6, queue_depth=100), Rivalling()

    def call():
        launches = 1 if algorithm.now == "fastest" else 200
        for _ in range(launches):
            device.launch(algorithm.seconds / launches)

    def capture():
        seconds = algorithm.seconds
        return lambda: device.launch(seconds)

    point = Point(key=KEY, status=Status.OK, facts={"device_method": own})
    baselines.judge(point, algorithm, call, device, capture)
    assert point.facts["rivals_method"] == "graph"
    assert [doubt.code for doubt in point.doubts] == codes


def test_rivals_are_those_of_the_device(cudnn, tmp_path):
    layer = nn.Sequential(nn.Conv2d(4, 6, 3))
    for algorithm, names in ((forced(tmp_path), ("default",)), (Forced(name="gemm"), ())):
        with algorithm.applied(session(layer)):
            assert algorithm.baselines() == names
    cudnn()
    mixed = Forced(name="gemm", layers={"0": "fastest"}, cache_dir=str(tmp_path))
    with mixed.applied(session(layer)):
        assert mixed.baselines() == ("default", "benchmark")
        before = torch.backends.cudnn.benchmark
        main = threading.get_ident()

        def check():
            assert torch.backends.cudnn.benchmark
            assert "_conv_forward" not in vars(layer[0])
            assert threading.get_ident() != main
            return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        assert mixed.run_baseline("benchmark", check) == (False, True)
        with torch.inference_mode():
            assert mixed.run_baseline("benchmark", check) == (True, False)
        assert torch.backends.cudnn.benchmark == before
        assert "_conv_forward" in vars(layer[0])


def test_the_error_of_the_outputs_is_that_against_torchs_own(cudnn):
    cudnn()
    layer, inputs = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()), torch.randn(2, 4, 9, 8)
    exact = Forced(name="gemm", backend="cudnn")
    with exact.applied(session(layer)):
        assert exact.output_error(inputs).value == 0
    native = Forced(name="native")
    with native.applied(session(layer)):
        assert native.run_baseline("default", lambda: torch.backends.mkldnn.enabled)
    portable = Forced(name="winograd_nonfused", backend="torch")
    with portable.applied(session(layer)):
        assert 0 < portable.output_error(inputs).value < 1e-5
        layer[0].weight.data.fill_(float("nan"))
        error = portable.output_error(inputs)
    assert (error.value, error.reason) == (None, "the outputs are not finite, or all zero")


def normed(scale):
    layers = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3)]
    for conv, _ in layers:
        conv.weight.data *= scale
    return nn.Sequential(*[each for pair in layers for each in pair]).eval()


@pytest.mark.parametrize("scale", [1e20, 1e-2])
def test_outputs_that_random_weights_make_useless_are_compared_with_the_inputs_statistics(scale):
    model, inputs = normed(scale), torch.randn(2, 4, 9, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    algorithm = Forced(name="winograd_nonfused", backend="torch")
    with algorithm.applied(session(model)):
        assert 1e-8 < algorithm.output_error(inputs).value < 1e-4
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    norms = [each for each in model if isinstance(each, nn.BatchNorm2d)]
    assert not any(norm.training or norm.momentum != 0.1 for norm in norms)


def test_statistics_that_a_model_has_stay():
    model, inputs = normed(1), torch.randn(2, 4, 9, 8)
    model.train()(inputs)
    model.eval()
    calls = []
    with with_statistics(model, lambda: calls.append(1)):
        assert calls == []


def test_a_model_that_can_not_be_trained_on_one_number_keeps_its_statistics():
    model, inputs = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval(), torch.randn(1, 4, 3, 3)
    with with_statistics(model, lambda: model(inputs)):
        assert model[1].running_var.eq(1).all()
        assert not model[1].training


def test_settings_that_can_not_be_meant_are_errors(tmp_path):
    with pytest.raises(UserError, match="max_error=0: give a positive number"):
        forced(tmp_path, max_error=0)


def test_choices_are_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("algorithms") == tmp_path / "perfexp" / "algorithms"
    ours, theirs = (JsonCache(cache_folder("algorithms"), {"device": "a"}) for _ in range(2))
    assert ours.find("x") is None
    theirs.add("y", 2)
    ours.add("x", 1)
    assert JsonCache(cache_folder("algorithms"), {"device": "a"}).find("y") == 2
    assert JsonCache(cache_folder("algorithms"), {"device": "b"}).find("y") is None
