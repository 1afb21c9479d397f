"""Make small data sets for trials and timing: `perfexp make-data LAYOUT DIR`.

Each layout has a function that returns a `Recipe`; the command writes it. `streets` has Cityscapes'
layout: crops of photographs with masks by color. `cifar` and `image_folder` have labels that
convolutions can learn: an image is part of a photograph with a shape on it, in a random place and
color, and the class is the shape. All classes have the same mean image, so a linear classifier
learns next to nothing. `skeletons` has IntelliRehabDS' layout: a skeleton with nine gestures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter, ImageOps

from perfexp.data.cifar_files import FORMATS, SHAPE, Numbers
from perfexp.data.cityscapes_folder import CLASSES, MADE, VOID, Mask, image_of, mask_of
from perfexp.data.image_files import EXTENSIONS, LOOKED_FOR, read_image
from perfexp.errors import UserError
from perfexp.host.files import write_atomically
from perfexp.records.sizes import parse_sizes

#: Name and RGB image.
Photograph = tuple[str, Image.Image]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A data set to make. Equal arguments of its function give equal files.

    Attributes:
        about: facts for `MADE`, the file that marks such a data set, for example the seed.
        files: paths in the folder with their contents, which are created on demand.
        count: number of files.
        contents: one-line description for the user.
        remark: limitation for the user.
        command: command that uses the data set, without its folder.
    """

    about: dict[str, Any]
    files: Iterable[tuple[str, bytes | Image.Image]]
    count: int
    contents: str
    remark: str = ""
    command: str

    def write(self, root: Path, progress: Callable[[str], None]) -> None:
        """Write the data set into an empty or new folder.

        `perfexp make-data` calls it.

        Args:
            progress: called with the number of files so far.

        Raises:
            UserError: the folder is not empty or cannot be written.
        """
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise UserError(
                f"{root} is not empty. Name a folder that is, or that is not there yet."
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            # written first, so that even an incomplete data set is marked
            write_atomically(root / MADE, json.dumps(self.about, indent=1).encode() + b"\n")
            for number, (name, content) in enumerate(self.files, 1):
                file = root / name
                file.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    write_atomically(file, content)
                else:
                    content.save(file)
                progress(f"{number} of {self.count} files")
        except OSError as error:
            raise UserError(
                f"{error.filename or root} can't be written: {error.strerror or error}."
            ) from error


def photographs_in(folder: Path | None) -> list[Photograph]:
    """Return photographs with their names, from a folder or, for None, the two in scikit-learn.

    All layouts of images are made from them.

    Raises:
        UserError: there are none, one cannot be read, or scikit-learn is not installed.
    """
    if folder is None:
        return _public_photographs()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Name one that holds photographs.")
    files = sorted(
        file for file in folder.iterdir() if file.suffix.lower() in EXTENSIONS and file.is_file()
    )
    if not files:
        raise UserError(f"There are no photographs in {folder}. {LOOKED_FOR}")
    return [(file.name, read_image(file)) for file in files]


def _public_photographs() -> list[Photograph]:
    """Return the two photographs in scikit-learn."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise UserError(
            "Without --photographs FOLDER the two of scikit-learn are taken, which is not "
            "installed. pip install scikit-learn"
        ) from error
    shipped = load_sample_images()
    return [
        (f"scikit-learn: {Path(name).name}", Image.fromarray(pixels))
        for name, pixels in zip(shipped.filenames, shipped.images, strict=True)
    ]


#: Limits on the sides of an image, in pixels.
_SMALLEST_SIDE, _LARGEST_SIDE = 32, 16384
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


def streets(*, photographs: Path | None, size: str, train: int, val: int, seed: int) -> Recipe:
    """Return a recipe in Cityscapes' layout: crops of photographs, with masks.

    Args:
        photographs: folder of photographs; None for scikit-learn's.
        size: height and width, for example `1024x2048`.
        train: number of training images.
        val: number of evaluation images.
    """
    [(height, width)] = parse_sizes(size)
    if not (_SMALLEST_SIDE <= height <= _LARGEST_SIDE and _SMALLEST_SIDE <= width <= _LARGEST_SIDE):
        raise UserError(f"--size {size}: from {_SMALLEST_SIDE} to {_LARGEST_SIDE} pixels.")
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
        files=_street_files(sources, counts, (height, width), seed),
        count=2 * (train + val),
        contents=f"{train} images of training and {val} of evaluation, {height} × {width}",
        remark=_NO_TRUTH,
        command="perfexp doctor",
    )


def _street_files(
    sources: list[Photograph], counts: dict[str, int], size: tuple[int, int], seed: int
) -> Iterator[tuple[str, Image.Image]]:
    """Yield images and their masks by path.

    Args:
        counts: number of images by split.
        size: height and width in pixels.
    """
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
    """Return a random part of an RGB photograph, resized to `size`, mirrored half of the time."""
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
    """Return a mask, uint8 (height, width), with regions of similar color.

    The lower edge is void. A filter gives each pixel the most frequent number around it.
    """
    small = image.reduce(_COARSER) if min(image.size) >= 8 * _COARSER else image
    numbers = Image.fromarray(np.array(small.quantize(len(CLASSES)))).filter(
        ImageFilter.ModeFilter(5)
    )
    mask = np.array(numbers.resize(image.size, Image.Resampling.NEAREST))
    mask[round(mask.shape[0] * (1 - _VOID_BELOW)) :] = VOID
    return mask


_Grid = np.ndarray[Any, np.dtype[np.float64]]

_CIFAR_SIDE = SHAPE[1]
#: Sides of the photograph part that becomes an image, and of a shape in it, in pixels of an image
#: with side `_CIFAR_SIDE`.
_PART_SIDES, _SHAPE_SIDES = (32, 128), (13, 19)
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
    """Return a recipe for 32 × 32 images in CIFAR-10's binary format; see `image_folder`."""
    sources, names = photographs_in(photographs), list(SHAPES)[:classes]
    *training, evaluation, meta = FORMATS[10][0].files
    if train < len(training):
        raise UserError(
            f"--train {train}: at least {len(training)}, one for each file of CIFAR-10."
        )

    def files() -> Iterator[tuple[str, bytes]]:
        """Yield the name and content of each binary file."""
        yield meta, "\n".join([*names, ""]).encode()
        for number, (split, count) in enumerate(((training, train), ([evaluation], test))):
            images = _shape_images(sources, names, count, (seed, number), SHAPE[1])
            records = np.stack(
                [np.append(np.uint8(label), pixels.transpose(2, 0, 1)) for label, pixels in images]
            )
            for file, part in zip(split, np.array_split(records, len(split)), strict=True):
                yield file, part.tobytes()

    return Recipe(
        about=_shapes_about("cifar10", seed, {"train": train, "test": test}, sources),
        files=files(),
        count=len(training) + 2,
        contents=f"{train} images of training and {test} of evaluation, {classes} classes, in "
        "CIFAR-10's format",
        remark="It stands in for CIFAR-10, and its accuracies are its own.",
        command="python -m perfexp experiment=cifar10 epochs=5",
    )


def image_folder(
    *, photographs: Path | None, train: int, val: int, classes: int, seed: int
) -> Recipe:
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
        """Yield the name and image of each JPEG file."""
        for number, (split, count) in enumerate(counts.items()):
            for index, (label, pixels) in enumerate(
                _shape_images(sources, names, count, (seed, number), _FILE_SIDE)
            ):
                yield f"{split}/{names[label]}/{index:06}.jpg", Image.fromarray(pixels)

    shape = f"{_FILE_SIDE} × {_FILE_SIDE}"
    return Recipe(
        about=_shapes_about("images", seed, counts, sources),
        files=files(),
        count=train + val,
        contents=f"{train} images of training and {val} of evaluation, {shape}, {classes} classes",
        command="python -m perfexp model=resnet18 mode=train epochs=1 data=images",
    )


def _shapes_about(
    layout: str, seed: int, counts: dict[str, int], sources: list[Photograph]
) -> dict[str, Any]:
    """Return the facts about a data set of shapes, for `MADE`."""
    return {
        "made_by": f"perfexp make-data {layout}",
        "labels": "The shape that is drawn on each image.",
        "seed": seed,
        "images": counts,
        "photographs": [name for name, _ in sources],
    }


def _shape_images(
    sources: list[Photograph], names: list[str], count: int, seed: tuple[int, ...], side: int
) -> Iterator[tuple[int, Numbers]]:
    """Yield labels and images uint8 (side, side, 3), with equally frequent classes.

    Args:
        names: shapes by label.
        seed: numbers that, with an image's index, determine the image.
    """
    for index in range(count):
        label, random = index % len(names), np.random.default_rng([*seed, index])
        yield (
            label,
            _draw_shape(names[label], sources[random.integers(len(sources))][1], random, side),
        )


def _draw_shape(
    name: str, photograph: Image.Image, random: np.random.Generator, length: int
) -> Numbers:
    """Return part of a photograph with a shape on it, uint8 (length, length, 3).

    Args:
        name: shape, one of `SHAPES`.
        length: side in pixels, a multiple of 32.
    """
    scale = length // _CIFAR_SIDE
    part = min(
        int(random.integers(scale * _PART_SIDES[0], scale * _PART_SIDES[1])), *photograph.size
    )
    left, top = (int(random.integers(side - part + 1)) for side in photograph.size)
    box = (left, top, left + part, top + part)
    image = np.array(
        photograph.resize((length, length), Image.Resampling.BILINEAR, box=box), np.float64
    )
    side = random.integers(scale * _SHAPE_SIDES[0], scale * _SHAPE_SIDES[1])
    down, across = random.integers(length - side + 1, size=2)
    y, x = np.meshgrid(np.linspace(-1, 1, side), np.linspace(-1, 1, side), indexing="ij")
    inside = SHAPES[name](x, y)
    covered = image[down : down + side, across : across + side]
    contrast = random.uniform(*_CONTRAST, size=3) * random.choice([-1, 1], size=3)
    covered[inside] = covered.mean(axis=(0, 1)) + contrast
    return image.clip(0, 255).round().astype(np.uint8)


_Joints = np.ndarray[Any, np.dtype[np.float64]]

#: Joint numbers (JointType in Kinect for Windows SDK 2.0): spine from its base to the head, arms
#: from shoulder to fingers, legs from hip to foot.
_SPINE = (0, 1, 20, 2, 3)
_ARMS = ((4, 5, 6, 7, 21, 22), (8, 9, 10, 11, 23, 24))
_LEGS = ((12, 13, 14, 15), (16, 17, 18, 19))
#: Heights of spine joints, and positions of limb joints outwards and up, in meters.
_SPINE_HEIGHTS = (0.95, 1.2, 1.4, 1.5, 1.65)
_ARM_PLACES = ((0.18, 1.4), (0.2, 1.12), (0.21, 0.88), (0.21, 0.8), (0.21, 0.72), (0.18, 0.8))
_LEG_PLACES = ((0.09, 0.93), (0.1, 0.52), (0.1, 0.1), (0.1, 0.04))
#: Directions of the left and the right side.
_OUTWARDS = (-1.0, 1.0)
#: Turns by gesture label: limbs, index of the pivot joint, sides, axis of the turning plane
#: (0 outwards, 2 forward), and angle in degrees.
_GESTURES = (
    (_ARMS, 1, [0], 2, 125.0),
    (_ARMS, 1, [1], 2, 125.0),
    (_ARMS, 0, [0], 2, 100.0),
    (_ARMS, 0, [1], 2, 100.0),
    (_ARMS, 0, [0], 0, 100.0),
    (_ARMS, 0, [1], 0, 100.0),
    (_ARMS, 0, [0, 1], 2, 150.0),
    (_LEGS, 0, [0], 0, 28.0),
    (_LEGS, 0, [1], 0, 28.0),
)
_POSITIONS = ("stand", "chair")
#: Frames per repetition, coordinate noise in meters, and distance from standing hips to a seat.
_FRAMES, _NOISE, _SEAT = (25, 50), 0.008, 0.4


def skeletons(*, subjects: int, repetitions: int, seed: int) -> Recipe:
    """Return a recipe for text files with repetitions of nine gestures by several subjects.

    A joint turns and moves the limb below it. Subjects differ in height, place, direction, range
    and speed, and in whether they sit. Repetitions differ in time and range, and every coordinate
    has noise.
    """
    count = subjects * len(_GESTURES) * repetitions
    return Recipe(
        about={
            "made_by": "perfexp make-data skeletons",
            "labels": "The gesture that a skeleton of simple geometry does.",
            "seed": seed,
            "subjects": subjects,
            "repetitions": repetitions,
        },
        files=_skeleton_files(subjects, repetitions, seed),
        count=count,
        contents=f"{count} repetitions of 9 gestures by {subjects} subjects, in the layout of "
        "IntelliRehabDS",
        remark="It stands in for IntelliRehabDS, and its accuracies are its own.",
        command="python -m perfexp experiment=full_benchmark model=clip_gesture data=skeletons",
    )


def _skeleton_files(subjects: int, repetitions: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield a text file per repetition: a line per frame, with x, y and z of each joint in m."""
    for subject in range(subjects):
        random = np.random.default_rng([seed, subject])
        position = _POSITIONS[subject % len(_POSITIONS)]
        body = _posture(sits=position == "chair") * random.uniform(0.88, 1.12)
        place = random.uniform([-0.4, -1.2, 1.8], [0.4, -0.8, 2.6])
        yaw, extent = random.uniform(-0.25, 0.25), random.uniform(0.75, 1.0)
        direction = np.array(
            [[np.cos(yaw), 0, -np.sin(yaw)], [0, 1, 0], [np.sin(yaw), 0, np.cos(yaw)]]
        )
        for gesture in range(len(_GESTURES)):
            for repetition in range(1, repetitions + 1):
                moved = _gesture(body, gesture, extent, random) @ direction + place
                noisy = moved + random.normal(0, _NOISE, moved.shape)
                text = ""
                for frame in noisy.reshape(len(noisy), -1):
                    text += ",".join(f"{value:.4f}" for value in frame) + "\n"
                name = f"{101 + subject}_18_{gesture}_{repetition}_1_{position}.txt"
                yield name, text.encode()


def _posture(*, sits: bool) -> _Joints:
    """Return the joints at rest in meters, (joints, 3), standing or on a seat."""
    joints = np.zeros((25, 3))
    joints[_SPINE, 1] = _SPINE_HEIGHTS
    for limbs, places in ((_ARMS, _ARM_PLACES), (_LEGS, _LEG_PLACES)):
        for side, limb in enumerate(limbs):
            joints[limb, :2] = np.array(places) * (_OUTWARDS[side], 1)
    if sits:
        below = [joint for limb in _LEGS for joint in limb[1:]]
        joints[below, 2] += _SEAT
        joints[np.setdiff1d(np.arange(len(joints)), below), 1] -= _SEAT
    return joints


def _gesture(body: _Joints, gesture: int, extent: float, random: np.random.Generator) -> _Joints:
    """Return one repetition of a gesture, in meters, (frames, joints, 3).

    A limb moves to its end, rests there and comes back.

    Args:
        body: joints at rest, (joints, 3).
        gesture: index in `_GESTURES`.
        extent: the subject's range, relative to the full angle.
    """
    frames, hold = int(random.integers(*_FRAMES)), random.uniform(1.0, 2.5)
    reach = np.minimum(hold * np.sin(np.pi * np.linspace(0, 1, frames)) ** 2, 1.0) * random.uniform(
        0.85, 1.0
    )
    limbs, pivot, sides, axis, degrees = _GESTURES[gesture]
    angles = np.radians(degrees) * extent * reach[:, None]
    joints = np.tile(body, (frames, 1, 1))
    for side in sides:
        outwards = _OUTWARDS[side] if axis == 0 else 1.0
        limb = limbs[side][pivot + 1 :]
        along, up, _ = np.moveaxis(
            (body[limb, :] - body[limbs[side][pivot]])[:, [axis, 1, 2]], 1, 0
        )
        joints[:, limb, axis] += (
            outwards * (along * outwards * np.cos(angles) - up * np.sin(angles)) - along
        )
        joints[:, limb, 1] += along * outwards * np.sin(angles) + up * (np.cos(angles) - 1)
    return joints
