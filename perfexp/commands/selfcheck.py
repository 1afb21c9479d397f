"""perfexp selfcheck: measure the same plan in several processes and show how they differ."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from perfexp.cli.composition import compose
from perfexp.commands.app import ConfigDir, Json, app, command_line, emit
from perfexp.commands.train_speed import given_keys, run_plan
from perfexp.errors import UserError
from perfexp.plan import config
from perfexp.plan.config import Plan
from perfexp.records import selfcheck_summary
from perfexp.records.grid import Section
from perfexp.records.record import Record
from perfexp.records.summary import rows
from perfexp.run import worker_query

#: Settings of the command: measure only times, without a tracking store.
_SETTINGS = {
    "tracking": "none",
    "cold_start": "false",
    "hydra.mode": "RUN",
    "probes.work": "false",
    "probes.energy": "false",
    "probes.ceilings": "false",
    "probes.layers": "false",
    "probes.scaling": "false",
}
_SET_BY = {"processes": "--processes"} | dict.fromkeys(
    _SETTINGS, "the command: it measures the times alone"
)
#: Defaults without a model.
_DEFAULTS = {"input_size": "96", "stopping": "normal"}
_MODEL, _GPU_MODEL = "resnet18", "resnet50"


@app.command()
def selfcheck(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Overrides of a run. Without a model: resnet18, resnet50 on a GPU, at 96 pixels.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            metavar="N", min=3, help="Fresh processes, each of which measures every point."
        ),
    ] = 10,
    as_json: Json = False,
    config_dir: ConfigDir = None,
) -> None:
    """Measure one plan in several processes and show how much their figures differ.

    The result is the smallest difference that counts on this machine. Each process is an ordinary
    replicate of one run. Its figures refine what perfexp knows about this device before the next
    run, shown by `perfexp doctor`.

    With output_dir=DIR from an earlier selfcheck, the same command measures only what is missing
    there. With --json, the run's own report goes to stderr. The exit code is 1 if a measurement
    failed.

    Example: perfexp selfcheck --processes 10 model=resnet18
    """
    arguments, plan = settle(overrides or (), processes, config_dir)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        code, folder = run_plan(arguments, plan)
    if code > 1:  # usage errors and interrupts
        raise typer.Exit(code)
    record = Record.load(folder)
    spreads = selfcheck_summary.spreads(rows(record))
    if not spreads:
        raise UserError(
            f"No two processes in {folder} have the same point; its report shows why (perfexp "
            "show)."
        )
    sentence = selfcheck_summary.sentence(spreads)
    title = f"selfcheck: {processes} processes of {record.name}"
    emit(
        {
            "folder": folder,
            "sentence": sentence,
            "spreads": [spread.to_builtins() for spread in spreads],
        },
        [Section(title, selfcheck_summary.grid(spreads)), sentence],
        as_json=as_json,
    )
    raise typer.Exit(code)


def settle(
    overrides: list[str] | tuple[str, ...], processes: int, config_dir: Path | None
) -> tuple[list[str], Plan]:
    """Return the command line of the run, and its plan.

    Without a model, a small default is measured.

    Raises:
        UserError: the command itself sets a key among the overrides, or the run would refuse them.
    """
    typed = given_keys(overrides, _SET_BY)
    arguments = command_line((), config_dir)
    if not typed.keys() & {"model", "experiment"}:
        defaults = {"model": _default_model(typed.get("gpu")), **_DEFAULTS}
        arguments += [f"{key}={value}" for key, value in defaults.items() if key not in typed]
    arguments += [*overrides, f"processes={processes}", *map("=".join, _SETTINGS.items())]
    return arguments, config.typed(compose(arguments))


def _default_model(gpu: str | None) -> str:
    """Return the model to measure if the user names none, by the device."""
    if gpu in ("cpu", "fake", "mps"):
        return _MODEL
    if worker_query.visible_gpus():
        return _GPU_MODEL
    return _MODEL
