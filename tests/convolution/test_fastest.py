"""Who wins a race for a convolution, what is remembered of it, and what the whole model gains."""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from perfexp.convolution import fastest, race, replays
from perfexp.convolution.difference import with_statistics
from perfexp.convolution.forced import Forced
from perfexp.convolution.race import Launching, RaceOutcome
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import UserError
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.statistics.estimators import Interval


@pytest.fixture
def times(monkeypatch):
    """Times by engine, in place of races; who had one is remembered."""
    asked = []

    def use(seconds, half_width=0.001, unsteady=None):
        def around(value):
            return Interval(value=value, low=value - half_width, high=value + half_width)

        class Scripted:
            def __init__(self, *, default, **_):
                self.default = default

            def nominate(self, calls):
                for call in calls.values():
                    call()
                asked.append(sorted(calls))
                return sorted(calls, key=lambda name: seconds.get(name, 1.0))[:2]

            def decide(self, calls, nominee):
                for call in calls.values():
                    call()
                own = {name: around(seconds.get(name, 1.0)) for name in calls}
                speedups = {name: around(1 / interval.value) for name, interval in own.items()}
                return RaceOutcome(
                    chosen=nominee if speedups[nominee].low > 1 else self.default,
                    launching=Launching.captured,
                    seconds={Launching.captured: own, Launching.eager: own},
                    speedups={Launching.captured: speedups, Launching.eager: speedups},
                    unsteady=unsteady,
                )

        monkeypatch.setattr(race, "Race", Scripted)
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

    return SimpleNamespace(
        discard_compiled=lambda: None,
        module=module,
        device=CpuDevice(),
        inferring=inferring,
        eager=module,
    )


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
    assert row.passes[0].seconds == {
        "cudnn.winograd_nonfused": 0.5,
        "cudnn.fft": 0.9,
        "default": 1,
        "benchmark": 0.99,
    }
    assert row.passes[0].launching == "captured"
    assert row.passes[0].races["eager"]["cudnn.fft"] == {
        "seconds": 0.9,
        "seconds_low": 0.899,
        "seconds_high": pytest.approx(0.901),
        "speedup": 1 / 0.9,
        "speedup_low": 1 / 0.9 - 0.001,
        "speedup_high": 1 / 0.9 + 0.001,
    }
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


@pytest.mark.parametrize(("half_width", "winner"), [(0.001, "cudnn.gemm"), (0.02, "default")])
def test_torch_stays_where_nobody_is_clearly_faster(cudnn, times, tmp_path, half_width, winner):
    cudnn()
    times({"cudnn.gemm": 0.985}, half_width)
    layer, inputs = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    (row,) = train(layer, forced(tmp_path), inputs)
    assert [each.selected for each in row.passes] == [winner, "default", "default"]


def test_second_race_uses_fresh_data_and_no_captured_launches(cudnn, times, tmp_path, monkeypatch):
    """While engines race, no pass of cuDNN's is launched as captured, and none counts as a pass of the model."""
    scripted = cudnn()
    times({"cudnn.gemm": 0.5})
    drawn, original = [], fastest._tensors
    monkeypatch.setattr(
        fastest, "_tensors", lambda *about: drawn.append(original(*about)) or drawn[-1]
    )
    layer, inputs = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    algorithm = forced(tmp_path)
    with torch.inference_mode(), algorithm.applied(session(layer)):
        algorithm.begin_point()
        layer(inputs)
        before = len(scripted.calls)
        layer(inputs)
        assert len(scripted.calls) == before + 1
        assert algorithm.launched_share().value == 0
        counted = replays._tally.enqueued
    assert counted == 2, "the calls of the model"
    assert not torch.equal(drawn[0][0], drawn[1][0])


def test_a_choice_on_an_unsteady_device_is_used_and_not_cached(cudnn, times, tmp_path):
    cudnn()
    asked = times({"cudnn.gemm": 0.5}, unsteady="the clock moved")
    model, inputs = nn.Conv2d(4, 4, 3, padding=1), torch.randn(2, 4, 9, 8)
    for races in (1, 2):
        algorithm = forced(tmp_path)
        with torch.inference_mode(), algorithm.applied(session(model)):
            model(inputs)
            algorithm.begin_point()
            model(inputs)
        (row,) = algorithm.report().layers
        assert (row.passes[0].selected, row.passes[0].not_cached) == (
            "cudnn.gemm",
            "the clock moved",
        )
        assert len(asked) == races


def test_choices_are_those_of_a_driver_and_its_limits(cudnn, times, tmp_path):
    cudnn()
    asked = times({"cudnn.gemm": 0.5})
    layer, inputs = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    for watts, races in ((700.0, 1), (700.0, 1), (500.0, 2)):
        limited = session(layer)
        limited.device.limits = lambda watts=watts: {"driver": "580", "power_limit_watts": watts}
        with torch.inference_mode(), forced(tmp_path).applied(limited):
            layer(inputs)
        assert len(asked) == races


def test_who_is_wrong_does_not_win(cudnn, times, tmp_path, monkeypatch):
    cudnn()
    asked = times({"cudnn.gemm": 0.1, "cudnn.implicit_gemm": 0.2, "cudnn.fft": 0.5})
    original = fastest._runner

    def spoiled(which, problem, engine, tensors):
        run = original(which, problem, engine, tensors)
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
    model, inputs = (
        nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))),
        torch.randn(2, 4, 9, 8),
    )
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


def test_without_cudnn_portable_algorithms_compete_in_all_passes(times, tmp_path):
    asked = times({"torch.fft": 0.5})
    layer, inputs = nn.Conv2d(4, 6, 3, stride=1), torch.randn(2, 4, 9, 8)
    (row,) = train(layer, forced(tmp_path), inputs)
    assert [each.selected for each in row.passes] == ["torch.fft"] * 3
    assert [bool(each.seconds) for each in row.passes] == [
        True,
        False,
        False,
    ]  # they are those of all passes
    assert len(asked) == 1
    assert len(asked[0]) == 9
    strided, half = nn.Conv2d(4, 6, 3, stride=2), nn.Conv2d(4, 6, 3, dtype=torch.bfloat16)
    for other, values in ((strided, inputs.detach()), (half, inputs.detach().bfloat16())):
        train(other, forced(tmp_path), values)
        assert "torch.fft" not in asked[-1]


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
        assert (
            exact.output_error(inputs).value < 1e-6
        )  # torch's own kernels round by the layout that they choose
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
def test_useless_outputs_are_compared_by_input_statistics(scale):
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


def test_model_that_cannot_train_on_one_value_keeps_statistics():
    model, inputs = (
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).eval(),
        torch.randn(1, 4, 3, 3),
    )
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
