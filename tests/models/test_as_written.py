"""A model does under perfexp what it does in a plain loop: the same calls, the same outputs, the same state."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.measuring.modes.inference import Inference
from perfexp.measuring.modes.train import Train
from perfexp.measuring.procedure import Procedure
from perfexp.models import Execution, Precision
from perfexp.models.module import adapt
from perfexp.records.record import Key, Record, Status
from perfexp.timing.stopping import Fixed
from tests.models import keepers
from tests.models.keepers import PIECES, ActNorm, everything, make

SIZE, BATCH, LABELS, RATE = (8, 10), 2, 8, 0.01


def measured(net, phase, algorithm=None, **execution):
    """Measure a net and return its point and session."""
    session = adapt(net, "mine").open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(**execution),
        num_classes=None,
        seed=0,
    )
    procedure = Procedure(
        session=session,
        device=session.device,
        data=Synthetic(),
        modes={"inference": Inference(), "train": Train(optimizer={"lr": RATE})},
        stopping=Fixed(warmup=1, measure=3),
        counts_work=True,
        peaks=None,
        algorithm=algorithm,
    )
    key = Key(phase=phase, input_size=SIZE, batch_size=BATCH, precision="fp32")
    torch.manual_seed(0)
    return procedure.measure(key)


def plain_loop(net, training, count, size=SIZE):
    """Make as many calls as perfexp did, on its inputs and targets, with a step of SGD after each but the first."""
    inputs = torch.randn(BATCH, 3, *size, generator=torch.Generator().manual_seed(0))
    generators = [torch.Generator().manual_seed(seed) for seed in range(LABELS)]
    targets = [torch.randint(5, (BATCH,), generator=generator) for generator in generators]
    net.train(training)
    torch.manual_seed(0)
    if not training:
        with torch.inference_mode():
            for _ in range(count):
                net(inputs)
        return
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net(inputs)
    for number in range(count - 1):
        loss = torch.nn.functional.cross_entropy(net(inputs), targets[number % LABELS])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("phase", ["inference", "train"])
@pytest.mark.parametrize("kind", PIECES, ids=lambda kind: kind.__name__)
def test_measured_module_computes_and_keeps_as_in_a_plain_loop(kind, phase):
    ours = make(kind)
    point = measured(ours, phase)
    assert point.status is Status.OK, point.error
    work = point.metric("work/flops")
    assert (
        work.value
        if kind is not ActNorm
        else "can't be followed without its numbers" in work.reason
    )
    made, kept = list(keepers.calls), everything(ours.eval())
    plain = make(kind)
    plain_loop(plain, phase == "train", len(made))
    assert made == keepers.calls
    assert {type_of_inputs for _, type_of_inputs, *_ in made} == {torch.Tensor}
    assert kept == everything(plain.eval())


@contextmanager
def counting_stand_ins():
    """While entered, operators that run on stand-ins in this process are added to a list."""
    ran, dispatch, this = [], FakeTensorMode.__torch_dispatch__, os.getpid()

    def counted(mode, func, *arguments, **keywords):
        if os.getpid() == this:
            ran.append(str(func))
        return dispatch(mode, func, *arguments, **keywords)

    with patch.object(FakeTensorMode, "__torch_dispatch__", counted):
        yield ran


def check_any(kinds, phase):
    ours = make(*kinds)
    with counting_stand_ins() as ran:
        point = measured(ours, phase)
    assert point.status is Status.OK, point.error
    assert not ran
    made, kept = list(keepers.calls), everything(ours.eval())
    plain = make(*kinds)
    plain_loop(plain, phase == "train", len(made) // len(kinds))
    assert made == keepers.calls
    assert kept == everything(plain.eval())


KINDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5)
PHASES = st.sampled_from(["inference", "train"])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(kinds=KINDS, phase=PHASES)
def test_modules_of_any_pieces_are_measured_without_a_stand_in(kinds, phase):
    check_any(kinds, phase)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_a_thousand_modules_are_measured_without_a_stand_in(part):
    """Fifty parts of twenty, which differ by their seed."""
    modules = settings(max_examples=20, deadline=None, database=None)(
        given(kinds=KINDS, phase=PHASES)(check_any)
    )
    seed(part)(modules)()


#: A user's module, whose process writes at its end which calls it made and what it keeps.
FILE = """
import atexit, json, os
from pathlib import Path
from tests.models import keepers

def net(kind):
    net = keepers.make(getattr(keepers, kind))
    folder = Path(os.environ["KEPT"])

    def write():
        calls = [[str(part) for part in call] for call in keepers.calls]
        net.eval()
        folder.joinpath(f"{os.getpid()}.json").write_text(json.dumps([calls, keepers.state_of(net)]))

    atexit.register(write)
    return net
"""


def numbers_in(value):
    """All numbers in nested lists, those in texts included."""
    if isinstance(value, list):
        return [number for item in value for number in numbers_in(item)]
    return [float(value)] if isinstance(value, float | int) else []


TRAINING = [
    "mode=train",
    *(f"mode.train.optimizer.{item}" for item in (f"lr={RATE}", "momentum=0", "weight_decay=0")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (keepers.CachedFunction, []),
        (keepers.Counter, ["probes.layers=true"]),
        (keepers.Attribute, ["algorithm=gemm"]),
        (keepers.ClassLevel, ["execution.compile=default"]),
        (keepers.FlaggedNorm, TRAINING),
    ],
)
def test_the_command_measures_a_module_as_it_is(kind, options, tmp_path, monkeypatch):
    (tmp_path / "kept_net.py").write_text(FILE)
    (tmp_path / "own" / "model").mkdir(parents=True)
    node = f"_target_: kept_net.net\n_partial_: true\nkind: {kind.__name__}\n"
    (tmp_path / "own" / "model" / "kept.yaml").write_text(node)
    monkeypatch.setenv("KEPT", str(tmp_path))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    )
    words = ["input_size=9", f"batch_size={BATCH}", "gpu=cpu", "tracking=none", "stopping=fixed"]
    command = [
        sys.executable,
        "-m",
        "perfexp",
        "--config-dir",
        "own",
        "model=kept",
        "output_dir=run",
    ]
    done = subprocess.run(
        [*command, *words, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    points = Record.load(tmp_path / "run").points
    assert all(point.status is Status.OK for point in points)
    assert points[0].metric("work/flops").value
    written = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(written) == 1
    for made, kept in written:
        assert {type_of_inputs for _, type_of_inputs, *_ in made} == {str(torch.Tensor)}
        plain = make(kind)
        plain_loop(plain, "mode=train" in options, len(made), size=(9, 9))
        truth = json.loads(json.dumps(keepers.state_of(plain.eval())))
        assert numbers_in(kept) == pytest.approx(numbers_in(truth), rel=1e-3, abs=1e-5)
