"""perfexp make-data: make a small data set in Cityscapes' layout from photographs, for trials and timing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands.app import app, echo
from perfexp.data import made_streets
from perfexp.errors import UserError
from perfexp.sweep import parse_sizes

_SMALLEST, _LARGEST = 32, 16384


@app.command("make-data")
def make_data(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output folder, empty or new.")],
    photographs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Photographs to crop; by default the two that scikit-learn ships."),
    ] = None,
    size: Annotated[str, typer.Option(metavar="HxW", help="Height and width of each image.")] = "1024x2048",
    train: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Training images.")] = 32,
    val: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Evaluation images.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the crops.")] = 0,
) -> None:
    """Make a small data set in Cityscapes' layout, for data=cityscapes: crops of photographs, and masks of 19 classes.

    The masks are artificial, from colors and positions. Use them to try out and to time, not to learn. The same
    photographs, sizes, numbers and seed give the same pixels.
    """
    [(height, width)] = parse_sizes(size)
    if not (_SMALLEST <= height <= _LARGEST and _SMALLEST <= width <= _LARGEST):
        raise UserError(f"--size {size}: from {_SMALLEST} to {_LARGEST} pixels.")
    is_terminal = typer.get_text_stream("stderr").isatty()
    made_streets.make(
        folder,
        photographs=None if photographs is None else made_streets.photographs_in(photographs),
        counts={"train": train, "val": val},
        size=(height, width),
        seed=seed,
        progress=lambda text: typer.echo(f"\r{text}   ", nl=False, err=True) if is_terminal else None,
    )
    echo(f"{folder}: {train} images of training and {val} of evaluation, {height} × {width}.")
    echo(made_streets.NO_TRUTH)
    echo(f"Check it: perfexp doctor data.root={folder}")
