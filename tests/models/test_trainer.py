"""Training to the end: schedules by their formulas, and a training that goes on from a checkpoint to the last bit."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import perfexp
from perfexp.data import Batches
from perfexp.data.images import Images
from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.measuring.epochs import EpochTraining
from perfexp.measuring.modes import graphed
from perfexp.measuring.modes.schedules import Rates
from perfexp.measuring.modes.train import Train
from perfexp.measuring.probes import ProbeContext
from perfexp.measuring.procedure import Procedure
from perfexp.measuring.training import Evaluation
from perfexp.models import Batch, Execution, Precision, Schedule, torch_settings
from perfexp.models.kinds import Classification
from perfexp.models.session import TorchSession
from perfexp.models.trainer import TorchTrainer
from perfexp.models.weights import load_weights
from perfexp.records.record import Epoch, Key, Point, Status
from perfexp.timing.stopping import Fixed

KEY = Key(phase="train", input_size=(12, 12), batch_size=4, precision="fp32")
FP32 = Precision(name="fp32")
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}


class Net(torch.nn.Module):
    """A small classifier with everything that has a state: normalization, dropout, parameters."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = torch.nn.Conv2d(3, width, 3), torch.nn.BatchNorm2d(width)
        self.dropout, self.fc = torch.nn.Dropout(0.2), torch.nn.Linear(width, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.fc(
            self.dropout(self.norm(self.conv(inputs)).relu().flatten(2).mean(2))
        )
        return scores


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 8), ("val", 4)):
        for label in range(2):
            (root / split / str(label)).mkdir(parents=True)
            for number in range(count):
                pixels = (
                    np.random.default_rng(number)
                    .normal(90 + 40 * label, 40, (16, 16, 3))
                    .clip(0, 255)
                )
                Image.fromarray(pixels.astype("uint8")).save(
                    root / split / str(label) / f"{number}.png"
                )
    return root


def open_session(
    module: torch.nn.Module | None = None, *, precision: Precision = FP32, **execution: Any
) -> TorchSession:
    return TorchSession(
        module or Net(),
        kind=Classification(2),
        name="net",
        device=CpuDevice(),
        precision=precision,
        execution=Execution(**execution),
        facts={},
    )


def procedure(
    data: Any,
    folder: Path,
    *,
    epochs: int,
    module: torch.nn.Module | None = None,
    precision: Precision = FP32,
    **train: Any,
) -> Procedure:
    """A procedure with one training, whose checkpoints are NAME.pt in a folder; torch is deterministic from now on."""
    train = {"optimizer": SGD, **train}
    session = open_session(module, precision=precision, deterministic=True)
    return Procedure(
        session=session,
        device=session.device,
        data=data,
        modes={"train": Train(**train)},
        stopping=Fixed(warmup=1, measure=1),
        epochs=epochs,
        checkpoint=lambda name: folder / f"{name}.pt",
    )


@pytest.fixture(autouse=True)
def deterministic_only_here() -> Any:
    yield
    torch.use_deterministic_algorithms(False)


def train(data: Any, folder: Path, **settings: Any) -> Point:
    point = procedure(data, folder, **settings).measure(KEY)
    assert point.status is Status.OK, point.error
    return point


def weights(file: Path) -> dict[str, torch.Tensor]:
    content: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return content


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# schedules


@pytest.mark.parametrize("warmup", [0, 5])
def test_the_cosine_is_its_formula_after_a_linear_warm_up(warmup: int) -> None:
    rates = Rates(schedule=Schedule.cosine, total=40, per_epoch=10, warmup=warmup)
    for step in range(40):
        expected = (
            (step + 1) / warmup
            if step < warmup
            else 0.5 * (1 + math.cos(math.pi * ((step - warmup) / (40 - warmup))))
        )
        assert rates.factor(step) == expected
    assert rates.factor(40) == rates.factor(1000) == 0.0


def test_schedules_are_those_of_torch() -> None:
    for schedule, of_torch, steps_per_call in (
        (
            Schedule.one_cycle,
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=60),
            1,
        ),
        (Schedule.step, lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.1), 10),
        (Schedule.cosine, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 60), 1),
        (Schedule.constant, lambda o: torch.optim.lr_scheduler.ConstantLR(o, factor=1.0), 1),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.2, momentum=0.9)
        scheduler = of_torch(optimizer)
        rates = Rates(schedule=schedule, total=60, per_epoch=10, decay_epochs=2)
        for step in range(60):
            assert 0.2 * rates.factor(step) == pytest.approx(
                optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-12
            )
            optimizer.step()
            if (step + 1) % steps_per_call == 0:
                scheduler.step()


@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("warmup", [0, 1, 9])
def test_a_schedule_of_few_steps_stays_within_its_range(
    schedule: Schedule, total: int, warmup: int
) -> None:
    rates = Rates(schedule=schedule, total=total, per_epoch=1, warmup=warmup)
    assert all(0 <= rates.factor(step) <= 1 for step in range(total + 2))


def test_each_step_has_the_rate_of_its_number(pictures: Path, tmp_path: Path) -> None:
    measuring = procedure(
        Images(root=str(pictures), workers=0),
        tmp_path,
        epochs=3,
        schedule=Schedule.cosine,
        warmup_steps=4,
    )
    seen: list[float] = []
    usual = measuring.session.learn

    def learn(batch: Any) -> Any:
        seen.append(measuring.session._optimizer.param_groups[0]["lr"])  # type: ignore[attr-defined]
        return usual(batch)

    measuring.session.learn = learn  # type: ignore[method-assign]
    point = measuring.measure(KEY)
    rates = Rates(schedule=Schedule.cosine, total=12, per_epoch=4, warmup=4)
    begin = seen.index(
        SGD["lr"] * rates.factor(0)
    )  # after the calls that come before every measurement
    assert seen[begin : begin + 12] == [SGD["lr"] * rates.factor(step) for step in range(12)]
    assert [epoch.learning_rate for epoch in point.epochs] == [
        SGD["lr"] * rates.factor(step) for step in (3, 7, 11)
    ]


# epochs


def test_an_epoch_has_its_figures_and_a_line(pictures: Path, tmp_path: Path) -> None:
    measuring = procedure(Images(root=str(pictures), workers=0), tmp_path, epochs=3, eval_every=2)
    lines: list[str] = []
    measuring.report = lambda line, _: lines.append(line)
    point = measuring.measure(KEY)
    assert [epoch.number for epoch in point.epochs] == [1, 2, 3]
    assert [epoch.accuracy is not None for epoch in point.epochs] == [False, True, True]
    assert [epoch.seconds for epoch in point.epochs] == point.find_series("epoch").samples  # type: ignore[union-attr]
    assert all(epoch.samples_per_second == 16 / epoch.seconds for epoch in point.epochs)
    assert len(point.find_series("latency").samples) == 12  # type: ignore[union-attr]
    assert point.metric("accuracy").value == point.epochs[2].accuracy  # type: ignore[union-attr]
    assert "epoch 1 of 3" in lines[0]
    assert "left" in lines[0]
    assert "accuracy" in lines[1]
    assert not list(tmp_path.iterdir())


class Recorder:
    """A user's probe, and a user's loss that reports while it learns."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float | None]] = []

    @contextmanager
    def around(self, context: ProbeContext) -> Iterator[None]:
        yield
        perfexp.metric("calls_observed", 3)

    def after_epoch(self, context: ProbeContext, epoch: Epoch) -> None:
        self.seen.append((epoch.number, epoch.accuracy))
        perfexp.metric("weight_norm", context.session.module.fc.weight.norm(), "1")


def test_custom_metrics_belong_to_their_epoch_and_their_point(
    pictures: Path, tmp_path: Path
) -> None:
    class Reporting(Net):
        steps = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.steps += 1
                perfexp.metric("steps_so_far", self.steps)
            return super().forward(inputs)

    recorder, lines = Recorder(), []  # type: ignore[var-annotated]
    measuring = procedure(
        Images(root=str(pictures), workers=0), tmp_path, epochs=2, eval_every=1, module=Reporting()
    )
    measuring.probes, measuring.report = {"recorder": recorder}, lambda line, _: lines.append(line)
    point = measuring.measure(KEY)
    assert point.status is Status.OK, point.error
    first, second = (
        {metric.name: metric.value for metric in epoch.metrics} for epoch in point.epochs
    )
    assert first.keys() == second.keys() == {"custom/steps_so_far", "custom/weight_norm"}
    assert second["custom/steps_so_far"] - first["custom/steps_so_far"] == 4  # type: ignore[operator]
    assert recorder.seen == [(epoch.number, epoch.accuracy) for epoch in point.epochs]
    assert f"weight_norm {second['custom/weight_norm']:.4g}" in lines[1]
    assert point.metric("custom/weight_norm").value == second["custom/weight_norm"]  # type: ignore[union-attr]
    assert point.metric("custom/calls_observed").value == 3  # type: ignore[union-attr]


def test_the_losses_of_an_epoch_are_kept_every_so_often(tmp_path: Path) -> None:
    measuring = procedure(Synthetic(num_samples=24), tmp_path, epochs=1, log_every=2)
    seen: list[Any] = []
    usual = measuring.session.held
    measuring.session.held = lambda loss: seen.append(float(loss.detach())) or usual(loss)  # type: ignore[method-assign,func-returns-value]
    point = measuring.measure(KEY)
    assert len(seen) == 3
    assert point.epochs[0].loss == pytest.approx(sum(seen) / 3)


def test_training_ends_where_the_accuracy_no_longer_grows(pictures: Path, tmp_path: Path) -> None:
    still = {"name": "sgd", "lr": 0.0}
    module = Net()
    module.norm.momentum = 0.0  # nothing changes from epoch to epoch
    point = train(
        Images(root=str(pictures), workers=0),
        tmp_path,
        epochs=9,
        patience=2,
        optimizer=still,
        module=module,
    )
    assert [epoch.number for epoch in point.epochs] == [1, 2, 3]


def test_training_starts_from_loaded_weights_after_earlier_calls(tmp_path: Path) -> None:
    still = {"name": "adam", "lr": 0.0}
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    train(
        Synthetic(num_samples=8),
        tmp_path,
        epochs=1,
        checkpoints=True,
        optimizer=still,
        module=module,
    )
    content = torch.load(tmp_path / "best.pt", weights_only=True)
    assert torch.equal(content["model"]["conv.weight"], before["conv.weight"])
    assert (
        int(content["model"]["norm.num_batches_tracked"]) == 2
    )  # the steps of the epoch, not those before it
    assert [float(state["step"]) for state in content["optimizer"].values()] == [2.0] * 6


# checkpoints


def test_a_checkpoint_without_scaled_losses_is_resumed_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_settings, "_has_fast_float16", lambda: True)
    train(Synthetic(num_samples=8), tmp_path, epochs=1, checkpoints=True)
    precision = Precision(name="amp_fp16", autocast="float16")
    file = str(tmp_path / "best.pt")
    point = train(
        Synthetic(num_samples=8),
        tmp_path,
        epochs=2,
        resume_from=file,
        precision=precision,
        checkpoints=True,
    )
    assert [epoch.number for epoch in point.epochs] == [2]
    assert weights(tmp_path / "best.pt")["scaler"]["scale"] > 0


MOVING = [
    {},
    {"optimizer": {"name": "adamw", "lr": 0.01}, "clip_grad_norm": 0.1, "label_smoothing": 0.1},
    {"ema": 0.9, "log_every": 1},
    {"optimizer": {"name": "sgd", "lr": 0.05}},
    {"precision": Precision(name="amp_fp16", autocast="float16")},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", MOVING)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_epochs_and_two_more_are_four_to_the_last_bit(
    pictures: Path, tmp_path: Path, settings: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_settings, "_has_fast_float16", lambda: True)
    data = Images(root=str(pictures), workers=workers)
    whole, half = tmp_path / "whole", tmp_path / "half"
    for folder in (whole, half):
        folder.mkdir()
    settings = {**settings, "checkpoints": True, "save_every": 2}
    train(data, whole, epochs=4, **settings)
    train(data, half, epochs=2, **settings)
    assert_same(weights(whole / "epoch_2.pt")["model"], weights(half / "epoch_2.pt")["model"])  # type: ignore[arg-type]
    point = train(data, half, epochs=4, resume_from=str(half / "epoch_2.pt"), **settings)
    assert [epoch.number for epoch in point.epochs] == [3, 4]
    assert_same(weights(whole / "final_weights.pt"), weights(half / "final_weights.pt"))


KILLED = {
    "checkpoints": True,
    "save_every": 1,
    "schedule": Schedule.cosine,
    "warmup_steps": 3,
    "eval_every": 1,
}


def die_in_epoch_3(pictures: str, folder: str) -> None:
    """Train in this process until the third epoch begins, in the middle of which it is killed."""
    measuring = procedure(Images(root=pictures, workers=0), Path(folder), epochs=4, **KILLED)
    usual, left = measuring.session.learn, [-1]

    def learn(batch: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(batch)

    measuring.session.learn = learn  # type: ignore[method-assign]
    measuring.progress = lambda text: left.__setitem__(0, 2 if text == "epoch 3 of 4" else left[0])
    measuring.measure(KEY)


@pytest.mark.slow
@pytest.mark.always("fault: a training is killed")
def test_killed_training_resumes_to_the_same_weights(pictures: Path, tmp_path: Path) -> None:
    data = Images(root=str(pictures), workers=0)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    train(data, whole, epochs=4, **KILLED)

    code = "from tests.models import test_trainer; test_trainer.die_in_epoch_3({!r}, {!r})"
    command = [sys.executable, "-c", code.format(str(pictures), str(killed))]
    assert (
        subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode
        == -signal.SIGKILL
    )
    assert not (killed / "epoch_3.pt").exists()
    train(data, killed, epochs=4, resume_from=str(killed / "epoch_2.pt"), **KILLED)
    assert_same(weights(whole / "final_weights.pt"), weights(killed / "final_weights.pt"))


def test_weights_are_loaded_from_either_file(pictures: Path, tmp_path: Path) -> None:
    data = Images(root=str(pictures), workers=0)
    train(data, tmp_path, epochs=1, checkpoints=True, ema=0.5)
    for name in ("best", "final_weights"):
        module = Net()
        load_weights(module, tmp_path / f"{name}.pt")
        assert_same(dict(module.state_dict()), weights(tmp_path / "final_weights.pt"))


def test_the_average_of_the_weights_is_that_of_torch(tmp_path: Path) -> None:
    session = open_session()
    session.optimizer(SGD)
    average = AveragedModel(
        session.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    )  # type: ignore[no-untyped-call]
    trainer = session.trainer(ema=0.9, batch_size=4, resume_from=None)
    assert trainer is not None
    for _ in range(4):
        with torch.no_grad():
            for parameter in session.module.parameters():
                parameter.add_(torch.randn_like(parameter))
        trainer.average()
        average.update_parameters(session.module)
    own = session.module.conv.weight.clone()
    with trainer.averaged():
        torch.testing.assert_close(session.module.conv.weight, average.module.conv.weight)
    assert torch.equal(session.module.conv.weight, own)


class Runs:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def spoiled(checkpoint: Path, **entries: Any) -> dict[str, Any]:
    return {**torch.load(checkpoint, weights_only=True), **entries}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    train(Synthetic(num_samples=8), folder, epochs=1, checkpoints=True)
    return folder / "best.pt"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "can't be read as a checkpoint"),
        ("truncated", "can't be read as a checkpoint"),
        ("empty", "can't be read as a checkpoint"),
        ("text", "can't be read as a checkpoint"),
        ("hostile", "can't be read as a checkpoint: .* never run"),
        ("weights", "is not a checkpoint to resume from"),
        ("list", "is not a checkpoint to resume from"),
        ("other model", "do not fit the Net: .* of another shape"),
        ("other optimizer", "of a training with optimizer AdamW, this one has SGD"),
        ("other batch", "of a training with batch_size 2, this one has 4"),
        ("other moments", "the optimizer's state is of other shapes"),
        ("random numbers", "can't be resumed from"),
        ("epochs", "its epochs are not numbers"),
        ("without facts", "can't be resumed from: 'facts'"),
    ],
)
def test_unfit_checkpoint_is_refused_before_anything_runs(
    kind: str, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    file, trap = tmp_path / "x.pt", tmp_path / "executed"
    content = checkpoint.read_bytes()
    facts = spoiled(checkpoint)["facts"]
    if kind in ("truncated", "empty", "text"):
        file.write_bytes(
            {"truncated": content[: len(content) // 2], "empty": b"", "text": b"epoch: 3\n"}[kind]
        )
    elif kind != "missing":
        contents: dict[str, Any] = {
            "hostile": spoiled(checkpoint, model=Runs(trap)),
            "weights": spoiled(checkpoint)["model"],
            "list": [1, 2],
            "other model": spoiled(checkpoint, model=Net(width=5).state_dict()),
            "other optimizer": spoiled(checkpoint, facts=facts | {"optimizer": "AdamW"}),
            "other batch": spoiled(checkpoint, facts=facts | {"batch_size": 2}),
            "other moments": spoiled(
                checkpoint, optimizer={0: {"momentum_buffer": torch.zeros(3)}}
            ),
            "random numbers": spoiled(checkpoint, random={"torch": torch.zeros(3)}),
            "epochs": spoiled(checkpoint, facts=facts | {"epoch": "3"}),
            "without facts": {
                key: value for key, value in spoiled(checkpoint).items() if key != "facts"
            },
        }
        torch.save(contents[kind], file)
    measuring = procedure(Synthetic(num_samples=8), tmp_path, epochs=2, resume_from=str(file))
    forwards: list[Any] = []
    measuring.session.forward = forwards.append  # type: ignore[method-assign]
    with pytest.raises(UserError, match=message) as refused:
        measuring.measure(KEY)
    assert "\n" not in str(refused.value)
    assert not forwards
    assert not trap.exists()


def test_a_checkpoint_with_all_epochs_is_not_resumed_from(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 epochs already, and epochs=1"):
        procedure(
            Synthetic(num_samples=8), tmp_path, epochs=1, resume_from=str(checkpoint)
        ).measure(KEY)


def test_a_checkpoint_that_is_not_finished_leaves_the_one_before(
    checkpoint: Path, monkeypatch: Any
) -> None:
    session, before = open_session(), checkpoint.read_bytes()
    session.optimizer(SGD)
    trainer = session.trainer(ema=None, batch_size=4, resume_from=None)
    assert trainer is not None

    def fails(content: Any, file: Any) -> None:
        file.write(b"PK")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="No space"):
        trainer.save(checkpoint, {})
    assert checkpoint.read_bytes() == before
    assert [path.name for path in checkpoint.parent.iterdir() if path.name.startswith(".")] == []


def test_delayed_checkpoint_has_the_weights_of_its_moment(tmp_path: Path) -> None:
    session = open_session()
    session.optimizer(SGD)
    trainer = session.trainer(ema=None, batch_size=4, resume_from=None)
    assert trainer is not None
    trainer.save(tmp_path / "now.pt", {"epoch": 1})
    trainer.save(tmp_path / "later.pt", {"epoch": 1}, later=True)
    with torch.no_grad():
        for parameter in session.module.parameters():
            parameter.add_(1.0)
    trainer.finish()
    now, later = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("now", "later")
    )
    assert_same(now["model"], later["model"])
    assert {**now, "model": None, "random": None} == {**later, "model": None, "random": None}


def test_delayed_weights_file_has_the_weights_of_its_moment(tmp_path: Path) -> None:
    session = open_session()
    session.optimizer(SGD)
    trainer = session.trainer(ema=None, batch_size=4, resume_from=None)
    assert trainer is not None
    trainer.prepare_saving()
    assert list(tmp_path.iterdir()) == []
    trainer.save_weights(tmp_path / "now.pt")
    trainer.save(tmp_path / "best.pt", {"epoch": 1}, later=True)
    trainer.save_weights(tmp_path / "later.pt", later=True)
    with torch.no_grad():
        for parameter in session.module.parameters():
            parameter.add_(1.0)
    trainer.finish()
    assert_same(weights(tmp_path / "now.pt"), weights(tmp_path / "later.pt"))
    assert_same(
        weights(tmp_path / "now.pt"), torch.load(tmp_path / "best.pt", weights_only=True)["model"]
    )


def test_delayed_checkpoint_that_fails_is_an_error_at_the_end(tmp_path: Path) -> None:
    session = open_session()
    session.optimizer(SGD)
    trainer = session.trainer(ema=None, batch_size=4, resume_from=None)
    assert trainer is not None
    trainer.save(tmp_path / "gone" / "x.pt", {}, later=True)
    with pytest.raises(OSError, match="gone"):
        trainer.finish()


# settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, r"mode.train.warmup_steps=-1: set 0 or more steps"),
        ({"ema": 1.0}, r"mode.train.ema=1.0: set a decay"),
        ({"label_smoothing": 1.0}, "mode.train.label_smoothing=1.0"),
        ({"clip_grad_norm": 0.0}, "mode.train.clip_grad_norm=0.0"),
        ({"patience": 0}, "mode.train.patience=0"),
        ({"save_every": 2}, "save_every=2 needs mode.train.checkpoints=true"),
        (
            {"optimizer": {"name": "sgd", "lr": -0.1}},
            "mode.train.optimizer.lr=-0.1: set a number of 0 or more",
        ),
        (
            {"optimizer": {"name": "sgd", "momentum": 1.5}},
            "momentum=1.5: set a number from 0, below 1",
        ),
        (
            {"optimizer": {"name": "sgd", "nesterov": True}},
            "nesterov=true needs mode.train.optimizer.momentum",
        ),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Train(**{"optimizer": {}, **settings})


def test_settings_of_sgd_are_not_those_of_adam() -> None:
    assert Train(
        optimizer={"name": "adamw", "lr": 1.0, "momentum": 0.9, "nesterov": False}
    ).optimizer == {
        "name": "adamw",
        "lr": 1.0,
    }


def test_a_step_without_further_settings_is_what_it_was() -> None:
    with Synthetic().open(
        session=open_session(), input_size=(12, 12), batch_size=4, training=True, seed=0
    ) as batches:
        assert names(batches) == ["data", "forward", "loss", "backward", "optimizer"]
        assert names(batches, schedule=Schedule.cosine, ema=0.9)[5:] == ["schedule", "ema"]


def names(batches: Batches, **settings: Any) -> list[str]:
    step = Train(optimizer={"lr": 0.1}, **settings).prepare(
        session=open_session(), batches=batches, batch_size=4
    )
    return [name for name, _ in step.segments]


def test_graph_step_reads_rate_tensor_host_keeps_schedule(
    monkeypatch: Any,
) -> None:
    session = open_session()
    replayed: list[int] = []

    def capture(call: Any) -> Any:
        return lambda: (replayed.append(1), call())

    monkeypatch.setattr(session, "capture", capture)
    mode = Train(optimizer={"lr": 0.1}, schedule=Schedule.cosine, ema=0.9)
    with Synthetic().open(
        session=session, input_size=(12, 12), batch_size=4, training=True, seed=0
    ) as batches:
        step = mode.prepare(session=session, batches=batches, batch_size=4)
        with step.active():
            step.call()
            captured = graphed(step, session, constant=True)
            [group] = session._optimizer.param_groups  # type: ignore[union-attr]
            rate = group["lr"] = torch.tensor(0.1)
            assert captured.trainer is not None
            captured.trainer.begin(mode.rates(1, 4).factor, 0, seed=0)
            seen = [float(rate)]
            for _ in range(3):
                captured.call()
                seen.append(float(rate))
    assert [name for name, _ in captured.segments] == ["data", "graph", "schedule", "ema"]
    assert len(replayed) == 3
    assert group["lr"] is rate
    assert seen == pytest.approx([0.1 * mode.rates(1, 4).factor(number) for number in range(4)])


class Watched(Images):
    """Images that note how many batches of evaluation are open."""

    num_open = 0

    @contextmanager
    def open(self, *, training: bool, **settings: Any) -> Iterator[Batches]:
        with super().open(training=training, **settings) as batches:
            self.num_open += not training
            yield batches
            self.num_open -= not training


def test_first_timed_epoch_has_no_open_evaluation_batches(pictures: Path, tmp_path: Path) -> None:
    data, num_open = Watched(root=str(pictures), workers=0), dict[str, int]()
    own = procedure(data, tmp_path, epochs=1, optimizer=SGD)
    own.progress = lambda text: num_open.update({text: data.num_open})
    assert own.measure(KEY).status is Status.OK
    assert (num_open["first evaluation"], num_open["epoch 1 of 1"], data.num_open) == (0, 0, 0)


class Returning:
    """Batches of evaluation of which the full ones come again and again in the same tensors, as of a CUDA graph."""

    def __init__(self, session: TorchSession) -> None:
        self.constant, self.per_epoch = False, 3
        generator = torch.Generator().manual_seed(0)
        self._inputs, self._targets = (
            torch.rand(10, 3, 12, 12, generator=generator),
            (torch.arange(10) % 3 == 0).long(),
        )
        self._full = session.copy(Batch(inputs=self._inputs[:4], targets=self._targets[:4]))
        self._session = session

    def next(self) -> Batch:
        return next(self.epoch())

    def epoch(self) -> Iterator[Batch]:
        for first in (0, 4, 8):
            part = Batch(
                inputs=self._inputs[first : first + 4], targets=self._targets[first : first + 4]
            )
            yield self._session.copy(part, into=self._full) if first < 8 else part


@pytest.mark.parametrize("error", [None, Unsupported("scripted"), MemoryError("scripted")])
def test_an_evaluation_replays_the_graph_of_batches_that_return(
    monkeypatch: Any, error: Exception | None
) -> None:
    session, replayed, is_captured = open_session(), [], error is None
    monkeypatch.setattr(
        session.device, "is_out_of_memory", lambda raised: isinstance(raised, MemoryError)
    )

    def capture(call: Any) -> Any:
        if error is not None:
            raise error
        call()
        return lambda: (replayed.append(1), call())

    monkeypatch.setattr(session, "capture", capture)
    plain = Evaluation(session, Returning(session)).accuracy()
    evaluation = Evaluation(session, Returning(session), graphs=True)
    for passes in (1, 2):
        assert evaluation.accuracy() == plain
        assert len(replayed) == (2 * passes if is_captured else 0)
    monkeypatch.setattr(session, "capture", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        Evaluation(session, Returning(session), graphs=True).accuracy()
    for label, expected in ((0, 0.6), (1, 0.4)):
        with torch.no_grad():
            session.module.fc.bias[label] += 1000.0 * (1 + label)
        assert evaluation.accuracy() == expected


@pytest.mark.parametrize("is_loaded", [True, False])
def test_checkpoint_is_delayed_if_graphs_need_no_loaded_data(
    pictures: Path, tmp_path: Path, monkeypatch: Any, is_loaded: bool
) -> None:
    later, run, save = [], EpochTraining.run, TorchTrainer.save

    def graph(self: EpochTraining) -> None:
        self.step = replace(self.step, segments=(*self.step.segments, ("graph", lambda: None)))
        run(self)

    def noted(self: TorchTrainer, *given: Any, **settings: Any) -> None:
        later.append(settings["later"])
        save(self, *given, **settings)

    monkeypatch.setattr(EpochTraining, "run", graph)
    monkeypatch.setattr(TorchTrainer, "save", noted)
    data = Images(root=str(pictures), workers=0) if is_loaded else Synthetic(num_samples=8)
    train(data, tmp_path, epochs=1, optimizer=SGD, checkpoints=True)
    assert later == [not is_loaded]


def test_a_training_that_fails_waits_for_its_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    finished: list[bool] = []
    monkeypatch.setattr(TorchTrainer, "finish", lambda _: finished.append(True))
    monkeypatch.setattr(
        EpochTraining, "_run_epoch_probes", Mock(side_effect=RuntimeError("scripted"))
    )
    own = procedure(Synthetic(num_samples=8), tmp_path, epochs=1, optimizer=SGD, checkpoints=True)
    assert own.measure(KEY).status is Status.FAILED
    assert finished == [True]
