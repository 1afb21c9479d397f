"""What a forced algorithm leaves in a point's result."""

import pytest
import torch

from perfexp.convolution.forced import Forced
from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.procedure import Procedure
from perfexp.models import Execution, Precision
from perfexp.models.module import adapt
from perfexp.records.record import Key, Status
from perfexp.timing.stopping import Fixed


class TwoConvolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.strided = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.plain = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, inputs):
        return self.plain(self.strided(inputs)).mean(dim=(2, 3))


@pytest.fixture
def measure():
    def go(name, **settings):
        device = CpuDevice()
        session = adapt(TwoConvolutions(), "two").open(
            device=device,
            precision=Precision(name="fp32"),
            execution=Execution(),
            num_classes=None,
            seed=0,
        )
        algorithm = Forced(name=name, **settings)
        modes, stopping = {"inference": Inference()}, Fixed(warmup=1, measure=2)
        with algorithm.applied(session):
            procedure = Procedure(
                session=session,
                device=device,
                data=Synthetic(),
                modes=modes,
                stopping=stopping,
                algorithm=algorithm,
            )
            sizes = ((16, 16), (16, 16), (32, 32))
            keys = [
                Key(phase="inference", input_size=size, batch_size=1, precision="fp32")
                for size in sizes
            ]
            return [procedure.measure(key) for key in keys]

    return go


def test_algorithm_coverage_is_in_every_point(measure):
    # 8 × 8 outputs each: 4 · 3 · 9 products of the strided layer, which Winograd does not take, 4 · 4 · 9 of the other
    share = 16 / (12 + 16)
    for point in measure("winograd"):
        assert point.status is Status.OK
        assert point.metric("algorithm/flops_share").value == pytest.approx(share)
        assert point.metric("algorithm/proven_share").value == pytest.approx(share)
        layers = {layer["name"]: layer for layer in point.facts["algorithm"]["layers"]}
        assert {name: layer["status"] for name, layer in layers.items()} == {
            "strided": "fallback",
            "plain": "ok",
        }
        assert "stride" in layers["strided"]["reason"]
        assert [doubt.code for doubt in point.doubts if doubt.code != "busy_host"][:1] == [
            "algorithm_fallback"
        ]


def test_layers_that_are_left_to_torch_are_not_proven(measure):
    for point in measure("gemm", layers={"strided": "default"}):
        assert point.metric("algorithm/flops_share").value == 1
        assert point.metric("algorithm/proven_share").value == pytest.approx(16 / (12 + 16))


def test_what_runs_as_asked_is_no_reason_for_doubt(measure):
    for point in measure("gemm"):
        assert point.metric("algorithm/flops_share").value == 1
        assert "algorithm_fallback" not in [doubt.code for doubt in point.doubts]
