"""A session measures with an algorithm what it measures without: inference, training steps, sizes that change."""

import subprocess
import sys

import pytest
import torch

from perfexp.algorithms.forced import Forced
from perfexp.convolutions.portable import ALGORITHMS
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported
from perfexp.models import Execution, Precision
from perfexp.models.kinds import Classification
from perfexp.models.session import TorchSession

NAMES = tuple(ALGORITHMS)


def open_session(precision=None, module=None, **execution):
    torch.manual_seed(0)
    module = module or torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, padding=1, groups=8),
        torch.nn.Conv2d(8, 8, 1),
        torch.nn.Conv2d(8, 8, 3, padding=1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 5),
    )
    return TorchSession(
        module,
        kind=Classification(5),
        name="small",
        device=CpuDevice(),
        precision=precision or Precision(name="fp32"),
        execution=Execution(**execution),
        facts={},
        doubts=[],
    )


def losses(session, name, steps=4):
    """Of a few steps of a training that begins anew."""
    session.reset()
    batch, seen = session.random_batch((24, 24), 4, seed=0), []
    with Forced(name=name).applied(session), session.training():
        update = session.optimizer({"name": "sgd", "lr": 0.1, "momentum": 0.9})
        session.first_forward(batch)
        for _ in range(steps):
            loss = session.loss(session.forward(batch.inputs), batch.targets)
            session.backward(loss)
            update()
            seen.append(session.number(loss))
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_training_goes_the_same_way(name):
    session = open_session()
    reference = losses(session, "default")
    assert losses(session, name) == pytest.approx(reference, rel=1e-3)
    assert reference[-1] < reference[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_inference_has_the_same_outputs_at_each_size(name):
    session = open_session(channels_last=True)
    for size in ((24, 24), (17, 40)):
        batch = session.random_batch(size, 2, seed=0)
        with session.inferring():
            reference = session.first_forward(batch)
            with Forced(name=name).applied(session):
                torch.testing.assert_close(
                    session.first_forward(batch), reference, rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("precision", ["bf16", "amp_bf16"])
def test_layers_in_unsupported_precisions_are_left_to_torch(precision):
    settings = {"autocast": "bfloat16"} if precision == "amp_bf16" else {"storage": "bfloat16"}
    session = open_session(Precision(name=precision, **settings))
    batch = session.random_batch((24, 24), 2, seed=0)
    forced = Forced(name="gemm", layers={"5": "winograd"})
    with session.inferring(), forced.applied(session):
        session.first_forward(batch)
    assert forced.report().share == 1.0
    mixed = Forced(name="gemm", layers={"5": "fft"})
    with session.inferring(), mixed.applied(session):
        session.first_forward(batch)
    assert 0 < mixed.report().share < 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_session_measures_its_sizes_by_the_algorithm():
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, stride=2),
        torch.nn.Conv2d(4, 4, 3),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
    )
    session = open_session(module=module, compile="default")
    forced = Forced(name="winograd")
    with forced.applied(session), session.inferring():
        for size in (24, 32):
            forced.begin_point()
            batch = session.random_batch((size, size), 2, seed=0)
            ours = session.first_forward(batch)
            assert 0 < forced.report().share < 1
            torch.testing.assert_close(ours, session.module(batch.inputs), rtol=1e-4, atol=1e-5)
    skipping = Forced(name="winograd", on_unsupported="skip")
    with skipping.applied(session), session.inferring(), pytest.raises(Unsupported):
        session.first_forward(batch)
    torch.compiler.reset()


@pytest.mark.slow
def test_algorithms_do_not_import_the_compiler():
    command = "import sys, perfexp.algorithms.forced; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=120).returncode == 0
