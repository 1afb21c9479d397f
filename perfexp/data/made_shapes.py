"""Make small data sets that convolutions learn, in CIFAR-10's format or as files by class.

An image is a part of a photograph with a shape on it, in a place and in colors of its own. The class is the shape, so
the mean image of every class is the same, and a linear classifier has next to nothing to go by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from perfexp.data.cifar_files import FORMATS, SHAPE, Numbers
from perfexp.data.cityscapes_folder import MADE
from perfexp.data.made_streets import refuse_filled, sources_of
from perfexp.errors import UserError
from perfexp.host.files import write_atomically

_Grid = np.ndarray[Any, np.dtype[np.float64]]

_SIDE = SHAPE[1]
#: Sides of a part of a photograph, which becomes an image, and of a shape in it, in pixels of an image of `_SIDE`.
_PARTS, _SHAPES = (32, 128), (13, 19)
#: Side of an image in a file, in pixels.
FILE_SIDE = 256
#: Difference of a shape's color from the mean below it, in each channel and in either direction.
_CONTRAST = (60, 120)

#: The shapes, each the same when it is mirrored left to right, by x and y from -1 to 1.
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


def make(
    root: Path,
    *,
    photographs: Sequence[Path] | None,
    counts: dict[str, int],
    classes: int,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Write the data set into an empty or new folder, from photographs as `made_streets.make` takes them.

    Args:
        counts: numbers of images of `train` and `test`.
        classes: number of shapes, taken from `SHAPES` in order.
    """
    refuse_filled(root)
    sources = sources_of(photographs)
    style = next(style for style in FORMATS[10] if style.label_bytes)
    names = list(SHAPES)[:classes]
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / MADE, _about("perfexp make-data cifar10", seed, counts, sources))
        write_atomically(root / style.names[0], "\n".join([*names, ""]).encode())
        for number, files in enumerate((style.train, (style.test,))):
            [split, count] = list(counts.items())[number]
            records = _records([image for _, image in sources], count, names, np.random.default_rng([seed, number]))
            for index, file in enumerate(files):
                progress(f"{split} file {index + 1} of {len(files)}")
                write_atomically(root / file, records[index :: len(files)].tobytes())
    except OSError as error:
        raise UserError(f"{error.filename or root} can't be written: {error.strerror or error}.") from error


def make_folder(
    root: Path,
    *,
    photographs: Sequence[Path] | None,
    counts: dict[str, int],
    classes: int,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Write JPEG files `SPLIT/CLASS/NUMBER.jpg` into an empty or new folder; the arguments are as for `make`.

    Args:
        counts: numbers of images of `train` and `val`, at least one for each class.
    """
    refuse_filled(root)
    sources = sources_of(photographs)
    names = list(SHAPES)[:classes]
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / MADE, _about("perfexp make-data images", seed, counts, sources))
        for number, (split, count) in enumerate(counts.items()):
            for index in range(count):
                name, random = names[index % classes], np.random.default_rng([seed, number, index])
                pixels = draw(name, sources[random.integers(len(sources))][1], random, FILE_SIDE)
                file = root / split / name / f"{index:06}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
                progress(f"{split} {index + 1} of {count}")
    except OSError as error:
        raise UserError(f"{error.filename or root} can't be written: {error.strerror or error}.") from error


def _about(made_by: str, seed: int, counts: dict[str, int], sources: Sequence[tuple[str, Image.Image]]) -> bytes:
    about = {
        "made_by": made_by,
        "labels": "The shape that is drawn on each image.",
        "seed": seed,
        "images": counts,
        "photographs": [name for name, _ in sources],
    }
    return json.dumps(about, indent=1).encode() + b"\n"


def _records(photographs: list[Image.Image], count: int, names: list[str], random: np.random.Generator) -> Numbers:
    """Records of a label and an image each, every class as often as the others, in random order."""
    labels = random.permutation(count) % len(names)
    images = [
        draw(names[label], photographs[random.integers(len(photographs))], random).transpose(2, 0, 1).ravel()
        for label in labels
    ]
    return np.concatenate([labels[:, None].astype(np.uint8), np.stack(images)], axis=1)


def draw(name: str, photograph: Image.Image, random: np.random.Generator, length: int = _SIDE) -> Numbers:
    """A part of a photograph, uint8 (length, length, 3) for a multiple of 32, with a shape on it."""
    scale = length // _SIDE
    part = min(int(random.integers(scale * _PARTS[0], scale * _PARTS[1])), *photograph.size)
    left, top = (int(random.integers(side - part + 1)) for side in photograph.size)
    box = (left, top, left + part, top + part)
    image = np.array(photograph.resize((length, length), Image.Resampling.BILINEAR, box=box), np.float64)
    side = random.integers(scale * _SHAPES[0], scale * _SHAPES[1])
    down, across = random.integers(length - side + 1, size=2)
    y, x = np.meshgrid(np.linspace(-1, 1, side), np.linspace(-1, 1, side), indexing="ij")
    inside = SHAPES[name](x, y)
    below = image[down : down + side, across : across + side]
    contrast = random.uniform(*_CONTRAST, size=3) * random.choice([-1, 1], size=3)
    below[inside] = below.mean(axis=(0, 1)) + contrast
    return image.clip(0, 255).round().astype(np.uint8)
