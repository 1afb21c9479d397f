"""CIFAR-10 and CIFAR-100: the published formats, files that are not of them, and the two ways to the device."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - for files that would run something
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perfexp.data import Batches, cifar, made
from perfexp.data.cifar import PADDING, Augmentation, Cifar, DeviceBatches, draw, padded
from perfexp.data.cifar_files import FORMATS, read
from perfexp.devices import Pipeline
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Execution, Precision, Session
from perfexp.models.module import adapt
from perfexp.models.torchvision_import import import_torchvision
from tests.data import cifar_folders
from tests.data.cifar_folders import BINARY, COUNT, PICKLED, STYLES, Format

# Torch starts the loader's workers by fork; Python 3.12 and later warn of that where there are threads.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def open_session(module: torch.nn.Module) -> Session:
    return adapt(module, "small").open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )


@pytest.fixture(scope="module")
def session() -> Session:
    return open_session(
        torch.nn.Sequential(
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10)
        )
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cifar_folders.write(tmp_path, BINARY)
    return tmp_path


def opened(
    data: Cifar, session: Session, *, batch_size: int = 4, training: bool = True, seed: int = 0
) -> Any:
    return data.open(
        session=session, input_size=(32, 32), batch_size=batch_size, training=training, seed=seed
    )


def classes_of(style: Format) -> int:
    return next(classes for classes, styles in FORMATS.items() if style in styles)


# formats


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.folder)
@pytest.mark.parametrize("inside", [True, False], ids=["folder itself", "parent"])
def test_each_format_gives_its_images_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: Format, inside: bool
) -> None:
    folder = cifar_folders.write(tmp_path, style)
    cifar_folders.publish(monkeypatch, style, folder)
    contents = read(folder if inside else tmp_path, classes_of(style))
    for part, files in ((contents.train, style.files[:-2]), (contents.test, style.files[-2:-1])):
        pixels, labels = zip(*(cifar_folders.images(style, file) for file in files), strict=True)
        np.testing.assert_array_equal(part.pixels, np.concatenate(pixels))
        assert part.labels.tolist() == [label for listed in labels for label in listed]
    assert len(contents.classes) == classes_of(style)


def test_pickles_of_python_2_are_read_as_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cifar_folders.write(tmp_path, PICKLED)
    (folder / "test_batch").write_bytes(cifar_folders.python2(PICKLED, "test_batch"))
    cifar_folders.publish(monkeypatch, PICKLED, folder)
    pixels, labels = cifar_folders.images(PICKLED, "test_batch")
    test = read(tmp_path, 10).test
    np.testing.assert_array_equal(test.pixels, pixels)
    assert test.labels.tolist() == labels


def test_the_classes_are_those_that_the_files_name(root: Path) -> None:
    (root / BINARY.folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    data = Cifar(root=str(root))
    assert (data.num_classes, data.num_samples, data.held_out, data.labelled) == (
        10,
        5 * COUNT,
        True,
        True,
    )


# what is missing, or not of the format


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.folder)
def test_a_missing_file_is_named_with_its_archive(tmp_path: Path, style: Format) -> None:
    (cifar_folders.write(tmp_path, style) / style.files[0]).unlink()
    with pytest.raises(UserError) as caught:
        read(tmp_path, classes_of(style))
    told = str(caught.value)
    assert f"lacks {style.files[0]}." in told
    native = FORMATS[classes_of(style)][0]
    assert all(
        text in told for text in (native.archive, native.md5, native.folder, "data.download=true")
    )


@pytest.mark.parametrize("classes", FORMATS)
def test_without_data_the_archive_and_its_checksum_are_named(tmp_path: Path, classes: int) -> None:
    with pytest.raises(
        UserError,
        match=rf"no CIFAR-{classes} .*{FORMATS[classes][0].archive} \(MD5 {FORMATS[classes][0].md5}",
    ):
        read(tmp_path, classes)


class _Runs:
    """A pickle of it calls a function when it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def _attack(folder: Path, *call: Any) -> bytes:
    return pickle.dumps({**cifar_folders.fields(PICKLED, "test_batch"), "labels": _Runs(*call)})


#: Content of test_batch that runs something when it is unpickled, from the folder.
HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda folder: _attack(folder, os.system, f"touch {folder}/ran"),
    "open": lambda folder: _attack(folder, open, f"{folder}/ran", "w"),
    "eval": lambda folder: _attack(folder, eval, f"open('{folder}/ran', 'w')"),
    "old spelling": lambda folder: f"cos\nsystem\n(S'touch {folder}/ran'\ntR.".encode(),
    "instance": lambda folder: f"(S'touch {folder}/ran'\nios\nsystem\n.".encode(),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_pickle_that_is_not_the_published_one_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder = cifar_folders.write(tmp_path, PICKLED)
    cifar_folders.publish(monkeypatch, PICKLED, folder)
    (folder / "test_batch").write_bytes(HOSTILE[case](tmp_path))
    with pytest.raises(UserError, match="not the published file") as caught:
        read(tmp_path, 10)
    assert str(caught.value).startswith(f"{folder}/test_batch ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_the_hostile_pickles_would_run(tmp_path: Path) -> None:
    for make in HOSTILE.values():
        pickle.loads(make(tmp_path))
        (tmp_path / "ran").unlink()


def test_published_checksums_are_those_of_torchvision() -> None:
    datasets = import_torchvision().datasets
    for classes, known in ((10, datasets.CIFAR10), (100, datasets.CIFAR100)):
        _, style = FORMATS[classes]
        meta = (known.meta["filename"], known.meta["md5"])
        assert style.published == dict([*known.train_list, *known.test_list, meta])
        assert style.folder == known.base_folder


def _irregular(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        (
            "test_batch.bin",
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "multiple of 3073",
        ),
        ("test_batch.bin", lambda file: file.write_bytes(b""), "0 bytes"),
        ("test_batch.bin", lambda file: file.write_bytes(b"\x0a" * 3073), "the label 10"),
        ("data_batch_2.bin", _irregular, "a FIFO"),
        ("data_batch_3.bin", _linked, "a link"),
        ("batches.meta.txt", lambda file: file.write_text(""), "2 to 10 classes"),
        ("batches.meta.txt", lambda file: file.write_text("a\n" * 11), "2 to 10 classes"),
    ],
)
def test_a_broken_binary_file_is_one_line(
    root: Path, file: str, change: Callable[[Path], object], told: str
) -> None:
    change(root / BINARY.folder / file)
    with pytest.raises(UserError, match=told) as caught:
        read(root, 10)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_ends_with_one_line_and_code_2(run: Any, tmp_path: Path) -> None:
    folder = cifar_folders.write(tmp_path / "data", PICKLED)
    (folder / "test_batch").write_bytes(HOSTILE["os.system"](tmp_path))
    command = ("model=fake", "gpu=fake", "tracking=none", "stopping=fixed", "mode=train")
    code, told, _ = run(
        *command, "data=cifar10", f"data.root={folder}", "input_size=32", "output_dir=x"
    )
    assert code == 2
    assert told.count("not the published file") == 1
    assert "Traceback" not in told
    assert not (tmp_path / "ran").exists()


def test_wrong_settings_are_explained(root: Path, session: Session) -> None:
    with pytest.raises(UserError, match="set 10 or 100"):
        Cifar(root=str(root), classes=20)
    with pytest.raises(UserError, match="leave input_size out"):
        Cifar(root=str(root)).open(
            session=session, input_size=(224, 224), batch_size=1, training=True, seed=0
        )
    for pipeline in Pipeline:
        data = Cifar(root=str(root), workers=0, pipeline=pipeline)
        with pytest.raises(Unsupported, match="fewer than the 31"):
            opened(data, session, batch_size=31)


# the two pipelines


def crop(image: torch.Tensor, down: int, across: int, mirrored: int) -> torch.Tensor:
    """A crop of a padded image (3, 40, 40), by slices."""
    cut = image[:, down : down + 32, across : across + 32]
    return cut.flip(2) if mirrored else cut


def test_crops_and_normalization_are_those_of_their_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (5, 3, 32, 32), generator=generator, dtype=torch.uint8)
    mean, std = torch.tensor([120.0, 110.0, 90.0]), torch.tensor([60.0, 55.0, 65.0])
    augmentation, rows = Augmentation(mean, std, (32, 32)), torch.tensor([4, 0, 0, 2, 1, 3, 3])
    draws = torch.tensor([[0, 8, 4, 3, 0, 7, 8], [0, 8, 4, 1, 8, 2, 0], [0, 1, 0, 1, 1, 0, 1]])
    cut = augmentation.cropped(padded(pixels), rows, draws)
    expected = [
        crop(padded(pixels)[row], *place) for row, place in zip(rows, draws.T.tolist(), strict=True)
    ]
    assert torch.equal(cut, torch.stack(expected))
    assert torch.equal(cut[2], pixels[0])  # four pixels in, which is the image itself
    normalized = (cut / 255 - mean.view(3, 1, 1) / 255) / (std.view(3, 1, 1) / 255)
    torch.testing.assert_close(augmentation.normalized(cut), normalized)


def test_places_are_drawn_evenly_from_all() -> None:
    draws = draw(torch.empty(3, 90_000, dtype=torch.int64), torch.Generator().manual_seed(0))
    for row, values in zip(draws, (2 * PADDING + 1, 2 * PADDING + 1, 2), strict=True):
        counts = torch.bincount(row, minlength=values)
        assert len(counts) == values
        assert (counts / (90_000 / values) - 1).abs().max() < 0.05


@pytest.mark.parametrize("pipeline", Pipeline)
@pytest.mark.parametrize("workers", [0, 2])
def test_both_pipelines_give_each_evaluation_image_once(
    root: Path, session: Session, pipeline: Pipeline, workers: int
) -> None:
    data = Cifar(root=str(root), pipeline=pipeline, workers=workers)
    contents = read(root, 10)
    with opened(data, session, training=False) as batches:
        assert batches.per_epoch == 2
        taken = list(batches.epoch())
        again = [batches.next() for _ in range(2)]
    pixels, labels = torch.from_numpy(contents.test.pixels), torch.from_numpy(contents.test.labels)
    values = torch.from_numpy(contents.train.pixels).double()
    mean, std = (
        one.view(3, 1, 1) for one in (values.mean((0, 2, 3)), values.std((0, 2, 3), correction=0))
    )
    expected = ((pixels - mean) / std).float()
    torch.testing.assert_close(torch.cat([batch.inputs for batch in taken]), expected)
    assert torch.cat([batch.targets for batch in taken]).equal(labels)
    assert [len(batch.inputs) for batch in taken] == [4, 2]
    assert [len(batch.inputs) for batch in again] == [
        4,
        4,
    ]  # a smaller call would be another measurement


@pytest.mark.parametrize("pipeline", Pipeline)
def test_each_training_epoch_reshuffles_and_repeats_no_image(
    root: Path, session: Session, pipeline: Pipeline
) -> None:
    data = Cifar(root=str(root), pipeline=pipeline, workers=0)
    with opened(data, session, batch_size=7) as batches:
        assert batches.per_epoch == 4
        passes = [list(batches.epoch()) for _ in range(2)]
    labels = [torch.cat([batch.targets for batch in one]).tolist() for one in passes]
    assert all(len(one) == 28 for one in labels)
    assert labels[0] != labels[1]
    everything = read(root, 10).train.labels.tolist()
    for one in labels:
        assert all(one.count(label) <= everything.count(label) for label in range(10))


def first_inputs(batches: Batches, count: int = 6) -> torch.Tensor:
    return torch.cat([batches.next().inputs for _ in range(count)])


@pytest.mark.parametrize("pipeline", Pipeline)
def test_the_seed_makes_order_and_crops_reproducible(
    root: Path, session: Session, pipeline: Pipeline
) -> None:
    def drawn(seed: int) -> torch.Tensor:
        with opened(
            Cifar(root=str(root), pipeline=pipeline, workers=1), session, batch_size=10, seed=seed
        ) as batches:
            return first_inputs(batches)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.slow
def test_both_pipelines_draw_from_the_same_images(root: Path, session: Session) -> None:
    """Mean and deviation over many passes agree pixel by pixel: the same crops, mirrorings and normalization."""
    averages = []
    for pipeline in Pipeline:
        with opened(
            Cifar(root=str(root), pipeline=pipeline, workers=0), session, batch_size=30
        ) as batches:
            inputs = torch.cat([batches.next().inputs for _ in range(300)])
        averages.append((inputs.mean(0), inputs.std(0)))
    (mean, std), (other_mean, other_std) = averages
    # 9,000 images: the standard error of a pixel's mean is 0.011, and five of them leave no pixel of 3,072 outside
    assert (mean - other_mean).abs().max() < 5 * 2**0.5 * std.max() / 9_000**0.5
    assert (std / other_std - 1).abs().max() < 0.1


class _Operations(TorchDispatchMode):
    """Records operations; those for which the host would wait for a device end the test."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__.split(".")[-1]
        assert not any(name.startswith(waiting) for waiting in self.WAITING), name
        self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_device_pipeline_never_syncs_nor_copies_from_host(root: Path, session: Session) -> None:
    with opened(Cifar(root=str(root), pipeline=Pipeline.device), session) as batches:
        batches.next()
        with _Operations() as operations:
            for _ in range(2 * batches.per_epoch):
                batches.next()
    assert "randperm" in operations.names
    made = {
        "lift_fresh",
        "arange",
        "empty",
        "zeros",
    }  # a list of the host's numbers would be copied to the device
    assert not made & set(operations.names)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _Operations():
        torch.ones(1).item()


def test_a_captured_batch_could_be_replayed(root: Path, session: Session) -> None:
    """Whatever the host does not repeat, replays go through the pass again and again, at the same addresses."""
    with opened(Cifar(root=str(root), pipeline=Pipeline.device), session, batch_size=10) as batches:
        assert isinstance(batches, DeviceBatches)
        first = batches.next()
        fixed = (batches._order, batches._draws, batches._upcoming)
        addresses = [tensor.data_ptr() for tensor in fixed]
        replayed = [batches._full() for _ in range(3)]
        assert torch.equal(replayed[2].inputs, first.inputs)
        assert not torch.equal(replayed[0].inputs, first.inputs)
        next(batches.epoch())
        assert addresses == [
            tensor.data_ptr() for tensor in (batches._order, batches._draws, batches._upcoming)
        ]


@pytest.mark.parametrize("fails", [False, True])
def test_batch_is_a_captured_launch_unless_the_capture_fails(
    fails: bool, root: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture makes batches of its own, which the pass does not lack; where it fails, batches are made as before."""
    launched = []

    def captures(device: Any) -> Any:
        def capture(make: Any) -> Any:
            make()
            if fails:
                raise Unsupported("no")
            make()
            return lambda: launched.append(make())

        return capture

    def passes(can_capture: bool) -> list[torch.Tensor]:
        with opened(
            Cifar(root=str(root), pipeline=Pipeline.device), session, batch_size=10
        ) as batches:
            batches._can_capture = can_capture
            return [batches.next().inputs for _ in range(7)] + [
                batch.inputs for batch in batches.epoch()
            ]

    monkeypatch.setattr(cifar, "captures", captures)
    expected, found = passes(False), passes(True)
    assert len(found) == len(expected) > 7
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(launched) == (0 if fails else len(found))


@pytest.mark.parametrize("training", [True, False])
def test_only_training_batches_are_compiled_with_the_model(
    root: Path, session: Session, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    """Small batches of an evaluation have other shapes, and a graph of their own would take seconds."""
    called = []

    def compiled(function: Any) -> Any:
        def call(places: torch.Tensor) -> Any:
            called.append(len(places))
            return function(places)

        return call

    data = Cifar(root=str(root), pipeline=Pipeline.device)
    with opened(data, session, batch_size=4, training=training) as batches:
        expected = [batch.inputs for batch in batches.epoch()]
    monkeypatch.setattr(session, "compiled", compiled)
    with opened(data, session, batch_size=4, training=training) as batches:
        found = [batch.inputs for batch in batches.epoch()]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert called == ([4] * len(found) if training else [])


# the stand-in


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Cifar:
    root = tmp_path_factory.mktemp("shapes") / "made"
    recipe = made.cifar(photographs=None, train=1500, test=400, classes=10, seed=0)
    recipe.write(root, lambda text: None)
    return Cifar(root=str(root), pipeline=Pipeline.device)


def accuracy(session: Session, data: Cifar) -> float:
    with opened(data, session, batch_size=100, training=False) as batches, session.inferring():
        pairs = [
            session.correct(session.forward(batch.inputs), batch.targets)
            for batch in batches.epoch()
        ]
    return sum(correct for correct, _ in pairs) / sum(count for _, count in pairs)


@pytest.mark.slow
def test_a_linear_classifier_does_not_learn_the_stand_in(shapes: Cifar) -> None:
    torch.manual_seed(0)
    session = open_session(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10)))
    update = session.optimizer({"name": "adam", "lr": 0.0003})
    best = 0.0
    with opened(shapes, session, batch_size=100) as batches:
        for _ in range(8):
            train_pass(session, batches, update)
            best = max(best, accuracy(session, shapes))
    assert best < 0.4


@pytest.mark.slow
def test_a_small_convolutional_network_learns_the_stand_in(shapes: Cifar) -> None:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [
            torch.nn.Conv2d(before, after, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(after),
        ]
        layers += [
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2) if after < 64 else torch.nn.AdaptiveMaxPool2d(1),
        ]
    session = open_session(
        torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(64, 10))
    )
    update = session.optimizer({"name": "adam", "lr": 0.003})
    reached = []
    with opened(shapes, session, batch_size=50) as batches:
        for _ in range(5):
            train_pass(session, batches, update)
            reached.append(accuracy(session, shapes))
    assert reached[2] > reached[0] + 0.1
    assert reached[-1] > 0.7


def train_pass(session: Session, batches: Batches, update: Callable[[], None]) -> None:
    with session.training():
        for batch in batches.epoch():
            session.backward(session.loss(session.learn(batch), batch.targets))
            update()
