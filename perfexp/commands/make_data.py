"""perfexp make-data: make a small data set from photographs or of skeletons, for trials and timing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands.app import app, echo, one_of
from perfexp.data import made_shapes, made_skeletons, made_streets
from perfexp.errors import UserError
from perfexp.sweep import parse_sizes

_SMALLEST, _LARGEST = 32, 16384
#: The layouts with the options that they take.
_OPTIONS = {
    "cityscapes": ("photographs", "size", "train", "val"),
    "images": ("photographs", "train", "val", "classes"),
    "cifar10": ("photographs", "train", "test", "classes"),
    "skeletons": ("subjects", "repetitions"),
}
#: Files of training images in CIFAR-10's format, none of which is empty.
_FILES = 5


@app.command("make-data")
def make_data(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[LAYOUT] DIR",
            help="Output folder, empty or new, after cityscapes (default), images, cifar10 or skeletons",
        ),
    ],
    photographs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Photographs to crop; by default the two that scikit-learn ships."),
    ] = None,
    size: Annotated[str | None, typer.Option(metavar="HxW", help="Height and width of each image; 1024x2048.")] = None,
    train: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=100_000, help="Training images; 32, 200 for images, 10000 for cifar10."),
    ] = None,
    val: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=100_000, help="Evaluation images; 8, or 50 for images.")
    ] = None,
    test: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=100_000, help="Evaluation images of cifar10; 2000.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(metavar="N", min=2, max=10, help="Classes of images and cifar10; 10.")
    ] = None,
    subjects: Annotated[
        int | None, typer.Option(metavar="N", min=2, max=1000, help="Subjects of skeletons; 20.")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1000, help="Repetitions of each gesture by a subject; 5.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the crops and movements.")] = 0,
) -> None:
    """Make a small data set, for data=cityscapes, data=images, data=cifar10 or data=skeletons.

    For cityscapes there are masks of 19 classes. They are artificial, from colors and positions: use them to try out
    and to time, not to learn. For images (JPEG files in train/CLASS and val/CLASS) and cifar10 the classes are shapes
    on the images, which convolutions learn. All are crops of photographs. For skeletons, joints of simple geometry do
    nine gestures, which classifiers of sequences learn. The same photographs, sizes, numbers and seed give the same
    data.

    Example: perfexp make-data cityscapes data/cityscapes
    """
    layout, folder = _layout(where)
    given = {"photographs": photographs, "size": size, "train": train, "val": val, "test": test, "classes": classes}
    for name, value in (given | {"subjects": subjects, "repetitions": repetitions}).items():
        if value is not None and name not in _OPTIONS[layout]:
            raise UserError(f"--{name} is not for {layout}; its own are --{', --'.join(_OPTIONS[layout])}.")
    if layout == "skeletons":
        _make_skeletons(folder, subjects or 20, repetitions or 5, seed)
        return
    files = None if photographs is None else made_streets.photographs_in(photographs)
    classes = classes or len(made_shapes.SHAPES)
    if layout == "images":
        _make_images(folder, files, {"train": train or 200, "val": val or 50}, classes, seed)
    elif layout == "cifar10":
        _make_shapes(folder, files, train or 10_000, test or 2_000, classes, seed)
    else:
        _make_streets(folder, files, size or "1024x2048", train or 32, val or 8, seed)


def _layout(where: list[str]) -> tuple[str, Path]:
    """The layout and the folder that were typed."""
    if len(where) == 1 and where[0] in _OPTIONS:
        raise UserError(f"Name the folder: perfexp make-data {where[0]} DIR; ./{where[0]} is a folder of this name.")
    if len(where) > 2:
        raise UserError(f"make-data takes a layout and a folder, not {' '.join(where)}.")
    return one_of("layout", where[0], list(_OPTIONS)) if len(where) == 2 else "cityscapes", Path(where[-1])


def _progress(text: str) -> None:
    if typer.get_text_stream("stderr").isatty():
        typer.echo(f"\r{text}   ", nl=False, err=True)


def _make_streets(folder: Path, files: list[Path] | None, size: str, train: int, val: int, seed: int) -> None:
    [(height, width)] = parse_sizes(size)
    if not (_SMALLEST <= height <= _LARGEST and _SMALLEST <= width <= _LARGEST):
        raise UserError(f"--size {size}: from {_SMALLEST} to {_LARGEST} pixels.")
    counts = {"train": train, "val": val}
    made_streets.make(folder, photographs=files, counts=counts, size=(height, width), seed=seed, progress=_progress)
    echo(f"{folder}: {train} images of training and {val} of evaluation, {height} × {width}.")
    echo(made_streets.NO_TRUTH)
    echo(f"Check it: perfexp doctor data.root={folder}")


def _make_images(folder: Path, files: list[Path] | None, counts: dict[str, int], classes: int, seed: int) -> None:
    for name, count in counts.items():
        if count < classes:
            raise UserError(f"--{name} {count}: at least {classes}, one for each class (--classes).")
    made_shapes.make_folder(folder, photographs=files, counts=counts, classes=classes, seed=seed, progress=_progress)
    side, (train, val) = made_shapes.FILE_SIDE, counts.values()
    echo(f"{folder}: {train} images of training and {val} of evaluation, {side} × {side}, {classes} classes.")
    echo(f"Train on it: python -m perfexp model=resnet18 mode=train data=images data.root={folder} epochs=1")


def _make_shapes(folder: Path, files: list[Path] | None, train: int, test: int, classes: int, seed: int) -> None:
    if train < _FILES:
        raise UserError(f"--train {train}: at least {_FILES}, one for each file of CIFAR-10.")
    counts = {"train": train, "test": test}
    made_shapes.make(folder, photographs=files, counts=counts, classes=classes, seed=seed, progress=_progress)
    echo(f"{folder}: {train} images of training and {test} of evaluation, {classes} classes, in CIFAR-10's format.")
    echo("It stands in for CIFAR-10, and its accuracies are its own.")
    echo(f"Train on it: python -m perfexp experiment=cifar10 data.root={folder} epochs=5")


def _make_skeletons(folder: Path, subjects: int, repetitions: int, seed: int) -> None:
    count = made_skeletons.make(folder, subjects=subjects, repetitions=repetitions, seed=seed, progress=_progress)
    echo(f"{folder}: {count} repetitions of 9 gestures by {subjects} subjects, in the layout of IntelliRehabDS.")
    echo("It stands in for IntelliRehabDS, and its accuracies are its own.")
    echo(
        f"Train on it: python -m perfexp experiment=full_benchmark model=clip_gesture data=skeletons data.root={folder}"
    )
