"""The folder of Cityscapes: its pairs of an image and a mask by split, and its problems."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from perfexp.data import FORMATS
from perfexp.data.cityscapes_masks import CLASSES, LABEL_IDS_END, TRAIN_IDS_END, read_mask, train_ids
from perfexp.errors import UserError

SPLITS = ("train", "val")
PICTURES, MASKS = "leftImg8bit", "gtFine"
_PICTURE_END = "_leftImg8bit.png"
WHERE = (
    "Cityscapes comes as leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from cityscapes-dataset.com; "
    "perfexp make-data makes a small set to try out."
)
#: File that marks a data set made by `perfexp make-data`.
MADE = "made.json"


@dataclass(frozen=True)
class Pair:
    """An image and its mask, with the class of each pixel."""

    picture: Path
    mask: Path

    @property
    def has_label_ids(self) -> bool:
        """Whether the mask holds label ids, which are converted to train ids when it is read."""
        return self.mask.name.endswith(LABEL_IDS_END)


@dataclass
class Contents:
    """Contents of the two folders of a split.

    Attributes:
        pairs: images with a mask, by name; of two masks the one with train ids.
        masks: number of images that have a mask file.
    """

    pairs: list[Pair] = field(default_factory=list)
    pictures: int = 0
    masks: int = 0
    without_mask: list[Path] = field(default_factory=list)
    without_picture: list[Path] = field(default_factory=list)


def mask_of(root: Path, split: str, name: str, *, label_ids: bool = False) -> Path:
    """Path of an image's mask.

    Args:
        name: CITY/CITY_SEQUENCE_FRAME.
    """
    return root / MASKS / split / (name + (LABEL_IDS_END if label_ids else TRAIN_IDS_END))


def picture_of(root: Path, split: str, name: str) -> Path:
    """Path of an image; see `mask_of`."""
    return root / PICTURES / split / (name + _PICTURE_END)


def first_missing(root: Path, split: str) -> Path | None:
    """The first missing folder of a split (`train` or `val`); None if all exist."""
    folders = (root, root / PICTURES, root / PICTURES / split, root / MASKS, root / MASKS / split)
    return next((folder for folder in folders if not folder.is_dir()), None)


def contents(root: Path, split: str) -> Contents:
    """Contents of a split (`train` or `val`).

    Raises:
        UserError: a folder is missing, of which the first is named, or cannot be read.
    """
    if (missing := first_missing(root, split)) is not None:
        problem = "data.root is not a folder" if missing == root else "The data lacks a folder"
        raise UserError(f"{problem}: {missing.absolute()}. {WHERE}")
    try:
        pictures = _names(root / PICTURES / split, _PICTURE_END)
        with_train_ids = _names(root / MASKS / split, TRAIN_IDS_END)
        with_label_ids = _names(root / MASKS / split, LABEL_IDS_END)
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
    """The pairs of a split (`train` or `val`).

    Raises:
        UserError: a folder is missing, there are no images, or one of them has no mask.
    """
    files = contents(root, split)
    if not files.pictures:
        raise UserError(f"There are no pictures CITY/*{_PICTURE_END} in {root / PICTURES / split}. {WHERE}")
    if files.without_mask:
        picture = files.without_mask[0]
        raise UserError(
            f"{len(files.without_mask)} of {files.pictures} pictures in {root / PICTURES / split} have no mask, the "
            f"first is {picture.name}: it needs *{TRAIN_IDS_END} or *{LABEL_IDS_END} in "
            f"{root / MASKS / split / picture.parent.name}."
        )
    return files.pairs


def inspect(pair: Pair) -> str | None:
    """The problem of a pair, whose files are read whole; None if it can be used."""
    try:
        size = check_picture(pair.picture)
        train_ids(read_mask(pair.mask), pair.mask, size=size, classes=len(CLASSES))
    except UserError as error:
        return str(error)
    return None


def check_picture(file: Path) -> tuple[int, int]:
    """Height and width of an image; raises `UserError` if it cannot be decoded."""
    try:
        with Image.open(file, formats=FORMATS) as picture:
            picture.load()
            return picture.height, picture.width
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"{file} can't be read as a picture: {error}. Get it again, or take it out.") from error


def sample(pairs: list[Pair], count: int) -> list[Pair]:
    """At most `count` pairs, evenly spread from the first to the last; 0 for all."""
    if count == 0 or count >= len(pairs):
        return pairs
    return [pairs[round(index * (len(pairs) - 1) / max(count - 1, 1))] for index in range(count)]


def survey(root: Path, count: int) -> dict[str, Any]:
    """Facts for a diagnosis of the folder, as JSON values, with `count` pairs of each split read whole (0: all).

    Raises:
        UserError: a folder cannot be read.
    """
    facts: dict[str, Any] = {"root": str(root), "where": WHERE, "made": (root / MADE).is_file(), "splits": {}}
    for split in SPLITS:
        if (missing := first_missing(root, split)) is not None:
            facts["splits"][split] = {"missing": str(missing)}
            continue
        files = contents(root, split)
        read = sample(files.pairs, count)
        problems = [problem for pair in read if (problem := inspect(pair)) is not None]
        facts["splits"][split] = {
            "missing": None,
            "pictures": files.pictures,
            "masks": files.masks,
            "pairs": len(files.pairs),
            "label_ids": sum(pair.has_label_ids for pair in files.pairs),
            "without_mask": [str(file) for file in files.without_mask[:1]],
            "without_picture": [str(file) for file in files.without_picture[:1]],
            "read": len(read),
            "problems": problems,
        }
    return facts


def _names(folder: Path, end: str) -> set[str]:
    """CITY/NAME of the files with an ending in subfolders, and NAME of those in the folder itself."""
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
