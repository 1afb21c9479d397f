"""perfexp apply: measure what a run's algorithms gain in the user's own program."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from perfexp.commands.app import Json, app, emit
from perfexp.measuring.script_gain import gain_in_script
from perfexp.records import algorithm_plan


@app.command()
def apply(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN", help="File of perfexp export RUN --plan FILE, or a run's folder."
        ),
    ],
    check: Annotated[
        str,
        typer.Option(
            metavar="FILE:NAME",
            help="Your function that returns (module, inputs), or (module, function to time).",
        ),
    ],
    remeasure: Annotated[
        bool,
        typer.Option(
            "--remeasure", help="Race again if the plan is for another device or library."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure how much faster a run's algorithms make your own program.

    Inputs are timed in forward passes without gradients, a function as it is. Shapes that the plan
    lacks are left to torch. Exit codes: 1 the plan is slower, 2 it has no shape of yours.

    Example: perfexp apply vgg16.json --check train.py:make
    """
    promised = algorithm_plan.read(plan).gains
    with redirect_stdout(sys.stderr):  # of the user's code
        device, gain = gain_in_script(plan, check, remeasure=remeasure)
    document = {
        "plan": str(plan),
        "function": check,
        "device": device,
        "gain": msgspec.to_builtins(gain),
        "run_gains": promised,
    }
    here = f"speedup over torch's choices, with its 95 % interval ({device})"
    word = "UNDECIDED"
    if gain.low is not None and gain.high is not None:
        word = "FASTER" if gain.low > 1 else "SLOWER" if gain.high < 1 else word
    lines = [f"{word} {_line(here, gain.value, gain.low, gain.high)}"]
    for point, interval in promised.items():
        lines.append(_line(f"in its run, {point}", *interval))
    emit(document, lines, as_json=as_json)
    raise typer.Exit(int(gain.high is not None and gain.high < 1))


def _line(text: str, *interval: float | None) -> str:
    """Return a text behind a ratio with both ends of its interval; a plan may lack them."""
    value, low, high = ("?" if number is None else f"{number:.3f}" for number in interval)
    return f"{value}, {low} to {high}: {text}"
