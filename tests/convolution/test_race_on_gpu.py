"""Races of real engines on a CUDA device: all of them are captured, and their eager and captured times make sense."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from perfexp.convolution import replays
from perfexp.convolution.forced import Forced

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def session():
    from perfexp.devices.cuda import CudaDevice

    @contextmanager
    def inferring():
        with torch.inference_mode():
            yield

    device = CudaDevice()
    device.start()
    module = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 96, 1), nn.Conv2d(96, 64, 3, stride=2)
    ).cuda()
    return SimpleNamespace(
        discard_compiled=lambda: None,
        module=module,
        device=device,
        inferring=inferring,
        eager=module,
    )


@pytest.mark.parametrize("trains", [False, True])
def test_engines_are_captured_and_compared_with_torchs_choice(session, tmp_path, trains):
    inputs = torch.randn(16, 64, 56, 56, device="cuda", requires_grad=trains)
    algorithm = Forced(name="fastest", cache_dir=str(tmp_path))
    with algorithm.applied(session):
        algorithm.begin_point()
        if trains:
            session.module(inputs).sum().backward()
        else:
            with session.inferring():
                session.module(inputs)
        assert replays.launched_share() in (0, None), "races do not count as passes of the model"
        layers = algorithm.report().layers
    passes = [one for layer in layers for one in layer.passes]
    assert len(passes) == 3 * (3 if trains else 1)
    for one in passes:
        assert (one.launching, one.not_captured) == ("captured", None)
        captured, eager = one.races["captured"], one.races["eager"]
        assert captured.keys() == eager.keys() >= {"default", "benchmark", one.selected}
        for name, race in captured.items():
            assert 1e-6 < race["seconds"] < 1e-2
            # kernels that are launched one by one behind a pre-filled queue take longer by gaps only
            assert 0.8 < eager[name]["seconds"] / race["seconds"] < 3
        if one.selected != "default":
            assert captured[one.selected]["speedup_low"] > 1
