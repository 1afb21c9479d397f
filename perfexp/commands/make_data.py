"""perfexp make-data: make a small data set from photographs or skeletons, for trials and timing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.commands.app import app, echo, one_of
from perfexp.data import made
from perfexp.data.made import Recipe
from perfexp.errors import UserError

#: Layouts, each with its maker and its options with their defaults.
_MAKERS: dict[str, tuple[Callable[..., Recipe], dict[str, Any]]] = {
    "cityscapes": (
        made.streets,
        {"photographs": None, "size": "1024x2048", "train": 32, "val": 8},
    ),
    "images": (made.image_folder, {"photographs": None, "train": 200, "val": 50, "classes": 10}),
    "cifar10": (
        made.cifar,
        {"photographs": None, "train": 10_000, "test": 2_000, "classes": 10},
    ),
    "skeletons": (made.skeletons, {"subjects": 20, "repetitions": 5}),
}


Where = Annotated[
    list[str],
    typer.Argument(
        metavar="[LAYOUT] DIR",
        help="Output folder, empty or new, "
        "after cityscapes (default), images, cifar10 or skeletons",
    ),
]
Photographs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Photographs to crop; by default the two that scikit-learn ships.",
    ),
]
Size = Annotated[
    str | None, typer.Option(metavar="HxW", help="Height and width of each image; 1024x2048.")
]
Train = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=100_000,
        help="Training images; 32, 200 for images, 10000 for cifar10.",
    ),
]
Val = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=100_000, help="Evaluation images; 8, or 50 for images."),
]
Test = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=100_000, help="Evaluation images of cifar10; 2000."),
]
Classes = Annotated[
    int | None,
    typer.Option(metavar="N", min=2, max=10, help="Classes of images and cifar10; 10."),
]
Subjects = Annotated[
    int | None, typer.Option(metavar="N", min=2, max=1000, help="Subjects of skeletons; 20.")
]
Repetitions = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=1000, help="Repetitions of each gesture by a subject; 5."),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the crops and movements.")]


@app.command("make-data")
def make_data(
    where: Where,
    photographs: Photographs = None,
    size: Size = None,
    train: Train = None,
    val: Val = None,
    test: Test = None,
    classes: Classes = None,
    subjects: Subjects = None,
    repetitions: Repetitions = None,
    seed: Seed = 0,
) -> None:
    """Make a small data set for data=cityscapes, data=images, data=cifar10 or data=skeletons.

    Images are crops of photographs. For cityscapes, masks of 19 classes are derived from colors:
    use them to try out and to time, not to learn. For images (JPEG files in train/CLASS and
    val/CLASS) and cifar10, the classes are shapes drawn on the images, which convolutions learn.

    For skeletons, joints with simple geometry perform nine gestures, which sequence classifiers
    learn.

    The same photographs, sizes, numbers and seed give the same data.

    Example: perfexp make-data cityscapes data/cityscapes
    """
    layout, folder = _layout(where)
    maker, settings = _MAKERS[layout]
    options = {
        "photographs": photographs,
        "size": size,
        "train": train,
        "val": val,
        "test": test,
        "classes": classes,
        "subjects": subjects,
        "repetitions": repetitions,
    }
    named_settings = {name: value for name, value in options.items() if value is not None}
    for name in named_settings.keys() - settings.keys():
        raise UserError(f"--{name} is not for {layout}; its own are --{', --'.join(settings)}.")
    recipe = maker(**settings | named_settings, seed=seed)
    recipe.write(folder, _progress)
    echo(f"{folder}: {recipe.contents}.")
    if recipe.remark:
        echo(recipe.remark)
    action = "Check" if layout == "cityscapes" else "Train on"
    echo(f"{action} it: {recipe.command} data.root={folder}")


def _layout(where: list[str]) -> tuple[str, Path]:
    """Return the layout and the folder.

    Raises:
        UserError: the layout is unknown, or the folder is missing.
    """
    if len(where) == 1 and where[0] in _MAKERS:
        raise UserError(
            f"Name the folder: perfexp make-data {where[0]} DIR; "
            f"./{where[0]} is a folder of this name."
        )
    if len(where) > 2:
        raise UserError(f"make-data takes a layout and a folder, not {' '.join(where)}.")
    layout = one_of("layout", where[0], list(_MAKERS)) if len(where) == 2 else "cityscapes"
    return layout, Path(where[-1])


def _progress(text: str) -> None:
    """Show how many files are written, if stderr is a terminal."""
    if typer.get_text_stream("stderr").isatty():
        typer.echo(f"\r{text}   ", nl=False, err=True)
