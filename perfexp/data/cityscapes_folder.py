"""The folder of Cityscapes: its pairs of an image and a mask by split, and its problems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfexp.data.cityscapes_masks import AGAIN, CLASSES, LABEL_IDS_END, TRAIN_IDS_END, read_mask, train_ids
from perfexp.data.image_files import read_image
from perfexp.errors import UserError

SPLITS = ("train", "val")
IMAGES, MASKS = "leftImg8bit", "gtFine"
_IMAGE_END = "_leftImg8bit.png"
WHERE = (
    "Cityscapes comes as leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from cityscapes-dataset.com; "
    "perfexp make-data makes a small set to try out."
)
#: File that marks a data set made by `perfexp make-data`.
MADE = "made.json"


@dataclass(frozen=True)
class Pair:
    """An image and its mask, with the class of each pixel."""

    image: Path
    mask: Path

    @property
    def has_label_ids(self) -> bool:
        """Whether the mask holds label ids, which are converted to train ids when it is read."""
        return self.mask.name.endswith(LABEL_IDS_END)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of the two folders of a split; `masks` counts the images that have a mask file.

    Pairs are in the order of their names; of two masks of an image they have the one with train ids.
    """

    pairs: list[Pair]
    images: int
    masks: int
    without_mask: list[Path]
    without_image: list[Path]


def mask_of(root: Path, split: str, name: str, *, label_ids: bool = False) -> Path:
    """Path of the mask of an image with the name CITY/CITY_SEQUENCE_FRAME."""
    return root / MASKS / split / (name + (LABEL_IDS_END if label_ids else TRAIN_IDS_END))


def image_of(root: Path, split: str, name: str) -> Path:
    """Path of an image; see `mask_of`."""
    return root / IMAGES / split / (name + _IMAGE_END)


def first_missing(root: Path, split: str) -> Path | None:
    """The first missing folder of a split (`train` or `val`); None if all exist."""
    folders = (root, root / IMAGES, root / IMAGES / split, root / MASKS, root / MASKS / split)
    return next((folder for folder in folders if not folder.is_dir()), None)


def contents(root: Path, split: str) -> Contents:
    """Contents of a split (`train` or `val`); raises `UserError` with the first missing or unreadable folder."""
    if (missing := first_missing(root, split)) is not None:
        problem = "data.root is not a folder" if missing == root else "The data lacks a folder"
        raise UserError(f"{problem}: {missing.absolute()}. {WHERE}")
    try:
        ends = (TRAIN_IDS_END, LABEL_IDS_END)
        images = _names(root / IMAGES / split, _IMAGE_END)
        with_train_ids, with_label_ids = (_names(root / MASKS / split, end) for end in ends)
    except OSError as error:
        raise UserError(f"{error.filename} can't be read: {error.strerror}.") from error
    masks = {name: mask_of(root, split, name, label_ids=True) for name in with_label_ids}
    masks |= {name: mask_of(root, split, name) for name in with_train_ids}
    return Contents(
        pairs=[Pair(image_of(root, split, name), masks[name]) for name in sorted(images & masks.keys())],
        images=len(images),
        masks=len(masks),
        without_mask=[image_of(root, split, name) for name in sorted(images - masks.keys())],
        without_image=[masks[name] for name in sorted(masks.keys() - images)],
    )


def find_pairs(root: Path, split: str) -> list[Pair]:
    """The pairs of a split (`train` or `val`); raises `UserError` unless there are images, each with a mask."""
    files = contents(root, split)
    if not files.images:
        raise UserError(f"There are no images CITY/*{_IMAGE_END} in {root / IMAGES / split}. {WHERE}")
    if files.without_mask:
        image = files.without_mask[0]
        raise UserError(
            f"{len(files.without_mask)} of {files.images} images in {root / IMAGES / split} have no mask, the "
            f"first is {image.name}: it needs *{TRAIN_IDS_END} or *{LABEL_IDS_END} in "
            f"{root / MASKS / split / image.parent.name}."
        )
    return files.pairs


def inspect(pair: Pair) -> str | None:
    """The problem of a pair, whose files are read whole; None if it can be used."""
    try:
        image = read_image(pair.image, AGAIN)
        train_ids(read_mask(pair.mask), pair.mask, size=(image.height, image.width), classes=len(CLASSES))
    except UserError as error:
        return str(error)
    return None


def sample(pairs: list[Pair], count: int) -> list[Pair]:
    """At most `count` pairs, evenly spread from the first to the last; 0 for all."""
    if count == 0 or count >= len(pairs):
        return pairs
    return [pairs[round(index * (len(pairs) - 1) / max(count - 1, 1))] for index in range(count)]


def survey(root: Path, count: int) -> dict[str, Any]:
    """Facts for a diagnosis as JSON values, `count` pairs of each split read whole (0: all); raises `UserError`."""
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
            "images": files.images,
            "masks": files.masks,
            "pairs": len(files.pairs),
            "label_ids": sum(pair.has_label_ids for pair in files.pairs),
            "without_mask": [str(file) for file in files.without_mask[:1]],
            "without_image": [str(file) for file in files.without_image[:1]],
            "read": len(read),
            "problems": problems,
        }
    return facts


def _names(folder: Path, end: str) -> set[str]:
    """CITY/NAME of files with an ending in subfolders, and NAME of those in the folder itself, without hidden ones."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    files = [file for entry in entries for file in (entry.iterdir() if entry.is_dir() else [entry])]
    shown = [file.relative_to(folder).as_posix() for file in files if not file.name.startswith(".")]
    return {name.removesuffix(end) for name in shown if name.endswith(end)}
