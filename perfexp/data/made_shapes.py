"""Small data sets that convolutions can learn, in CIFAR-10's format or as files by class.

An image is part of a photograph with a shape on it, in a random place and color. The class is the
shape. All classes have the same mean image, so a linear classifier learns next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from perfexp.data.cifar_files import FORMATS, SHAPE, Numbers
from perfexp.data.made import Photograph, Recipe, photographs_in
from perfexp.errors import UserError

_Grid = np.ndarray[Any, np.dtype[np.float64]]

_SIDE = SHAPE[1]
#: Sides of the photograph part that becomes an image, and of a shape in it, in pixels of an image
#: with side `_SIDE`.
_PARTS, _SHAPES = (32, 128), (13, 19)
#: Side of an image file, in pixels.
_FILE_SIDE = 256
#: Difference between a shape's color and the mean below it, per channel, up or down.
_CONTRAST = (60, 120)

#: Shapes by x and y from -1 to 1. Each is symmetric from left to right.
SHAPES: dict[str, Callable[[_Grid, _Grid], Any]] = {
    "disc": lambda x, y: x**2 + y**2 < 0.9,
    "ring": lambda x, y: abs(np.hypot(x, y) - 0.75) < 0.22,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    "frame": lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.75) < 0.2,
    "triangle": lambda x, y: abs(x) < (y + 1) / 2,
    "plus": lambda x, y: np.minimum(abs(x), abs(y)) < 0.22,
    "cross": lambda x, y: abs(abs(x) - abs(y)) < 0.3,
    "rows": lambda x, y: np.floor((y + 1) * 2.5) % 2 == 0,
    "columns": lambda x, y: np.floor((x + 1) * 2.5) % 2 == 0,
    "checkers": lambda x, y: (np.floor((x + 1) * 2.5) + np.floor((y + 1) * 2.5)) % 2 == 0,
}


def cifar(*, photographs: Path | None, train: int, test: int, classes: int, seed: int) -> Recipe:
    """Return a recipe for 32 × 32 images in CIFAR-10's binary format; see `folder`."""
    sources, names = photographs_in(photographs), list(SHAPES)[:classes]
    *training, evaluation, meta = FORMATS[10][0].files
    if train < len(training):
        raise UserError(
            f"--train {train}: at least {len(training)}, one for each file of CIFAR-10."
        )

    def files() -> Iterator[tuple[str, bytes]]:
        yield meta, "\n".join([*names, ""]).encode()
        for number, (split, count) in enumerate(((training, train), ([evaluation], test))):
            images = _images(sources, names, count, (seed, number), SHAPE[1])
            records = np.stack(
                [np.append(np.uint8(label), pixels.transpose(2, 0, 1)) for label, pixels in images]
            )
            for file, part in zip(split, np.array_split(records, len(split)), strict=True):
                yield file, part.tobytes()

    return Recipe(
        about=_about("cifar10", seed, {"train": train, "test": test}, sources),
        files=files(),
        count=len(training) + 2,
        contents=f"{train} images of training and {test} of evaluation, {classes} classes, in "
        "CIFAR-10's format",
        remark="It stands in for CIFAR-10, and its accuracies are its own.",
        command="python -m perfexp experiment=cifar10 epochs=5",
    )


def folder(*, photographs: Path | None, train: int, val: int, classes: int, seed: int) -> Recipe:
    """Return a recipe for JPEG files `SPLIT/CLASS/NUMBER.jpg`.

    Args:
        photographs: folder of photographs; None for scikit-learn's.
        train: number of training images, at least one per class.
        val: number of evaluation images, at least one per class.
        classes: number of shapes, taken from `SHAPES` in order.
    """
    sources, names, counts = (
        photographs_in(photographs),
        list(SHAPES)[:classes],
        {"train": train, "val": val},
    )
    for option, count in counts.items():
        if count < classes:
            raise UserError(
                f"--{option} {count}: at least {classes}, one for each class (--classes)."
            )

    def files() -> Iterator[tuple[str, Image.Image]]:
        for number, (split, count) in enumerate(counts.items()):
            for index, (label, pixels) in enumerate(
                _images(sources, names, count, (seed, number), _FILE_SIDE)
            ):
                yield f"{split}/{names[label]}/{index:06}.jpg", Image.fromarray(pixels)

    shape = f"{_FILE_SIDE} × {_FILE_SIDE}"
    return Recipe(
        about=_about("images", seed, counts, sources),
        files=files(),
        count=train + val,
        contents=f"{train} images of training and {val} of evaluation, {shape}, {classes} classes",
        command="python -m perfexp model=resnet18 mode=train epochs=1 data=images",
    )


def _about(
    layout: str, seed: int, counts: dict[str, int], sources: list[Photograph]
) -> dict[str, Any]:
    return {
        "made_by": f"perfexp make-data {layout}",
        "labels": "The shape that is drawn on each image.",
        "seed": seed,
        "images": counts,
        "photographs": [name for name, _ in sources],
    }


def _images(
    sources: list[Photograph], names: list[str], count: int, seed: tuple[int, ...], side: int
) -> Iterator[tuple[int, Numbers]]:
    """Yield labels and images uint8 (side, side, 3), with equally frequent classes."""
    for index in range(count):
        label, random = index % len(names), np.random.default_rng([*seed, index])
        yield label, _draw(names[label], sources[random.integers(len(sources))][1], random, side)


def _draw(name: str, photograph: Image.Image, random: np.random.Generator, length: int) -> Numbers:
    """Return part of a photograph with a shape on it, uint8 (length, length, 3).

    `length` is a multiple of 32.
    """
    scale = length // _SIDE
    part = min(int(random.integers(scale * _PARTS[0], scale * _PARTS[1])), *photograph.size)
    left, top = (int(random.integers(side - part + 1)) for side in photograph.size)
    box = (left, top, left + part, top + part)
    image = np.array(
        photograph.resize((length, length), Image.Resampling.BILINEAR, box=box), np.float64
    )
    side = random.integers(scale * _SHAPES[0], scale * _SHAPES[1])
    down, across = random.integers(length - side + 1, size=2)
    y, x = np.meshgrid(np.linspace(-1, 1, side), np.linspace(-1, 1, side), indexing="ij")
    inside = SHAPES[name](x, y)
    below = image[down : down + side, across : across + side]
    contrast = random.uniform(*_CONTRAST, size=3) * random.choice([-1, 1], size=3)
    below[inside] = below.mean(axis=(0, 1)) + contrast
    return image.clip(0, 255).round().astype(np.uint8)
