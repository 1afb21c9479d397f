from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from perfexp.data.image_files import center_crop
from perfexp.data.images import Images
from perfexp.data.loading import to_tensor
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.models import Execution, Precision, Session
from perfexp.models.module import adapt

# Torch starts the loader's workers by fork; Python 3.12 and later warn of that where there are threads.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


@pytest.fixture(scope="module")
def session() -> Session:
    module = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2)
    )
    return adapt(module, "pool").open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )


def open_images(
    images: Images, session: Session, *, batch_size: int = 4, training: bool = True, seed: int = 0
):
    return images.open(
        session=session, input_size=(24, 32), batch_size=batch_size, training=training, seed=seed
    )


def save_picture(file: Path, colour: str = "red") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 30), colour).save(file)


def test_class_folders_become_labels_in_alphabetical_order(
    photographs: Path, session: Session
) -> None:
    images = Images(root=str(photographs), workers=0)
    assert (images.labelled, images.num_classes, images.num_samples) == (True, 2, 12)
    with open_images(images, session, training=False) as batches:
        labels = torch.cat([batch.targets for batch in batches.epoch()])
    assert labels.tolist() == [0] * 6 + [1] * 6


def test_batch_is_normalized_and_has_the_requested_size(
    photographs: Path, session: Session
) -> None:
    with open_images(Images(root=str(photographs), workers=0), session, training=False) as batches:
        batch = batches.next()
    with Image.open(photographs / "flower" / "0.jpg") as picture:
        expected = to_tensor(center_crop(picture, (24, 32)))
    assert batch.inputs.shape == (4, 3, 24, 32)
    torch.testing.assert_close(batch.inputs[0], expected)


def test_normalising_takes_out_imagenets_mean_and_deviation() -> None:
    grey = Image.new("RGB", (5, 4), (124, 116, 104))
    tensor = to_tensor(grey)
    assert tensor.shape == (3, 4, 5)
    expected = [
        (124 / 255 - 0.485) / 0.229,
        (116 / 255 - 0.456) / 0.224,
        (104 / 255 - 0.406) / 0.225,
    ]
    torch.testing.assert_close(tensor[:, 0, 0], torch.tensor(expected))


def test_the_middle_of_a_wide_picture_is_kept() -> None:
    picture = Image.new("RGB", (60, 20), "black")
    picture.paste("white", (20, 0, 40, 20))
    inside = center_crop(picture, (10, 10)).crop(
        (1, 1, 9, 9)
    )  # resizing blends the border with what lies outside
    assert inside.getextrema() == ((255, 255),) * 3


def test_training_drops_a_partial_batch_evaluation_keeps_it(
    photographs: Path, session: Session
) -> None:
    images = Images(root=str(photographs), workers=0)
    sizes = {}
    for training in (True, False):
        with open_images(images, session, batch_size=5, training=training) as batches:
            sizes[training] = [len(batch.inputs) for batch in batches.epoch()]
            assert batches.per_epoch == len(sizes[training])
    assert sizes == {True: [5, 5], False: [5, 5, 2]}


def test_next_gives_full_batches_for_ever(photographs: Path, session: Session) -> None:
    with open_images(
        Images(root=str(photographs), workers=0), session, batch_size=5, training=False
    ) as batches:
        assert [len(batches.next().inputs) for _ in range(5)] == [5] * 5


def test_an_epoch_begins_at_the_beginning_wherever_next_was(
    photographs: Path, session: Session
) -> None:
    with open_images(Images(root=str(photographs), workers=1), session, training=False) as batches:
        first = batches.next().inputs
        batches.next()
        epoch = [batch.inputs for batch in batches.epoch()]
    assert len(epoch) == 3
    torch.testing.assert_close(epoch[0], first)


def test_seed_makes_shuffled_order_and_crops_reproducible(
    photographs: Path, session: Session
) -> None:
    def drawn(seed: int) -> torch.Tensor:
        with open_images(Images(root=str(photographs), workers=2), session, seed=seed) as batches:
            return torch.stack([batches.next().inputs for _ in range(2)])

    torch.testing.assert_close(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_train_and_val_folders_are_the_two_splits(
    tmp_path: Path, photographs: Path, session: Session
) -> None:
    shutil.copytree(photographs, tmp_path / "train")
    for name in ("flower", "temple"):
        (tmp_path / "val" / name).mkdir(parents=True)
        shutil.copy(photographs / name / "0.jpg", tmp_path / "val" / name)
    images = Images(root=str(tmp_path), workers=0)
    assert images.num_samples == 12
    with open_images(images, session, training=False) as batches:
        assert [len(batch.inputs) for batch in batches.epoch()] == [2]
    with open_images(images, session, training=True) as batches:
        assert batches.per_epoch == 3


def test_splits_of_different_classes_are_refused(tmp_path: Path) -> None:
    save_picture(tmp_path / "train" / "cat" / "1.png")
    save_picture(tmp_path / "val" / "dog" / "1.png")
    with pytest.raises(UserError, match="different classes: cat, dog"):
        Images(root=str(tmp_path))


def test_pictures_without_subfolders_have_no_labels(tmp_path: Path, session: Session) -> None:
    for name in ("a.png", "b.JPEG", "c.webp", "d.gif", "e.tif", "f.bmp"):
        save_picture(tmp_path / name)
    images = Images(root=str(tmp_path), workers=0)
    assert (images.labelled, images.num_classes, images.num_samples) == (False, None, 6)
    with open_images(images, session, training=False) as batches:
        assert batches.next().targets is None
    with pytest.raises(UserError, match="no classes to learn"), open_images(images, session):
        pass


def test_hidden_and_foreign_files_and_outward_links_are_skipped(
    tmp_path: Path,
) -> None:
    save_picture(tmp_path / "elsewhere" / "1.png")
    root = tmp_path / "root"
    save_picture(root / "cat" / "1.png")
    save_picture(root / "cat" / "deeper" / "2.png")
    save_picture(root / "cat" / ".hidden.png")
    save_picture(root / ".cache" / "3.png")
    (root / "cat" / "notes.txt").write_text("no picture")
    (root / "cat" / "same.png").symlink_to(root / "cat" / "1.png")
    (root / "cat" / "out.png").symlink_to(tmp_path / "elsewhere" / "1.png")
    (root / "cat" / "round").symlink_to(root, target_is_directory=True)
    (root / "dog").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    images = Images(root=str(root))
    assert (images.num_classes, images.num_samples) == (1, 3)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content", [b"no picture", b"", None], ids=["text", "empty", "cut off"])
def test_an_unreadable_picture_is_named(
    tmp_path: Path, session: Session, photographs: Path, workers: int, content: bytes | None
) -> None:
    bad = tmp_path / "cat" / "bad.jpg"
    bad.parent.mkdir()
    bad.write_bytes(
        (photographs / "temple" / "0.jpg").read_bytes()[:2000] if content is None else content
    )
    with (
        pytest.raises(UserError, match=r"cat/bad\.jpg can't be read as an image") as caught,
        open_images(Images(root=str(tmp_path), workers=workers), session, batch_size=1) as batches,
    ):
        batches.next()
    assert "Traceback" not in str(caught.value)


def test_a_picture_that_would_fill_the_memory_is_unreadable(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_picture(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    images = Images(root=str(tmp_path), workers=0)
    with (
        pytest.raises(UserError, match=r"bomb\.png"),
        open_images(images, session, batch_size=1, training=False) as it,
    ):
        it.next()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root is not a folder: .*/nowhere"):
        Images(root=str(tmp_path / "nowhere"))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no images in .*\.jpeg"):
        Images(root=str(tmp_path))


def test_a_class_without_pictures_is_named(tmp_path: Path) -> None:
    save_picture(tmp_path / "cat" / "1.png")
    (tmp_path / "dog").mkdir()
    with pytest.raises(UserError, match=r"class folder .*dog holds no images"):
        Images(root=str(tmp_path))


@pytest.mark.parametrize("training", [True, False])
def test_fewer_pictures_than_a_batch_are_refused(
    photographs: Path, session: Session, training: bool
) -> None:
    images = Images(root=str(photographs), workers=0)
    with (
        pytest.raises(Unsupported, match="12 samples, fewer than the 13"),
        open_images(images, session, batch_size=13, training=training) as batches,
    ):
        batches.next()


def test_a_home_folder_is_understood(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(photographs.parent))
    assert Images(root=f"~/{photographs.name}").num_samples == 12


def test_no_worker_is_left_over(photographs: Path, session: Session) -> None:
    before = set(psutil.Process().children())
    with open_images(Images(root=str(photographs), workers=2), session) as batches:
        batches.next()
        workers = set(psutil.Process().children()) - before
        assert len(workers) == 2
        next_batch = batches.next  # what a caller may still hold must not keep them alive
    _, alive = psutil.wait_procs(list(workers), timeout=10)
    assert not alive
    assert next_batch


@pytest.mark.slow
def test_a_worker_that_dies_is_reported(photographs: Path, session: Session) -> None:
    before = set(psutil.Process().children())
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        with (
            pytest.raises(PerfexpError, match=r"failed: .*data\.workers=0"),
            open_images(Images(root=str(photographs), workers=1), session) as batches,
        ):
            batches.next()
            # torch's handler raises in whatever runs when the signal comes, pytest included; its own look every five
            # seconds raises where the batch is waited for
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for worker in set(psutil.Process().children()) - before:
                os.kill(worker.pid, signal.SIGKILL)
            while True:
                batches.next()
    finally:
        signal.signal(signal.SIGCHLD, handler)
