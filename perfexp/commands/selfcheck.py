"""perfexp selfcheck: measure the same plan in several processes and show how they differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.cli.composition import compose
from perfexp.commands.app import ConfigDir, Json, app, command_line, emit
from perfexp.commands.train_speed import given_keys, run_plan
from perfexp.errors import UserError
from perfexp.plan import config
from perfexp.plan.config import Plan
from perfexp.records.grid import Column, Grid, Section
from perfexp.records.quantities import TIMES, time_title
from perfexp.records.record import Key, Record
from perfexp.records.rows import Row
from perfexp.records.summary import rows
from perfexp.records.wording import percent
from perfexp.run import worker_query
from perfexp.statistics import moderated
from perfexp.statistics.prior import Component

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
#: Process counts in the table of detectable differences; the sentence uses the second.
_PROCESSES = (3, 5, 10)


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
    process_spreads = spreads(rows(record))
    if not process_spreads:
        raise UserError(
            f"No two processes in {folder} have the same point; its report shows why (perfexp "
            "show)."
        )
    text = sentence_of(process_spreads)
    title = f"selfcheck: {processes} processes of {record.name}"
    emit(
        {
            "folder": folder,
            "sentence": text,
            "spreads": [spread.to_builtins() for spread in process_spreads],
        },
        [Section(title, grid_of(process_spreads)), text],
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


@dataclass(frozen=True, kw_only=True)
class ProcessSpread:
    """Variation of one kind of time between the processes that measured a point.

    Attributes:
        time: `device`, `latency` or `throughput`.
        processes: number of processes.
        component: variance between process medians.
    """

    key: Key
    time: str
    processes: int
    component: Component

    def to_builtins(self) -> dict[str, Any]:
        """Return the entry for selfcheck's JSON output; `cv` is the relative standard deviation.

        `detectable` has the smallest detectable ratio between runs, by number of processes each.
        """
        interval = moderated.spread_interval(self.component)
        return {
            "point": str(self.key),
            "phase": self.key.phase,
            "time": self.time,
            "processes": self.processes,
            "cv": interval.value,
            "cv_interval": [interval.low, interval.high],
            "variance": self.component.variance,
            "degrees": self.component.degrees,
            "detectable": {
                str(count): moderated.detectable_ratio(self.component, count)
                for count in _PROCESSES
            },
        }


def spreads(rows: Iterable[Row]) -> list[ProcessSpread]:
    """Return the spread for each point and kind of time that at least two processes measured.

    `perfexp selfcheck` summarizes them with `sentence_of` and shows them with `grid_of`.
    """
    process_spreads = []
    for row in rows:
        for name, medians in row.figures.items():
            # `own` is the variance that these processes show, without the prior
            if name in TIMES and medians.own:
                process_spreads.append(
                    ProcessSpread(
                        key=row.key,
                        time=name,
                        processes=len(medians.values),
                        component=medians.own,
                    )
                )
    return process_spreads


def sentence_of(process_spreads: Sequence[ProcessSpread]) -> str:
    """Return a sentence about each kind of time over all points, the last line of selfcheck.

    For example: `On this machine, latency varies by 0.9 % between processes; …`.
    """
    groups: dict[str, list[Component]] = {}
    for spread in process_spreads:
        groups.setdefault(spread.time, []).append(spread.component)
    count = _PROCESSES[1]
    varies, shows = [], []
    for time, components in groups.items():
        component = moderated.pooled(components)
        varies.append(f"{time} by {percent(component.spread)}")
        shows.append(percent(moderated.detectable_ratio(component, count)))
    return (
        f"On this machine, {_listed(varies).replace(' by ', ' varies by ', 1)} between processes; "
        f"{count} processes each show differences from {_listed(shows)}."
    )


def _listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def grid_of(process_spreads: Sequence[ProcessSpread]) -> Grid:
    """Return a table with a line for each point and kind of time.

    `CV` is the relative standard deviation between process medians. `N show` is the smallest
    relative difference between two runs that N processes each can show.
    """
    columns = [
        Column("point", prose=True, is_key=True),
        Column("time", prose=True, is_key=True),
        Column("CV"),
        Column("its 95 %", rank=2),
    ]
    columns += [Column(f"{count} show") for count in _PROCESSES]
    lines = []
    for spread in process_spreads:
        component = spread.component
        interval = moderated.spread_interval(component)
        line = [str(spread.key), time_title(spread.time), percent(component.spread)]
        line.append(f"{percent(interval.low or 0)} … {percent(interval.high or 0)}")
        line += [percent(moderated.detectable_ratio(component, count)) for count in _PROCESSES]
        lines.append(line)
    return Grid.of_cells(columns, lines)
