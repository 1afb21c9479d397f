"""A small data set in Cityscapes' layout from any photographs, with artificial masks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from perfexp.data.cityscapes_folder import CLASSES, VOID, Mask, image_of, mask_of
from perfexp.data.made import Photograph, Recipe, photographs_in
from perfexp.errors import UserError
from perfexp.records.sizes import parse_sizes

#: Limits on the sides of an image, in pixels.
_SMALLEST, _LARGEST = 32, 16384
#: Name of the only city.
_CITY = "made"
#: Minimum crop size, relative to the largest crop that fits into its photograph.
_SMALLEST_CROP = 0.5
#: Image reduction for masks, since regions of a few pixels are meaningless.
_COARSER = 4
#: Void share at the lower edge of an image, like the car's hood in Cityscapes.
_VOID_BELOW = 0.05
_NO_TRUTH = (
    "The masks are derived from colors, and are not ground truth. Use them for trials and timing "
    "only."
)


def recipe(*, photographs: Path | None, size: str, train: int, val: int, seed: int) -> Recipe:
    """Return a recipe for photograph crops and masks.

    Args:
        photographs: folder of photographs; None for scikit-learn's.
        size: height and width, for example `1024x2048`.
        train: number of training images.
        val: number of evaluation images.
    """
    [(height, width)] = parse_sizes(size)
    if not (_SMALLEST <= height <= _LARGEST and _SMALLEST <= width <= _LARGEST):
        raise UserError(f"--size {size}: from {_SMALLEST} to {_LARGEST} pixels.")
    sources, counts = photographs_in(photographs), {"train": train, "val": val}
    return Recipe(
        about={
            "made_by": "perfexp make-data",
            "masks": _NO_TRUTH,
            "seed": seed,
            "size": [height, width],
            "images": counts,
            "photographs": [name for name, _ in sources],
        },
        files=_files(sources, counts, (height, width), seed),
        count=2 * (train + val),
        contents=f"{train} images of training and {val} of evaluation, {height} × {width}",
        remark=_NO_TRUTH,
        command="perfexp doctor",
    )


def _files(
    sources: list[Photograph], counts: dict[str, int], size: tuple[int, int], seed: int
) -> Iterator[tuple[str, Image.Image]]:
    for number, (split, count) in enumerate(counts.items()):
        for index in range(count):
            name, random = (
                f"{_CITY}/{_CITY}_{index:06}_000019",
                np.random.default_rng([seed, number, index]),
            )
            image = _crop(sources[index % len(sources)][1], size, random)
            yield str(image_of(Path(), split, name)), image
            yield str(mask_of(Path(), split, name)), Image.fromarray(_regions(image))


def _crop(
    photograph: Image.Image, size: tuple[int, int], random: np.random.Generator
) -> Image.Image:
    """Return a random part of an RGB photograph, resized, and mirrored half of the time."""
    largest = min(photograph.height / size[0], photograph.width / size[1])
    part = largest * random.uniform(_SMALLEST_CROP, 1)
    height, width = part * size[0], part * size[1]
    left, top = (
        random.uniform(0, photograph.width - width),
        random.uniform(0, photograph.height - height),
    )
    cut = photograph.resize(
        (size[1], size[0]), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height)
    )
    if random.random() < 0.5:
        return ImageOps.mirror(cut)
    return cut


def _regions(image: Image.Image) -> Mask:
    """Return a mask with regions of similar color, with void at the lower edge.

    A filter gives each pixel the most frequent number around it.
    """
    small = image.reduce(_COARSER) if min(image.size) >= 8 * _COARSER else image
    numbers = Image.fromarray(np.array(small.quantize(len(CLASSES)))).filter(
        ImageFilter.ModeFilter(5)
    )
    mask = np.array(numbers.resize(image.size, Image.Resampling.NEAREST))
    mask[round(mask.shape[0] * (1 - _VOID_BELOW)) :] = VOID
    return mask
