"""Make a small data set in the binary format of CIFAR-10 that convolutions learn, and pixels alone do not tell apart.

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
#: Sides of a part of a photograph, which becomes an image, and of a shape in it, in pixels.
_PARTS, _SHAPES = (32, 128), (13, 19)
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
    about = {
        "made_by": "perfexp make-data cifar10",
        "labels": "The shape that is drawn on each image.",
        "seed": seed,
        "images": counts,
        "photographs": [name for name, _ in sources],
    }
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_atomically(root / MADE, json.dumps(about, indent=1).encode() + b"\n")
        write_atomically(root / style.names[0], "\n".join([*names, ""]).encode())
        for number, files in enumerate((style.train, (style.test,))):
            [split, count] = list(counts.items())[number]
            records = _records([image for _, image in sources], count, names, np.random.default_rng([seed, number]))
            for index, file in enumerate(files):
                progress(f"{split} file {index + 1} of {len(files)}")
                write_atomically(root / file, records[index :: len(files)].tobytes())
    except OSError as error:
        raise UserError(f"{error.filename or root} can't be written: {error.strerror or error}.") from error


def _records(photographs: list[Image.Image], count: int, names: list[str], random: np.random.Generator) -> Numbers:
    """Records of a label and an image each, every class as often as the others, in random order."""
    labels = random.permutation(count) % len(names)
    images = [
        draw(names[label], photographs[random.integers(len(photographs))], random).transpose(2, 0, 1).ravel()
        for label in labels
    ]
    return np.concatenate([labels[:, None].astype(np.uint8), np.stack(images)], axis=1)


def draw(name: str, photograph: Image.Image, random: np.random.Generator) -> Numbers:
    """A part of a photograph, uint8 (32, 32, 3), with a shape on it."""
    part = min(int(random.integers(*_PARTS)), *photograph.size)
    left, top = (int(random.integers(length - part + 1)) for length in photograph.size)
    box = (left, top, left + part, top + part)
    image = np.array(photograph.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, box=box), np.float64)
    side = random.integers(*_SHAPES)
    down, across = random.integers(_SIDE - side + 1, size=2)
    y, x = np.meshgrid(np.linspace(-1, 1, side), np.linspace(-1, 1, side), indexing="ij")
    inside = SHAPES[name](x, y)
    below = image[down : down + side, across : across + side]
    contrast = random.uniform(*_CONTRAST, size=3) * random.choice([-1, 1], size=3)
    below[inside] = below.mean(axis=(0, 1)) + contrast
    return image.clip(0, 255).round().astype(np.uint8)
