"""Read and check the masks of Cityscapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from perfexp.data.image_files import decoding
from perfexp.errors import UserError

Mask = np.ndarray[Any, np.dtype[np.uint8]]

#: Names of the classes by train id.
CLASSES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
#: Train id of pixels without a class.
VOID = 255
#: The label id of each class. Source: the table `labels` of cityscapesScripts, cityscapesscripts/helpers/labels.py. The
#: other ids up to the last are void; -1, license plates, is never drawn (preparation/json2labelImg.py).
LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)

#: Advice for files that cannot be decoded.
AGAIN = "Get it again, or take it out."
#: Endings of files with train ids and with label ids.
TRAIN_IDS_END, LABEL_IDS_END = "_gtFine_labelTrainIds.png", "_gtFine_labelIds.png"

#: The train id of each label id; 254, neither a class nor void, for unknown ones.
_TRAIN_ID_OF = np.full(256, 254, np.uint8)
_TRAIN_ID_OF[[*range(max(LABEL_IDS) + 1), VOID]] = VOID
_TRAIN_ID_OF[list(LABEL_IDS)] = np.arange(len(LABEL_IDS))


def read_mask(file: Path) -> Mask:
    """A mask as stored, (height, width); raises `UserError` if it cannot be decoded, or is not a mask."""
    with decoding(file, "a mask", AGAIN) as mask:
        numbers = np.array(mask)
    if numbers.ndim != 2 or (numbers.dtype != np.uint8 and numbers.size and int(numbers.max()) > VOID):
        raise UserError(f"{file} is not a mask: it needs one number from 0 to 255 per pixel, not a color.")
    return numbers.astype(np.uint8, copy=False)


def train_ids(mask: Mask, file: Path, *, size: tuple[int, int], classes: int) -> Mask:
    """A mask (height, width) with train ids and void only, which a loss accepts.

    The name of its file marks label ids, which are converted. Raises `UserError` for another size or unknown numbers.
    """
    if mask.shape != size:
        raise UserError(
            f"{file} is {' × '.join(map(str, mask.shape))}, its image {' × '.join(map(str, size))} pixels: get "
            "both again."
        )
    ids = _TRAIN_ID_OF.take(mask) if file.name.endswith(LABEL_IDS_END) else mask
    # void + 1 wraps to 0 in uint8, which finds the largest class without a copy of eight times the size
    if ids.size and int((ids + np.uint8(1)).max()) > classes:
        wrong = np.unique(mask[(ids >= classes) & (ids != VOID)]).tolist()
        raise UserError(_wrong_labels(file, wrong, classes))
    return ids


def _wrong_labels(file: Path, wrong: Iterable[int], classes: int) -> str:
    numbers = list(map(str, wrong))
    labels = ", ".join(numbers[:5]) + (", …" if len(numbers) > 5 else "")
    if file.name.endswith(LABEL_IDS_END) and classes == len(CLASSES):
        return f"{file} has labels that are not label ids of Cityscapes: {labels}. They go from 0 to 33."
    if classes < len(CLASSES):
        return (
            f"{file} has labels that the model does not tell apart: {labels}. It has {classes} classes, "
            f"Cityscapes {len(CLASSES)}: leave model.num_classes empty."
        )
    return (
        f"{file} has labels that are not train ids: {labels}. They go from 0 to {len(CLASSES) - 1}; {VOID} is for "
        "what belongs to no class."
    )
