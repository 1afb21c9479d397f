"""Cityscapes' folder: its pairs of a picture and a mask by split, what the numbers in a mask mean, what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from perfexp.errors import UserError

#: What a model learns to tell apart, by train id.
CLASSES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
#: Train id of what belongs to no class.
VOID = 255
#: The label id of each class. Source: the table `labels` of cityscapesScripts, cityscapesscripts/helpers/labels.py. The
#: other ids up to the last are void; -1, license plates, is never drawn (preparation/json2labelImg.py).
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)

SPLITS = ("train", "val")
PICTURES, MASKS = "leftImg8bit", "gtFine"
_PICTURE_END, _TRAIN_IDS_END, _LABEL_IDS_END = (
    "_leftImg8bit.png",
    "_gtFine_labelTrainIds.png",
    "_gtFine_labelIds.png",
)
#: Neither a class nor void.
_UNKNOWN = 254
WHERE = (
    "Cityscapes comes as leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from cityscapes-dataset.com; "
    "perfexp make-data makes a small set to try out."
)
#: What the maker of small data sets leaves beside them.
MADE = "made.json"


@dataclass(frozen=True)
class Pair:
    """A picture and the mask that says what each of its pixels shows.

    Attributes:
        picture: file.
        mask: file, with train ids or with label ids.
    """

    picture: Path
    mask: Path

    @property
    def has_label_ids(self) -> bool:
        """Whether the mask holds label ids, which become train ids when it is read."""
        return self.mask.name.endswith(_LABEL_IDS_END)


@dataclass
class Contents:
    """What is in the two folders of a split.

    Attributes:
        pairs: pictures that have a mask, by name; of two masks the one with train ids.
        pictures: how many there are.
        masks: how many there are, of one picture once.
        without_mask: names of the pictures that have none.
        without_picture: names of the masks that have none.
    """

    pairs: list[Pair] = field(default_factory=list)
    pictures: int = 0
    masks: int = 0
    without_mask: list[Path] = field(default_factory=list)
    without_picture: list[Path] = field(default_factory=list)


def mask_of(root: Path, split: str, name: str, *, label_ids: bool = False) -> Path:
    """Where the mask of a picture is.

    Args:
        root: the data's folder.
        split: `train` or `val`.
        name: CITY/CITY_SEQUENCE_FRAME.
        label_ids: of the kind of mask.
    """
    return root / MASKS / split / (name + (_LABEL_IDS_END if label_ids else _TRAIN_IDS_END))


def picture_of(root: Path, split: str, name: str) -> Path:
    """Where a picture is; see `mask_of`."""
    return root / PICTURES / split / (name + _PICTURE_END)


def first_missing(root: Path, split: str) -> Path | None:
    """The first of a split's folders that is not there; None if they all are.

    Args:
        root: the data's folder.
        split: `train` or `val`.
    """
    folders = (root, root / PICTURES, root / PICTURES / split, root / MASKS, root / MASKS / split)
    return next((folder for folder in folders if not folder.is_dir()), None)


def contents(root: Path, split: str) -> Contents:
    """What a split holds.

    Args:
        root: the data's folder.
        split: `train` or `val`.

    Raises:
        UserError: a folder is missing, the first one of them is named, or can't be read.
    """
    if (missing := first_missing(root, split)) is not None:
        what = "data.root is no folder" if missing == root else "The data lacks a folder"
        raise UserError(f"{what}: {missing.absolute()}. {WHERE}")
    try:
        pictures = _names(root / PICTURES / split, _PICTURE_END)
        with_train_ids = _names(root / MASKS / split, _TRAIN_IDS_END)
        with_label_ids = _names(root / MASKS / split, _LABEL_IDS_END)
    except OSError as error:
        raise UserError(f"{error.filename} can't be read: {error.strerror}.") from error
    masks = with_train_ids | with_label_ids
    return Contents(
        pairs=[
            Pair(picture_of(root, split, name), mask_of(root, split, name, label_ids=name not in with_train_ids))
            for name in sorted(pictures & masks)
        ],
        pictures=len(pictures),
        masks=len(masks),
        without_mask=[picture_of(root, split, name) for name in sorted(pictures - masks)],
        without_picture=[
            mask_of(root, split, name, label_ids=name not in with_train_ids) for name in sorted(masks - pictures)
        ],
    )


def find_pairs(root: Path, split: str) -> list[Pair]:
    """The pairs of a split.

    Args:
        root: the data's folder.
        split: `train` or `val`.

    Raises:
        UserError: a folder is missing, there are no pictures, or one of them has no mask.
    """
    found = contents(root, split)
    if not found.pictures:
        raise UserError(f"There are no pictures CITY/*{_PICTURE_END} in {root / PICTURES / split}. {WHERE}")
    if found.without_mask:
        picture = found.without_mask[0]
        raise UserError(
            f"{len(found.without_mask)} of {found.pictures} pictures in {root / PICTURES / split} have no mask, the "
            f"first is {picture.name}: it needs *{_TRAIN_IDS_END} or *{_LABEL_IDS_END} in "
            f"{root / MASKS / split / picture.parent.name}."
        )
    return found.pairs


def read_mask(file: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A mask as it is, (height, width).

    Raises:
        UserError: it can't be decoded, or is no mask.
    """
    try:
        with Image.open(file) as mask:
            numbers = np.array(mask)
    except MemoryError:
        raise
    except Exception as error:  # each of PIL's decoders has errors of its own
        raise UserError(f"{file} can't be read as a mask: {error}. Get it again, or take it out.") from error
    if numbers.ndim != 2 or (numbers.dtype != np.uint8 and numbers.size and int(numbers.max()) > VOID):
        raise UserError(f"{file} is no mask: it takes one number from 0 to 255 for each pixel, not a colour.")
    return numbers.astype(np.uint8, copy=False)


def train_ids(
    mask: np.ndarray[Any, np.dtype[np.uint8]], pair: Pair, *, size: tuple[int, int], classes: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A mask whose numbers are train ids of so many classes, and void: what a loss takes without failing.

    Args:
        mask: as it was read, (height, width).
        pair: that it is of.
        size: height and width of the picture.
        classes: that the model tells apart; no more than there are.

    Raises:
        UserError: it has another size, or numbers that mean nothing.
    """
    if mask.shape != size:
        raise UserError(
            f"{pair.mask} is {' × '.join(map(str, mask.shape))}, its picture {' × '.join(map(str, size))} pixels: get "
            "both again."
        )
    ids = _TRAIN_ID_OF.take(mask) if pair.has_label_ids else mask
    # void is the last number, and the one after it is 0: twice through the mask without a copy of eight times its size
    if ids.size and int((ids + np.uint8(1)).max()) > classes:
        wrong = np.unique(mask[(ids >= classes) & (ids != VOID)]).tolist()
        raise UserError(_wrong_labels(pair, wrong, classes))
    return ids


def inspect(pair: Pair) -> str | None:
    """What is wrong with a pair; None if it can be used.

    Args:
        pair: both files are read whole.
    """
    try:
        size = check_picture(pair.picture)
        train_ids(read_mask(pair.mask), pair, size=size, classes=len(CLASSES))
    except UserError as error:
        return str(error)
    return None


def check_picture(file: Path) -> tuple[int, int]:
    """Height and width of a picture that can be decoded.

    Raises:
        UserError: it can't be.
    """
    try:
        with Image.open(file) as picture:
            picture.load()
            return picture.height, picture.width
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"{file} can't be read as a picture: {error}. Get it again, or take it out.") from error


def sample(pairs: list[Pair], count: int) -> list[Pair]:
    """So many pairs, evenly spread from the first to the last.

    Args:
        pairs: all of them.
        count: at most; 0 for all.
    """
    if count == 0 or count >= len(pairs):
        return pairs
    return [pairs[round(index * (len(pairs) - 1) / max(count - 1, 1))] for index in range(count)]


def survey(root: Path, count: int) -> dict[str, Any]:
    """What a diagnosis of the folder is made from: JSON values.

    Args:
        root: the data's folder.
        count: pairs of each split that are read whole; 0 for all.

    Raises:
        UserError: a folder can't be read.
    """
    facts: dict[str, Any] = {"root": str(root), "where": WHERE, "made": (root / MADE).is_file(), "splits": {}}
    for split in SPLITS:
        if (missing := first_missing(root, split)) is not None:
            facts["splits"][split] = {"missing": str(missing)}
            continue
        found = contents(root, split)
        read = sample(found.pairs, count)
        problems = [problem for pair in read if (problem := inspect(pair)) is not None]
        facts["splits"][split] = {
            "missing": None,
            "pictures": found.pictures,
            "masks": found.masks,
            "pairs": len(found.pairs),
            "label_ids": sum(pair.has_label_ids for pair in found.pairs),
            "without_mask": [str(file) for file in found.without_mask[:1]],
            "without_picture": [str(file) for file in found.without_picture[:1]],
            "read": len(read),
            "problems": problems,
        }
    return facts


def _wrong_labels(pair: Pair, wrong: Iterable[int], classes: int) -> str:
    told = list(map(str, wrong))
    labels = ", ".join(told[:5]) + (", …" if len(told) > 5 else "")
    if pair.has_label_ids and classes == len(CLASSES):
        return f"{pair.mask} has labels that are no label ids of Cityscapes: {labels}. They go from 0 to 33."
    if classes < len(CLASSES):
        return (
            f"{pair.mask} has labels that the model does not tell apart: {labels}. It has {classes} classes, "
            f"Cityscapes {len(CLASSES)}: leave model.num_classes empty."
        )
    return (
        f"{pair.mask} has labels that are no train ids: {labels}. They go from 0 to {len(CLASSES) - 1}; {VOID} is for "
        "what belongs to no class."
    )


def _names(folder: Path, end: str) -> set[str]:
    """CITY/NAME of the files with an ending in the folders of a folder, and NAME of those in itself."""
    names = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                with os.scandir(entry.path) as files:
                    names |= {f"{entry.name}/{name}" for name in _stems(files, end)}
            else:
                names |= set(_stems([entry], end))
    return names


def _stems(entries: Iterable[os.DirEntry[str]], end: str) -> Iterable[str]:
    return (entry.name.removesuffix(end) for entry in entries if entry.name.endswith(end) and entry.name[0] != ".")


def _train_id_of() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The train id of each of 256 label ids."""
    table = np.full(256, _UNKNOWN, np.uint8)
    table[: max(LABEL_IDS) + 1] = VOID
    table[VOID] = VOID
    table[list(LABEL_IDS)] = np.arange(len(LABEL_IDS))
    return table


_TRAIN_ID_OF = _train_id_of()
