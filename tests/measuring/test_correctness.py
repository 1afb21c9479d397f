"""Outputs against those in plain fp32, and what a compiler reports."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.modes.train import Train
from perfexp.measuring.procedure import Procedure
from perfexp.models import Execution, Precision, torch_settings
from perfexp.models.kinds import Classification
from perfexp.models.session import TorchSession
from perfexp.records.record import Key, Point
from perfexp.timing.stopping import Fixed

FP32 = Precision(name="fp32")
HALF = Precision(name="amp_bf16", autocast="bfloat16")


def measured(phase: str, *, precision: Precision = FP32, **execution: Any) -> Point:
    torch.manual_seed(0)
    layers = (
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
    )
    session = TorchSession(
        torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8, 5)),
        kind=Classification(5),
        name="net",
        device=CpuDevice(),
        precision=precision,
        execution=Execution(**execution),
        facts={},
    )
    procedure = Procedure(
        session=session,
        device=session.device,
        data=Synthetic(),
        modes={"train": Train(optimizer={"name": "sgd", "lr": 0.1}), "inference": Inference()},
        stopping=Fixed(warmup=0, measure=1),
        checks_outputs=True,
    )
    return procedure.measure(
        Key(phase=phase, input_size=(16, 16), batch_size=8, precision=precision.name)
    )


def value(point: Point, name: str) -> float:
    metric = point.metric(name)
    assert metric is not None and metric.value is not None, metric
    return metric.value


@pytest.mark.parametrize("phase", ["train", "inference"])
def test_fp32_computes_what_fp32_computes(phase: str) -> None:
    point = measured(phase)
    assert value(point, "correctness/relative_error") < 1e-6
    assert value(point, "correctness/argmax_agreement") == 1.0


@pytest.mark.parametrize("phase", ["train", "inference"])
def test_half_precision_differs_by_its_rounding(phase: str) -> None:
    assert 1e-4 < value(measured(phase, precision=HALF), "correctness/relative_error") < 0.05


def test_another_layout_differs_by_the_order_of_sums() -> None:
    assert value(measured("inference", channels_last=True), "correctness/relative_error") < 1e-5


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = TorchSession.forward
    monkeypatch.setattr(TorchSession, "forward", lambda self, inputs: -usual(self, inputs))
    point = measured("inference")
    assert value(point, "correctness/relative_error") == pytest.approx(2.0, rel=1e-3)
    assert value(point, "correctness/argmax_agreement") < 0.5


class Broken(torch.nn.Module):
    """A model with a place that a compiler leaves to Python."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.relu()
        torch._dynamo.graph_break()
        return inputs.sin()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_graphs_their_breaks_and_recompilations_are_counted() -> None:
    def figures() -> list[float | None]:
        return [metric.value for metric in torch_settings.compilation_metrics()][1:]

    torch_settings.reset_compiler()
    run = torch.compile(Broken(), dynamic=False, backend="eager")
    run(torch.ones(4))
    assert figures() == [2.0, 1.0, 0.0]
    run(torch.ones(5))
    assert figures() == [4.0, 2.0, 2.0]
    seconds = torch_settings.compilation_metrics()[0]
    assert seconds.name == "compile/seconds" and seconds.value
    torch_settings.reset_compiler()
    assert figures() == [0.0, 0.0, 0.0]


def test_compile_sums_are_missing_once_torch_drops_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo import utils

    entries = [SimpleNamespace(duration_us=1, is_forward=True, compile_id="0/1")] * 64
    monkeypatch.setattr(utils, "get_compilation_metrics", lambda: entries)
    values = {
        metric.name: (metric.value, metric.reason)
        for metric in torch_settings.compilation_metrics()
    }
    reason = "torch keeps only the last 64 compilations"
    assert values["compile/seconds"] == values["compile/recompilations"] == (None, reason)
    assert values["compile/graphs"][0] is not None
