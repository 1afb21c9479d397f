"""perfexp calibrate: learn which kernels cuDNN runs for each algorithm on this device."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from perfexp.commands.app import app, echo


class CalibrationSubject(StrEnum):
    """Subject of the calibration."""

    kernels = "kernels"


@app.command()
def calibrate(
    subject: Annotated[
        CalibrationSubject,
        typer.Argument(help="kernels: those by which algorithm.verify=true proves."),
    ],
    seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, help="Begin no further convolution after this time."),
    ] = 150.0,
) -> None:
    """Learn which kernels cuDNN runs for each algorithm on this NVIDIA GPU.

    With this table algorithm.verify=true can prove which algorithm ran. perfexp ships a table for
    one architecture and one cuDNN version. On another device, or after a cuDNN update, such a run
    warns that nothing is proven (algorithm_unproven). The result is cached.

    Example: perfexp calibrate kernels --seconds 60
    """
    from perfexp.convolution import calibration

    table, path = calibration.calibrate("cuda", seconds, lambda text: echo(text, err=True))
    echo(f"{table.seen}\n{path}")
