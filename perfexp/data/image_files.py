"""Pictures: finding them in a folder, decoding them, cutting them to a size."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from perfexp.data import FORMATS
from perfexp.errors import UserError

#: Compared in lower case.
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"})

#: Of ImageNet, red, green, blue, for values from 0 to 1.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

#: The part of the picture that a random crop covers, and its width over its height, before it is resized
#: (Szegedy et al., "Going Deeper with Convolutions"; torchvision.transforms.RandomResizedCrop).
CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Split:
    """The pictures of training, or of evaluation.

    Attributes:
        files: all of them.
        labels: the class of each, or None where they have none.
        classes: names of the classes; empty where there are none.
    """

    files: list[Path]
    labels: list[int] | None
    classes: list[str]


def find_split(folder: Path, root: Path) -> Split:
    """The pictures of a folder: by class where it has subfolders, without labels where it has none.

    Hidden files, and links that lead out of the root, are passed over.

    Args:
        folder: one that exists.
        root: the data's folder, this one or one above it.

    Raises:
        UserError: it holds no pictures, or one of its classes holds none.
        OSError: the file system does not let it be read.
    """
    classes = sorted(entry.name for entry in _entries(folder, root) if entry.is_dir())
    if not classes:
        files = sorted(_find_pictures(folder, root))
        if not files:
            raise UserError(f"There are no pictures in {folder}. Looked for: {', '.join(sorted(EXTENSIONS))}.")
        return Split(files=files, labels=None, classes=[])
    files, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(_find_pictures(folder / name, root))
        if not found:
            raise UserError(
                f"The class folder {folder / name} holds no pictures. Fill it or remove it: a folder is a class. "
                f"Looked for: {', '.join(sorted(EXTENSIONS))}."
            )
        files += found
        labels += [label] * len(found)
    return Split(files=files, labels=labels, classes=classes)


def read_picture(file: Path) -> Image.Image:
    """A picture in RGB.

    Raises:
        UserError: it can't be decoded.
    """
    try:
        with Image.open(file, formats=FORMATS) as picture:
            return picture.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # each of PIL's decoders has errors of its own
        raise UserError(
            f"{file} can't be read as a picture: {error}. Repair it, or take it out of the folder."
        ) from error


def centre_crop(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize so that the picture just covers a height and width, and keep its middle."""
    return ImageOps.fit(picture, (size[1], size[0]), Image.Resampling.BILINEAR)


def random_crop(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Cut out a random part, resize it to a height and width, and mirror half of them; drawn from torch's generator."""
    area = picture.width * picture.height
    fraction, ratio, across, down, flip = torch.rand(5).tolist()
    part = area * (CROP_AREA[0] + fraction * (CROP_AREA[1] - CROP_AREA[0]))
    shape = math.exp(math.log(CROP_RATIO[0]) + ratio * math.log(CROP_RATIO[1] / CROP_RATIO[0]))
    width = min(math.sqrt(part * shape), picture.width)
    height = min(math.sqrt(part / shape), picture.height)
    left, top = across * (picture.width - width), down * (picture.height - height)
    box = (left, top, left + width, top + height)
    cut = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
    return ImageOps.mirror(cut) if flip < 0.5 else cut


def to_tensor(picture: Image.Image) -> torch.Tensor:
    """An RGB picture as float32 (3, height, width), with ImageNet's mean and deviation taken out."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255)
    return pixels.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1)).contiguous()


def _find_pictures(folder: Path, root: Path) -> Iterator[Path]:
    """All pictures in a folder and below."""
    for entry in _entries(folder, root):
        if entry.is_dir():
            if not entry.is_symlink():  # one that leads up would never end
                yield from _find_pictures(Path(entry.path), root)
        elif Path(entry.name).suffix.lower() in EXTENSIONS and entry.is_file():
            yield Path(entry.path)


def _entries(folder: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    """What a folder holds, without hidden files and without links that lead out of the root.

    Not `Path.iterdir`: a million files are told from links and folders without asking the file system for each.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root.resolve()):
                continue
            yield entry
