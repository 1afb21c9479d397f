"""Find, decode and crop image files."""

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

#: Extensions of images, in lower case.
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"})

#: Mean and deviation of ImageNet, red, green, blue, for values from 0 to 1.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

#: Ranges of a random crop's share of the image, and of its width over its height before resizing
#: (Szegedy et al., "Going Deeper with Convolutions"; torchvision.transforms.RandomResizedCrop).
CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Split:
    """The images of training, or of evaluation.

    Attributes:
        labels: class of each image, or None without classes.
        classes: names of the classes; empty where there are none.
    """

    files: list[Path]
    labels: list[int] | None
    classes: list[str]


def find_split(folder: Path, root: Path) -> Split:
    """The images of a folder: by class where it has subfolders, otherwise without labels.

    Hidden files, and links that lead out of the root, are ignored.

    Raises:
        UserError: it holds no images, or one of its classes holds none.
        OSError: it cannot be read.
    """
    classes = sorted(entry.name for entry in _entries(folder, root) if entry.is_dir())
    if not classes:
        files = sorted(_find_pictures(folder, root))
        if not files:
            raise UserError(f"There are no pictures in {folder}. Looked for: {', '.join(sorted(EXTENSIONS))}.")
        return Split(files=files, labels=None, classes=[])
    files, labels = [], []
    for label, name in enumerate(classes):
        images = sorted(_find_pictures(folder / name, root))
        if not images:
            raise UserError(
                f"The class folder {folder / name} holds no pictures. Fill it or remove it: a folder is a class. "
                f"Looked for: {', '.join(sorted(EXTENSIONS))}."
            )
        files += images
        labels += [label] * len(images)
    return Split(files=files, labels=labels, classes=classes)


def read_picture(file: Path) -> Image.Image:
    """An image in RGB; raises `UserError` if it cannot be decoded."""
    try:
        with Image.open(file, formats=FORMATS) as picture:
            return picture.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # each of PIL's decoders has its own errors
        raise UserError(
            f"{file} can't be read as a picture: {error}. Repair it, or take it out of the folder."
        ) from error


def centre_crop(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize so that the image just covers a height and width, and crop its center."""
    return ImageOps.fit(picture, (size[1], size[0]), Image.Resampling.BILINEAR)


def random_crop(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Crop a random part, resize it to a height and width, and mirror half of them, by torch's generator."""
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
    """An RGB image as float32 (3, height, width), normalized by ImageNet's mean and deviation."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255)
    return pixels.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1)).contiguous()


def _find_pictures(folder: Path, root: Path) -> Iterator[Path]:
    for entry in _entries(folder, root):
        if entry.is_dir():
            if not entry.is_symlink():  # a link upwards would never end
                yield from _find_pictures(Path(entry.path), root)
        elif Path(entry.name).suffix.lower() in EXTENSIONS and entry.is_file():
            yield Path(entry.path)


def _entries(folder: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    """Entries of a folder, without hidden files and links that lead out of the root.

    `os.scandir`, unlike `Path.iterdir`, identifies links and folders without a file-system call for each of a million
    files.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root.resolve()):
                continue
            yield entry
