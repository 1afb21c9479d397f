"""calibrate: learn on this device by which kernels cuDNN's algorithms are recognized."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from perfexp.commands.app import app, echo


class Subject(StrEnum):
    """What is calibrated."""

    kernels = "kernels"


@app.command()
def calibrate(
    subject: Annotated[
        Subject, typer.Argument(help="kernels: those by which algorithm.verify=true proves.")
    ],
    seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, help="Begin no further convolution after this time."),
    ] = 150.0,
) -> None:
    """Learn on this NVIDIA GPU which kernels cuDNN runs for which algorithm, so that algorithm.verify=true proves it.

    perfexp has such a table for one architecture and one version of cuDNN. On another device, or after an update of
    cuDNN, a run with algorithm.verify=true warns of that (algorithm_unproven). The result is cached.

    Example: perfexp calibrate kernels --seconds 60
    """
    from perfexp.algorithms import calibration

    table, path = calibration.calibrate("cuda", seconds, lambda text: echo(text, err=True))
    echo(f"{table.seen}\n{path}")
