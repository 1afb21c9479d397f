"""Make a small data set in Cityscapes' layout from any photographs, with artificial masks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from perfexp.data.cityscapes_folder import CLASSES, MADE, VOID, Mask, image_of, mask_of
from perfexp.data.image_files import EXTENSIONS, read_image
from perfexp.errors import UserError

_Features = np.ndarray[Any, np.dtype[np.float32]]

#: Name of the only city.
_CITY = "made"
#: Least size of a crop, relative to the largest that fits into its photograph.
_SMALLEST_CROP = 0.5
#: Reduction of the images for masks, since regions of a few pixels are meaningless.
_COARSER = 4
_ROUNDS = 8
#: Weight of a pixel's position relative to its color, both from 0 to 1.
_PLACE = 0.5
#: Share of an image at its lower edge that is void, like the car's hood in Cityscapes.
_VOID_BELOW = 0.05
#: Share of the pixels that fit no class well, which are void too.
_VOID_FAR = 0.02
NO_TRUTH = (
    "The masks are derived from colors and positions, and are not ground truth. Use them for trials and timing only."
)


def photographs_in(folder: Path) -> list[Path]:
    """The photographs in a folder, by name; raises `UserError` if there are none."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Name one that holds photographs.")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in EXTENSIONS and file.is_file())
    if not files:
        raise UserError(f"There are no photographs in {folder}. Looked for: {', '.join(sorted(EXTENSIONS))}.")
    return files


def public_photographs() -> list[tuple[str, Image.Image]]:
    """The two photographs of scikit-learn, with their names; raises `UserError` if it is not installed."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise UserError(
            "Without --photographs FOLDER the two of scikit-learn are taken, which is not installed. "
            "pip install scikit-learn"
        ) from error
    shipped = load_sample_images()
    return [
        (f"scikit-learn: {Path(name).name}", Image.fromarray(pixels))
        for name, pixels in zip(shipped.filenames, shipped.images, strict=True)
    ]


def sources_of(photographs: Sequence[Path] | None) -> list[tuple[str, Image.Image]]:
    """Photographs with their names, from files, or those of scikit-learn (None)."""
    if photographs is None:
        return public_photographs()
    return [(file.name, read_image(file, "Take it out of the folder.")) for file in photographs]


def refuse_filled(root: Path) -> None:
    """Raise `UserError` for a folder with something in it, or a file in its place."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root} is not empty. Name a folder that is, or that is not there yet.")


def make(
    root: Path,
    *,
    photographs: Sequence[Path] | None,
    counts: dict[str, int],
    size: tuple[int, int],
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Write the data set into an empty or new folder, from files, or from the photographs of scikit-learn (None).

    Equal photographs, counts, size and seed give the same pixels. Raises `UserError` if a photograph cannot be read, or
    the folder is not empty or cannot be written.
    """
    refuse_filled(root)
    sources = sources_of(photographs)
    about = {
        "made_by": "perfexp make-data",
        "masks": NO_TRUTH,
        "seed": seed,
        "size": list(size),
        "images": counts,
        "photographs": [name for name, _ in sources],
    }
    try:
        root.mkdir(parents=True, exist_ok=True)
        # first, so that even an incomplete data set is marked
        (root / MADE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for number, (split, count) in enumerate(counts.items()):
            for index in range(count):
                name, random = f"{_CITY}/{_CITY}_{index:06}_000019", np.random.default_rng([seed, number, index])
                image = crop(sources[index % len(sources)][1], size, random)
                _save(image_of(root, split, name), image)
                _save(mask_of(root, split, name), Image.fromarray(regions(image, random)))
                progress(f"{split} {index + 1} of {count}")
    except OSError as error:
        raise UserError(f"{error.filename or root} can't be written: {error.strerror or error}.") from error


def _save(file: Path, pixels: Image.Image) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels.save(file)


def crop(photograph: Image.Image, size: tuple[int, int], random: np.random.Generator) -> Image.Image:
    """A random part of an RGB photograph, resized to a height and width; half of them mirrored."""
    largest = min(photograph.height / size[0], photograph.width / size[1])
    part = largest * random.uniform(_SMALLEST_CROP, 1)
    height, width = part * size[0], part * size[1]
    left, top = random.uniform(0, photograph.width - width), random.uniform(0, photograph.height - height)
    cut = photograph.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    return ImageOps.mirror(cut) if random.random() < 0.5 else cut


def regions(image: Image.Image, random: np.random.Generator) -> Mask:
    """A mask of regions of similar color and position, numbered by brightness, with void for outliers.

    K-means (Lloyd, "Least squares quantization in PCM") on a smaller image, and a filter that gives each pixel the most
    frequent number around it.
    """
    small = image.reduce(_COARSER) if min(image.size) >= 8 * _COARSER else image
    features = _features(small)
    centers = features[random.choice(len(features), size=min(len(CLASSES), len(features)), replace=False)]
    for _ in range(_ROUNDS):
        nearest, _distance = _nearest(features, centers)
        for index in range(len(centers)):
            if (members := nearest == index).any():
                centers[index] = features[members].mean(axis=0)
    centers = centers[np.argsort(centers[:, :3].sum(axis=1), kind="stable")]
    nearest, distance = _nearest(features, centers)
    numbers = nearest.astype(np.uint8)
    numbers[distance > np.quantile(distance, 1 - _VOID_FAR)] = VOID
    coarse = Image.fromarray(numbers.reshape(small.height, small.width)).filter(ImageFilter.ModeFilter(5))
    mask = np.array(coarse.resize(image.size, Image.Resampling.NEAREST))
    mask[round(mask.shape[0] * (1 - _VOID_BELOW)) :] = VOID
    return mask


def _features(image: Image.Image) -> _Features:
    colors = np.asarray(image, np.float32).reshape(-1, 3) / 255
    down, across = np.mgrid[: image.height, : image.width].astype(np.float32)
    places = np.stack([down.ravel() / image.height, across.ravel() / image.width], axis=1)
    return np.concatenate([colors, _PLACE * places], axis=1)


def _nearest(features: _Features, centers: _Features) -> tuple[np.ndarray[Any, np.dtype[np.intp]], _Features]:
    """Index of the nearest center and the squared distance to it, for each row."""
    distances = np.stack([((features - center) ** 2).sum(axis=1) for center in centers])
    return distances.argmin(axis=0), distances.min(axis=0)
