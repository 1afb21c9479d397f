from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from perfexp.data.synthetic import Synthetic
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Batch, Execution, Precision, Session
from perfexp.models.module import ModuleModel, adapt
from perfexp.models.torchvision import Torchvision


class Classifier(torch.nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.fc = torch.nn.Linear(4, classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(pictures).mean((2, 3)))


class Segmenter(torch.nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(3, 7, 3, stride=2)


class Regressor(torch.nn.Module):
    """Takes series instead of pictures, and brings its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(6, 6)

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        return (input_size[0], 6)

    def loss(self, outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        assert targets is None
        return outputs.square().mean()

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.fc(series)


class Embedder(Classifier):
    def forward(self, pictures: torch.Tensor) -> Any:
        return self.conv(pictures).mean((1, 2, 3))


def open_adapted(built: object, *, num_classes: int | None = None, seed: int = 0) -> Session:
    return adapt(built, "mine").open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=num_classes,
        seed=seed,
    )


def train_once(session: Session, batch: Batch) -> float:
    update = session.optimizer({"name": "sgd", "lr": 0.1})
    with session.training():
        loss = session.loss(session.first_forward(batch), batch.targets)
        session.backward(loss)
        update()
    return session.number(loss)


@pytest.mark.parametrize(
    ("module", "inputs", "targets", "classes"),
    [(Classifier(), (2, 3, 9, 11), (2,), 5), (Segmenter(), (2, 3, 9, 11), (2, 4, 5), 7)],
)
def test_the_outputs_shape_says_what_a_module_learns(
    module: torch.nn.Module, inputs: tuple[int, ...], targets: tuple[int, ...], classes: int
) -> None:
    session = open_adapted(module)
    with Synthetic().open(
        session=session, input_size=(9, 11), batch_size=2, training=True, seed=0
    ) as batches:
        with session.training():
            session.first_forward(batches.next())
        batch, other = batches.next(), batches.next()
    assert (batch.inputs.shape, batch.targets.shape) == (inputs, targets)
    assert 0 <= batch.targets.min() <= batch.targets.max() < classes
    assert other.inputs is batch.inputs
    assert not torch.equal(other.targets, batch.targets)
    assert train_once(session, batch) > 0


def test_nothing_runs_before_the_first_call() -> None:
    calls = []

    class Watched(Classifier):
        def forward(self, pictures: torch.Tensor) -> torch.Tensor:
            calls.append(type(pictures))
            return super().forward(pictures)

    assert open_adapted(Watched()).random_batch((9, 9), 2, 0).targets is None
    assert not calls


def test_a_module_may_say_what_it_takes_and_what_it_minimises() -> None:
    session = open_adapted(Regressor())
    batch = session.random_batch((4, 4), 2, 0)
    assert batch.inputs.shape == (2, 4, 6)
    assert batch.targets is None
    assert train_once(session, batch) > 0


def test_module_with_other_outputs_infers_but_cannot_train() -> None:
    session = open_adapted(Embedder())
    batch = session.random_batch((9, 9), 2, 0)
    with session.inferring():
        assert session.first_forward(batch).shape == (2,)
    with pytest.raises(UserError, match=r"method loss\(outputs, targets\)"):
        train_once(session, batch)


def test_size_a_module_cannot_take_is_unsupported() -> None:
    session = open_adapted(Classifier())
    batch = session.random_batch((2, 2), 2, 0)
    with session.inferring(), pytest.raises(Unsupported, match=r"^mine can't take 2 × 3 × 2 × 2"):
        session.first_forward(batch)


def test_a_partial_makes_weights_that_follow_the_seed() -> None:
    def outputs(seed: int) -> torch.Tensor:
        session = open_adapted(functools.partial(Classifier, classes=3), seed=seed)
        with session.inferring():
            return session.forward(torch.ones(1, 3, 9, 9))

    assert outputs(1).shape == (1, 3)
    assert torch.equal(outputs(1), outputs(1))
    assert not torch.equal(outputs(1), outputs(2))


def test_infinities_and_nan_are_found_in_nested_outputs() -> None:
    session = open_adapted(Classifier())
    fine = {
        "out": torch.ones(2, 3),
        "labels": torch.zeros(2, dtype=torch.int64),
        "none": [torch.empty(0), None],
    }
    assert session.is_finite(fine)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert not session.is_finite(
            {**fine, "aux": (torch.tensor([1.0, wrong, 2.0], dtype=torch.bfloat16),)}
        )


def test_labels_beyond_the_modules_classes_are_refused() -> None:
    module = Classifier(5)
    module.num_classes = 5
    assert open_adapted(module, num_classes=5).num_classes == 5
    with pytest.raises(UserError, match="data has 6 classes, mine has 5"):
        open_adapted(module, num_classes=6)


def test_a_model_is_left_as_it_is_and_a_module_becomes_one() -> None:
    model = Torchvision(name="resnet18")
    assert adapt(model, "mine") is model
    assert isinstance(adapt(Classifier(), "mine"), ModuleModel)


@pytest.mark.parametrize("built", [None, 3, "resnet18", {"name": "resnet18"}])
def test_something_else_is_explained(built: object) -> None:
    with pytest.raises(
        UserError, match=rf"model=mine built a {type(built).__name__}\. .*torch\.nn\.Module"
    ):
        adapt(built, "mine")


def test_a_partial_of_something_else_is_explained() -> None:
    with pytest.raises(UserError, match="made a int"):
        open_adapted(functools.partial(int))


class Wide(Classifier):
    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"width": 4, "widht": 8}, r"model\.widht: mine has no argument 'widht'\. .* width"),
        ({}, r"model=mine: missing a required argument: 'width'; set it as model\.KEY=VALUE\."),
    ],
)
def test_keys_that_a_class_cannot_take_are_refused(keys: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapt(functools.partial(Wide, **keys), "mine")


class Tokens(torch.nn.Embedding):
    def __init__(self) -> None:
        super().__init__(10, 4)


class Pair(torch.nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Tokens(), "scalar types: Long, Int"),
        (Pair(), "forward: missing a required argument: 'other'"),
    ],
)
def test_a_module_of_other_inputs_is_refused_with_what_to_set(
    module: torch.nn.Module, reason: str
) -> None:
    session = open_adapted(module)
    with session.inferring(), pytest.raises(Unsupported, match=reason) as raised:
        session.first_forward(session.random_batch((32, 32), 1, seed=0))
    assert "method sample_shape(input_size)" in str(raised.value)
    assert "a method example_inputs(batch_size)" in str(raised.value)


class Several(torch.nn.Module):
    """Takes token ids and numbers, and scores the classes of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = torch.nn.Embedding(10, 4), torch.nn.Linear(6, 3)

    def example_inputs(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(10, (batch_size, 7)), torch.randn(batch_size, 2)

    def forward(self, words: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat((self.words(words).mean(1), numbers), 1))


class Named(Several):
    def example_inputs(self, batch_size: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        words, numbers = super().example_inputs(batch_size)
        return {"numbers": numbers, "words": words}


class Fixed(Several):
    def example_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().example_inputs(8)


@pytest.mark.parametrize("kind", [Several, Named, Fixed])
def test_a_module_makes_several_inputs_of_its_own(kind: type[Several]) -> None:
    session = open_adapted(kind())
    batch = session.random_batch((32, 32), 8, seed=0)
    again = session.random_batch((32, 32), 8, seed=0)
    for one, other in zip(tree_leaves(batch.inputs), tree_leaves(again.inputs), strict=True):
        assert torch.equal(one, other), "the seed decides"
    with session.inferring():
        assert session.first_forward(batch).shape == (8, 3)
        assert torch.equal(
            session.forward(session.copy(batch).inputs), session.forward(batch.inputs)
        )
    work = session.work(batch.inputs, training=False)
    assert work is not None
    assert work.macs == 8 * 6 * 3
    targets = session.random_targets((32, 32), 8, seed=0)
    assert targets.shape == (8,)
    with session.training():
        update = session.optimizer({"name": "sgd", "lr": 0.1})
        session.backward(
            session.loss(session.learn(Batch(inputs=batch.inputs, targets=targets)), targets)
        )
        update()


def test_own_inputs_of_another_batch_say_which_to_set() -> None:
    with pytest.raises(UserError, match="a batch of 8: set batch_size=8"):
        open_adapted(Fixed()).random_batch((32, 32), 1, seed=0)
