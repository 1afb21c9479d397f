"""Cityscapes: its folder, its masks, batches for any model, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from perfexp.data.cityscapes import Cityscapes, cropped
from perfexp.data.cityscapes_folder import (
    CLASSES,
    LABEL_IDS,
    MADE,
    VOID,
    Pair,
    contents,
    image_of,
    mask_of,
    read_mask,
    sample,
    train_ids,
)
from perfexp.data.loading import to_tensor
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Execution, Precision, Session
from perfexp.models.torchvision import Torchvision
from tests.data.streets import (
    PER_SPLIT,
    SIZE,
    change_mask,
    cut_off,
    stem,
    write_pair,
    write_streets,
)

# Torch starts the loader's workers by fork; Python 3.12 and later warn of that where there are threads.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


def opened(name: str, num_classes: int | None = None) -> Session:
    return Torchvision(name=name, num_classes=num_classes).open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )


@pytest.fixture(scope="module")
def session() -> Session:
    return opened("lraspp_mobilenet_v3_large", len(CLASSES))


@pytest.fixture
def streets(tmp_path: Path) -> Path:
    return write_streets(tmp_path / "streets")


def open_batches(
    root: Path,
    session: Session,
    *,
    batch_size: int = 2,
    training: bool = True,
    seed: int = 0,
    **given,
):
    data = Cityscapes(root=str(root), **{"workers": 0, **given})
    return data.open(
        session=session, input_size=(16, 32), batch_size=batch_size, training=training, seed=seed
    )


def test_the_ids_of_the_classes_are_those_of_cityscapes_scripts() -> None:
    """Its table, cityscapesscripts/helpers/labels.py: id of each class that has a train id, in order of the latter."""
    first = {
        "road": 7,
        "sidewalk": 8,
        "building": 11,
        "wall": 12,
        "fence": 13,
        "pole": 17,
        "traffic light": 19,
    }
    second = {
        "traffic sign": 20,
        "vegetation": 21,
        "terrain": 22,
        "sky": 23,
        "person": 24,
        "rider": 25,
        "car": 26,
    }
    table = first | second | {"truck": 27, "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33}
    assert dict(zip(CLASSES, LABEL_IDS, strict=True)) == table


def test_the_ids_are_those_of_the_installed_cityscapes_scripts() -> None:
    labels = pytest.importorskip("cityscapesscripts.helpers.labels").labels
    drawn = [label for label in labels if label.id >= 0]
    mask = np.array([[label.id for label in drawn]], np.uint8)
    expected = [[label.trainId for label in drawn]]
    assert (
        train_ids(mask, Path("x_gtFine_labelIds.png"), size=mask.shape, classes=19).tolist()
        == expected
    )


def test_label_ids_become_train_ids_and_everything_else_void() -> None:
    mask = np.arange(34, dtype=np.uint8).reshape(2, 17)
    ids = train_ids(mask, Path("x_gtFine_labelIds.png"), size=(2, 17), classes=19).ravel().tolist()
    assert [ids[number] for number in (0, 6, 7, 9, 18, 19, 28, 29, 31, 33)] == [
        *(VOID, VOID, 0, VOID, VOID, 6, 15, VOID, 16, 18)
    ]
    assert sorted(set(ids) - {VOID}) == list(range(19))


def test_train_ids_stay_as_they_are() -> None:
    mask = np.array([[0, 18, VOID]], np.uint8)
    assert train_ids(mask, Path("x_gtFine_labelTrainIds.png"), size=(1, 3), classes=19) is mask


@pytest.mark.parametrize("label", [19, 33, 200, 254])
def test_every_number_that_is_no_train_id_is_told(label: int) -> None:
    mask = np.array([[0, label, VOID]], np.uint8)
    with pytest.raises(
        UserError,
        match=rf"x_gtFine_labelTrainIds\.png has labels that are not train ids: {label}\.",
    ):
        train_ids(mask, Path("x_gtFine_labelTrainIds.png"), size=(1, 3), classes=19)


@pytest.mark.parametrize("label", [34, 200, 254])
def test_every_number_that_is_no_label_id_is_told(label: int) -> None:
    mask = np.array([[7, label]], np.uint8)
    with pytest.raises(
        UserError, match=rf"not label ids of Cityscapes: {label}\. They go from 0 to 33"
    ):
        train_ids(mask, Path("x_gtFine_labelIds.png"), size=(1, 2), classes=19)


def test_a_split_is_counted_and_what_has_no_partner_is_named(streets: Path) -> None:
    mask_of(streets, "train", stem(2)).unlink()
    image_of(streets, "train", stem(4)).unlink()
    found = contents(streets, "train")
    assert (len(found.images), len(found.masks), len(found.pairs)) == (5, 5, 4)
    assert found.without_mask == [image_of(streets, "train", stem(2))]
    assert found.without_image == [mask_of(streets, "train", stem(4))]


def test_train_ids_precede_label_ids_and_other_files_are_skipped(streets: Path) -> None:
    write_pair(streets, "val", 0, label_ids=True)
    mask = mask_of(streets, "val", stem(0))
    for name in ("x_gtFine_color.png", "x_gtFine_polygons.json", ".y_gtFine_labelIds.png"):
        (mask.parent / name).write_text("")
    found = contents(streets, "val")
    assert (len(found.masks), found.pairs[0].mask) == (3, mask)


def test_a_sample_goes_from_the_first_to_the_last() -> None:
    pairs = [Pair(Path(str(number)), Path()) for number in range(10)]
    assert [pair.image.name for pair in sample(pairs, 4)] == ["0", "3", "6", "9"]
    assert sample(pairs, 0) == sample(pairs, 99) == pairs
    assert sample(pairs, 1) == pairs[:1]


@pytest.mark.parametrize("lacking", ["leftImg8bit", "leftImg8bit/train", "gtFine", "gtFine/val"])
def test_the_first_folder_that_is_missing_is_named(streets: Path, lacking: str) -> None:
    shutil.rmtree(streets / lacking)
    with pytest.raises(UserError, match=rf"lacks a folder: .*streets/{lacking}\. .*make-data"):
        Cityscapes(root=str(streets))


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root is not a folder: .*/nowhere"):
        Cityscapes(root=str(tmp_path / "nowhere"))


def test_image_without_a_mask_or_split_without_images_is_refused(streets: Path) -> None:
    mask_of(streets, "train", stem(3)).unlink()
    with pytest.raises(
        UserError,
        match=r"1 of 6 images .* have no mask, the first is ulm_000003_000019_leftImg8bit",
    ):
        Cityscapes(root=str(streets))
    shutil.rmtree(streets / "leftImg8bit/train/ulm")
    with pytest.raises(UserError, match=r"There are no images .*leftImg8bit/train"):
        Cityscapes(root=str(streets))


def test_it_says_what_it_is(streets: Path) -> None:
    data = Cityscapes(root=str(streets))
    assert (data.labelled, data.num_classes, data.num_samples, data.held_out) == (
        True,
        19,
        PER_SPLIT["train"],
        True,
    )
    (streets / MADE).write_text("{}")
    assert not Cityscapes(root=str(streets)).labelled


def test_an_evaluation_shows_whole_pictures_in_order(streets: Path, session: Session) -> None:
    with open_batches(streets, session, training=False) as batches:
        epoch = list(batches.epoch())
        again = batches.next()
    assert [len(batch.inputs) for batch in epoch] == [2, 1]
    with Image.open(image_of(streets, "val", stem(0))) as picture:
        expected = to_tensor(picture.resize((32, 16), Image.Resampling.BILINEAR))
    torch.testing.assert_close(epoch[0].inputs[0], expected)
    torch.testing.assert_close(again.inputs, epoch[0].inputs)
    mask = read_mask(mask_of(streets, "val", stem(0)))
    with Image.fromarray(mask) as image:
        expected_ids = np.array(image.resize((32, 16), Image.Resampling.NEAREST))
    assert epoch[0].targets[0].tolist() == expected_ids.tolist()


def test_label_ids_and_their_train_ids_give_the_same_targets(
    tmp_path: Path, session: Session
) -> None:
    roots = [write_streets(tmp_path / name, label_ids=True) for name in ("label_ids", "train_ids")]
    for split, count in PER_SPLIT.items():
        for index in range(count):
            file = mask_of(roots[1], split, stem(index), label_ids=True)
            ids = train_ids(read_mask(file), file, size=SIZE, classes=19)
            Image.fromarray(ids).save(mask_of(roots[1], split, stem(index)))
    targets = []
    for root in roots:
        with open_batches(root, session, training=False) as batches:
            targets.append(batches.next().targets)
    assert torch.equal(*targets)


def test_a_crop_cuts_picture_and_mask_alike(tmp_path: Path) -> None:
    """The mask's numbers are the picture's, so that they have to meet in each crop."""
    numbers = np.repeat(np.repeat(np.arange(16, dtype=np.uint8).reshape(2, 8), 8, 0), 8, 1)
    pair = Pair(tmp_path / "x_leftImg8bit.png", tmp_path / "x_gtFine_labelTrainIds.png")
    Image.fromarray(np.stack([numbers * 16] * 3, axis=2)).save(pair.image)
    Image.fromarray(numbers).save(pair.mask)
    torch.manual_seed(5)
    for _ in range(8):
        picture, mask = cropped(pair, size=(16, 16), training=True, classes=19)
        red = (picture[0] * 0.229 + 0.485) * 255 / 16
        assert (picture.shape, mask.shape, mask.dtype) == ((3, 16, 16), (16, 16), torch.int64)
        # a pixel between two numbers is a blend of them
        assert (red - mask).abs().median() < 0.1


def test_a_picture_smaller_than_the_crop_is_enlarged(streets: Path, session: Session) -> None:
    data = Cityscapes(root=str(streets), workers=0)
    with data.open(
        session=session, input_size=(96, 96), batch_size=2, training=True, seed=0
    ) as batches:
        batch = batches.next()
    assert (batch.inputs.shape, batch.targets.shape) == ((2, 3, 96, 96), (2, 96, 96))


def test_a_training_goes_on_after_a_pass_and_an_epoch_is_one(
    streets: Path, session: Session
) -> None:
    with open_batches(streets, session, batch_size=4) as batches:
        assert batches.per_epoch == 1
        assert [len(batches.next().inputs) for _ in range(4)] == [4] * 4
        assert [len(batch.inputs) for batch in batches.epoch()] == [4]
        assert len(batches.next().inputs) == 4


def test_every_pass_shows_every_picture_once(streets: Path, session: Session) -> None:
    for index in range(PER_SPLIT["train"]):  # a mask of a number of its own
        Image.new("L", SIZE[::-1], index).save(mask_of(streets, "train", stem(index)))
    with open_batches(streets, session, workers=1) as batches:
        batches.next()
        seen = [int(each[0, 0]) for batch in batches.epoch() for each in batch.targets]
        assert sorted(seen) == list(range(6))
        following = [int(each[0, 0]) for _ in range(6) for each in batches.next().targets]
    assert sorted(following) == sorted([*range(6)] * 2)
    assert following[:6] != following[6:]


def test_the_seed_makes_order_and_crops_reproducible(streets: Path, session: Session) -> None:
    def drawn(seed: int) -> torch.Tensor:
        with open_batches(streets, session, seed=seed, workers=2) as batches:
            return torch.stack([batches.next().inputs for _ in range(3)])

    torch.testing.assert_close(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_can_not_be_used_are_named(
    streets: Path, session: Session, workers: int
) -> None:
    def told() -> str:
        with (
            pytest.raises(UserError) as caught,
            open_batches(
                streets, session, training=False, batch_size=1, workers=workers
            ) as batches,
        ):
            batches.next()
        assert "Traceback" not in str(caught.value)
        return str(caught.value)

    picture, mask = image_of(streets, "val", stem(0)), mask_of(streets, "val", stem(0))
    change_mask(mask, 77)
    assert f"{mask} has labels that are not train ids: 77" in told()
    Image.new("L", (10, 20)).save(mask)
    assert f"{mask} is 20 × 10, its image 32 × 64 pixels" in told()
    Image.new("RGB", SIZE[::-1]).save(mask)
    assert f"{mask} is not a mask" in told()
    cut_off(mask)
    assert f"{mask} can't be read as a mask" in told()
    cut_off(picture)
    assert f"{picture} can't be read as an image" in told()


def test_model_with_too_few_classes_is_refused_before_its_loss(streets: Path) -> None:
    few = opened("lraspp_mobilenet_v3_large", 4)
    with (
        pytest.raises(UserError, match="has 4 classes, Cityscapes 19"),
        open_batches(streets, few) as batches,
    ):
        batches.next()


def test_a_classifier_is_refused(streets: Path) -> None:
    classifier = opened("resnet18", 19)
    with (
        pytest.raises(UserError, match="takes targets of 1 dimensions, the data gives 3"),
        open_batches(streets, classifier) as batches,
    ):
        batches.next()


@pytest.mark.parametrize("training", [True, False])
def test_fewer_pictures_than_a_batch_are_refused(
    streets: Path, session: Session, training: bool
) -> None:
    with (
        pytest.raises(Unsupported, match="fewer than the 7 of one batch"),
        open_batches(streets, session, training=training, batch_size=7) as batches,
    ):
        batches.next()


def test_no_worker_is_left_over(streets: Path, session: Session) -> None:
    before = set(psutil.Process().children())
    with open_batches(streets, session, workers=2) as batches:
        batches.next()
        workers = set(psutil.Process().children()) - before
        assert len(workers) == 2
    _, alive = psutil.wait_procs(list(workers), timeout=10)
    assert not alive
