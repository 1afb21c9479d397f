"""A small data set in Cityscapes' layout, written file by file, for tests anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from perfexp.data.cityscapes_folder import image_of, mask_of

SIZE = (32, 64)
PER_SPLIT = {"train": 6, "val": 3}


def stem(index: int) -> str:
    return f"ulm/ulm_{index:06}_000019"


def write_pair(
    root: Path, split: str, index: int, *, size: tuple[int, int] = SIZE, label_ids: bool = False
) -> None:
    """Noise, and a mask with bands of all classes and void; as label ids if wanted."""
    random = np.random.default_rng([index, *size])
    picture = image_of(root, split, stem(index))
    mask = mask_of(root, split, stem(index), label_ids=label_ids)
    for file in (picture, mask):
        file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(picture)
    numbers = (np.arange(size[1]) + index) % (34 if label_ids else 20)
    bands = np.broadcast_to(numbers, size).astype(np.uint8)
    Image.fromarray(
        bands if label_ids else np.where(bands == 19, 255, bands).astype(np.uint8)
    ).save(mask)


def write_streets(root: Path, *, size: tuple[int, int] = SIZE, label_ids: bool = False) -> Path:
    for split, count in PER_SPLIT.items():
        for index in range(count):
            write_pair(root, split, index, size=size, label_ids=label_ids)
    return root


def change_mask(file: Path, value: int) -> None:
    with Image.open(file) as mask:
        numbers = np.array(mask)
    numbers[0, 0] = value
    Image.fromarray(numbers).save(file)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
