"""Read the Cityscapes folder: pairs of image and mask by split, masks, and problems.

A split is `train` or `val`. A mask has one number per pixel: a train id (0 to 18, one per class, as
losses expect it) or a label id (0 to 33, as in the published masks). 255 stands for pixels without
a class (void). `Cityscapes` loads from here; `perfexp doctor` calls `survey`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfexp.data.image_files import decoding, listing, read_image
from perfexp.errors import UserError

#: File that marks a data set from `perfexp make-data`; its masks are not ground truth.
MADE = "made.json"

Mask = np.ndarray[Any, np.dtype[np.uint8]]

#: Class names by train id.
CLASSES = (
    *(
        "road",
        "sidewalk",
        "building",
        "wall",
        "fence",
        "pole",
        "traffic light",
        "traffic sign",
        "vegetation",
    ),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
#: Train id for pixels without a class.
VOID = 255
#: Label id of each class. Source: the table `labels` in cityscapesScripts,
#: cityscapesscripts/helpers/labels.py. Other ids up to the last are void; -1, license plates, is
#: never drawn (preparation/json2labelImg.py).
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)

#: Advice in messages about files that cannot be decoded.
REPAIR_ADVICE = "Get it again, or take it out."
#: Endings of files with train ids, and with label ids.
TRAIN_IDS_END, LABEL_IDS_END = "_gtFine_labelTrainIds.png", "_gtFine_labelIds.png"

#: Train id of each label id; unknown ids have 254, which is neither a class nor void.
_TRAIN_ID_OF = np.full(256, 254, np.uint8)
_TRAIN_ID_OF[[*range(max(LABEL_IDS) + 1), VOID]] = VOID
_TRAIN_ID_OF[list(LABEL_IDS)] = np.arange(len(LABEL_IDS))


def read_mask(file: Path) -> Mask:
    """Return a mask as stored, uint8 (height, width).

    Raises:
        UserError: the file cannot be decoded or is not a mask.
    """
    with decoding(file, "a mask", REPAIR_ADVICE) as mask:
        numbers = np.array(mask)
    if numbers.ndim != 2 or (
        numbers.dtype != np.uint8 and numbers.size and int(numbers.max()) > VOID
    ):
        raise UserError(
            f"{file} is not a mask: it needs one number from 0 to 255 per pixel, not a color."
        )
    return numbers.astype(np.uint8, copy=False)


def train_ids(mask: Mask, file: Path, *, size: tuple[int, int], classes: int) -> Mask:
    """Return a mask, uint8 (height, width), with train ids and void only.

    Label ids, recognized by the file name, are converted. Both ways to prepare samples call it,
    since a wrong number would crash the loss on the device.

    Args:
        mask: mask as stored.
        file: its file, for the name and for messages.
        size: height and width of its image.
        classes: number of classes; train ids are below it.

    Raises:
        UserError: the mask has another size or unknown numbers, for example 40.
    """
    if mask.shape != size:
        raise UserError(
            f"{file} is {' × '.join(map(str, mask.shape))}, its image {' × '.join(map(str, size))} "
            "pixels: get both again."
        )
    ids = _TRAIN_ID_OF.take(mask) if file.name.endswith(LABEL_IDS_END) else mask
    # void + 1 wraps to 0 in uint8, which finds the largest class without a copy of eight times
    # the size
    if ids.size and int((ids + np.uint8(1)).max()) > classes:
        wrong = np.unique(mask[(ids >= classes) & (ids != VOID)]).tolist()
        raise UserError(_wrong_labels(file, wrong, classes))
    return ids


def _wrong_labels(file: Path, wrong: Iterable[int], classes: int) -> str:
    """Return the message about numbers in a mask that are neither classes nor void."""
    numbers = list(map(str, wrong))
    labels = ", ".join(numbers[:5]) + (", …" if len(numbers) > 5 else "")
    if file.name.endswith(LABEL_IDS_END) and classes == len(CLASSES):
        return (
            f"{file} has labels that are not label ids of Cityscapes: {labels}. They go from 0 to "
            "33."
        )
    if classes < len(CLASSES):
        return (
            f"{file} has labels that the model does not tell apart: {labels}. It has {classes} "
            f"classes, Cityscapes {len(CLASSES)}: leave model.num_classes empty."
        )
    return (
        f"{file} has labels that are not train ids: {labels}. They go from 0 to "
        f"{len(CLASSES) - 1}; {VOID} is for what belongs to no class."
    )


SPLITS = ("train", "val")
IMAGES, MASKS = "leftImg8bit", "gtFine"
_IMAGE_END = "_leftImg8bit.png"
WHERE = (
    "Cityscapes comes as leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from "
    "cityscapes-dataset.com; perfexp make-data makes a small set to try out."
)


@dataclass(frozen=True)
class Pair:
    """An image and its mask with a class per pixel."""

    image: Path
    mask: Path


@dataclass(frozen=True)
class SplitFiles:
    """A split's images and masks, by name CITY/CITY_SEQUENCE_FRAME.

    If an image has two masks, the mask with train ids is used.
    """

    images: dict[str, Path]
    masks: dict[str, Path]

    @property
    def pairs(self) -> list[Pair]:
        """Return images with a mask, sorted by name."""
        return [
            Pair(self.images[name], self.masks[name])
            for name in sorted(self.images.keys() & self.masks.keys())
        ]

    @property
    def without_mask(self) -> list[Path]:
        """Return images without a mask, sorted by name."""
        return [self.images[name] for name in sorted(self.images.keys() - self.masks.keys())]

    @property
    def without_image(self) -> list[Path]:
        """Return masks without an image, sorted by name."""
        return [self.masks[name] for name in sorted(self.masks.keys() - self.images.keys())]


def mask_of(root: Path, split: str, name: str, *, label_ids: bool = False) -> Path:
    """Return the mask path for an image name CITY/CITY_SEQUENCE_FRAME.

    `made.streets` writes there.

    Args:
        label_ids: whether the mask has label ids, not train ids.
    """
    return root / MASKS / split / (name + (LABEL_IDS_END if label_ids else TRAIN_IDS_END))


def image_of(root: Path, split: str, name: str) -> Path:
    """Return the path of an image with a name CITY/CITY_SEQUENCE_FRAME.

    `made.streets` writes there.
    """
    return root / IMAGES / split / (name + _IMAGE_END)


def first_missing(root: Path, split: str) -> Path | None:
    """Return the first missing folder of a split (`train` or `val`); None if all exist."""
    folders = (root, root / IMAGES, root / IMAGES / split, root / MASKS, root / MASKS / split)
    return next((folder for folder in folders if not folder.is_dir()), None)


def contents(root: Path, split: str) -> SplitFiles:
    """Return the images and masks of a split (`train` or `val`).

    `find_pairs` and `survey` begin with it.

    Raises:
        UserError: a folder is missing or unreadable; the message has the first one.
    """
    if (missing := first_missing(root, split)) is not None:
        problem = "data.root is not a folder" if missing == root else "The data lacks a folder"
        raise UserError(f"{problem}: {missing.absolute()}. {WHERE}")
    with listing():
        images, masks = root / IMAGES / split, root / MASKS / split
        return SplitFiles(
            _files(images, _IMAGE_END), _files(masks, LABEL_IDS_END) | _files(masks, TRAIN_IDS_END)
        )


def find_pairs(root: Path, split: str) -> list[Pair]:
    """Return the pairs of image and mask of a split (`train` or `val`).

    `Cityscapes` calls it for both splits when it is built.

    Raises:
        UserError: there are no images, or an image has no mask.
    """
    files = contents(root, split)
    if not files.images:
        raise UserError(
            f"There are no images CITY/*{_IMAGE_END} in {root / IMAGES / split}. {WHERE}"
        )
    if unmasked := files.without_mask:
        raise UserError(
            f"{len(unmasked)} of {len(files.images)} images in {root / IMAGES / split} have no "
            f"mask, the first is {unmasked[0].name}: it needs *{TRAIN_IDS_END} or *{LABEL_IDS_END} "
            f"in {root / MASKS / split / unmasked[0].parent.name}."
        )
    return files.pairs


def inspect(pair: Pair) -> str | None:
    """Read both files of a pair and return the problem in one line; None if the pair is usable.

    `survey` calls it for each pair.
    """
    try:
        image = read_image(pair.image, REPAIR_ADVICE)
        train_ids(
            read_mask(pair.mask), pair.mask, size=(image.height, image.width), classes=len(CLASSES)
        )
    except UserError as error:
        return str(error)
    return None


def sample(pairs: list[Pair], count: int) -> list[Pair]:
    """Return up to `count` pairs, evenly spread from the first to the last; 0 returns all.

    The doctor reads only some pairs of a large data set whole.
    """
    count = min(count or len(pairs), len(pairs))
    return [pairs[round(index)] for index in np.linspace(0, len(pairs) - 1, count)]


def survey(root: Path, count: int) -> dict[str, Any]:
    """Return facts about a data set for `perfexp doctor`, as JSON values.

    By split they have the numbers of images, masks and pairs, and the problems of the pairs that
    were read.

    Args:
        count: pairs to read per split; 0 for all.

    Raises:
        UserError: a folder is unreadable.
    """
    facts: dict[str, Any] = {
        "root": str(root),
        "where": WHERE,
        "made": (root / MADE).is_file(),
        "splits": {},
    }
    for split in SPLITS:
        if (missing := first_missing(root, split)) is not None:
            facts["splits"][split] = {"missing": str(missing)}
            continue
        files = contents(root, split)
        pairs = files.pairs
        read = sample(pairs, count)
        has_ids = [pair.mask.name.endswith(LABEL_IDS_END) for pair in pairs]
        facts["splits"][split] = {
            "missing": None,
            "images": len(files.images),
            "masks": len(files.masks),
            "pairs": len(pairs),
            "label_ids": sum(has_ids),
            "without_mask": list(map(str, files.without_mask[:1])),
            "without_image": list(map(str, files.without_image[:1])),
            "read": len(read),
            "problems": [problem for pair in read if (problem := inspect(pair)) is not None],
        }
    return facts


def _files(folder: Path, end: str) -> dict[str, Path]:
    """Return files with an ending, in a folder and its subfolders, by CITY/NAME or NAME without it.

    Hidden files are ignored.
    """
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    files = [file for entry in entries for file in (entry.iterdir() if entry.is_dir() else [entry])]
    return {
        file.relative_to(folder).as_posix().removesuffix(end): file
        for file in files
        if file.name.endswith(end) and not file.name.startswith(".")
    }
