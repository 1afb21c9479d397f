"""perfexp ab: measure two variants in turn, in several processes, until a verdict is reached."""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perfexp.cli.composition import compose
from perfexp.commands import sides
from perfexp.commands.app import ConfigDir, Json, app, command_line, emit
from perfexp.commands.compare import print_comparison
from perfexp.commands.train_speed import given_keys
from perfexp.comparison import comparison_table, judging
from perfexp.comparison.document import Compared, Verdict, with_verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.errors import PerfexpError, UserError
from perfexp.host import interrupts
from perfexp.plan import config, naming, plan_file
from perfexp.plan.override_keys import key_of
from perfexp.plan.overrides import without_credentials
from perfexp.records import units
from perfexp.records.analysis import Analysis
from perfexp.records.fact_lookup import fact_at
from perfexp.records.old_names import arguments_of_today
from perfexp.records.paths import RunPaths, refuse_link
from perfexp.records.record import Record, Status
from perfexp.report.console import Console
from perfexp.run import callable_judge, driver
from perfexp.run.callable_judge import compare_callables
from perfexp.run.job import Job, exit_code
from perfexp.run.preparation import Assignment, with_processes
from perfexp.run.sweep_run import SweepRun
from perfexp.statistics import sequential

_SET_BY = {"processes": "the command: it measures until a verdict"}
#: Keys that only COMMON may set, for both variants.
_COMMON = dict.fromkeys(
    ("tracking", "output_dir", "speed_dir", "quiet"), "COMMON, for both variants"
)
#: Exit codes: a tracker did not accept a record; interrupted.
_NOT_SENT, _INTERRUPTED = 3, 130


VariantA = Annotated[
    str | None,
    typer.Argument(
        metavar="'A'", help="Overrides of the baseline as one quoted argument; '' for none."
    ),
]
VariantB = Annotated[
    str | None,
    typer.Argument(metavar="'B'", help="Overrides of the other variant: 'algorithm=fft'."),
]
Common = Annotated[
    list[str] | None,
    typer.Argument(metavar="COMMON", help="Overrides of both: model=resnet50 output_dir=DIR."),
]
MaxSeconds = Annotated[
    float, typer.Option(min=0, help="Begin no process that would probably end later.")
]
Left = Annotated[
    str | None,
    typer.Option(metavar="FILE:NAME", help="Function to compare with, in place of A."),
]
Right = Annotated[
    str | None, typer.Option(metavar="FILE:NAME", help="Function to judge, in place of B.")
]
Inputs = Annotated[
    str | None,
    typer.Option(metavar="FILE:NAME", help="Function that makes their inputs from a seed."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(min=0, help="Largest relative error of the right side's outputs."),
]


@app.command()
def ab(
    a: VariantA = None,
    b: VariantB = None,
    common: Common = None,
    max_seconds: MaxSeconds = 600.0,
    margin: sides.Margin = "1%",
    fdr: sides.Fdr = "5%",
    metric: sides.Metrics = None,
    allow: sides.Allow = None,
    config_dir: ConfigDir = None,
    left: Left = None,
    right: Right = None,
    inputs: Inputs = None,
    tolerance: Tolerance = None,
    as_json: Json = False,
) -> None:
    """Measure two variants in turn, A B B A …, until one is faster or both are the same.

    After the second pair of processes and each further pair, the runs are compared as by `perfexp
    compare DIR`. All these looks share one level of 5 %, so looking often does not add false
    verdicts. Without --metric the time `device` decides, or `latency` where there is no device
    time.

    To continue, repeat the command with output_dir=DIR and the same --margin, --fdr, --metric and
    --allow. Choosing them by the results would void the level.

    With --left, --right and --inputs, two functions of tensors are compared. The exit code is 1 if
    the right one does not compute the same, or cheats.

    Example: perfexp ab algorithm=default algorithm=fastest model=resnet50
    """
    settings = sides.settings(margin, fdr, metric, allow)
    if left or right or inputs or as_json:
        if not (left and right and inputs) or a is not None:
            raise UserError("Two functions need --left, --right and --inputs, and no overrides.")
        compared = compare_callables(
            left,
            right,
            inputs,
            margin=settings.margin,
            max_seconds=max_seconds,
            tolerance=tolerance,
        )
        emit(msgspec.to_builtins(compared), callable_judge.lines(compared), as_json=as_json)
        raise typer.Exit(int(compared.verdict is Verdict.NOT_COMPARABLE))
    if a is None or b is None:
        raise UserError("Missing argument 'A' or 'B': give the overrides of both, such as ''.")
    raise typer.Exit(_run(a, b, common or (), config_dir, settings, metric, max_seconds))


def _run(
    a: str,
    b: str,
    common: Sequence[str],
    config_dir: Path | None,
    settings: Settings,
    metric: str | None,
    max_seconds: float,
) -> int:
    """Measure two variants until they are decided, print the comparison, and return the exit code.

    Raises:
        UserError: the overrides are wrong, or the variants measure different points.
    """
    given_keys(common, _SET_BY)
    overrides = without_credentials(command_line(arguments_of_today(common), config_dir))
    variants = [without_credentials(_split("A", a)), without_credentials(_split("B", b))]
    commands = [_arguments(overrides, variant) for variant in variants]
    plains = list(map(compose, commands))
    _refuse_other_points(plains)
    common_words = [text for text in overrides if key_of(text) != "output_dir"]
    command = ["ab", *map(shlex.join, variants), *common_words, *_rule(settings, metric)]
    console = Console(quiet=plains[0]["quiet"])
    axes = dict.fromkeys(map(key_of, chain.from_iterable(variants)))
    output_dir = plains[0]["output_dir"]
    root = Path(output_dir) if output_dir else naming.sweep_folder(axes, "ab")
    sweep_run = SweepRun(folder=root, command=command, axes=axes, jobs=len(plains), console=console)
    assignments = _assignments(plains, variants, sweep_run)
    named = zip("AB", variants, strict=False)
    console.show_lines(
        "two variants in turn",
        [f"{name}  {shlex.join(variant) or 'as it is'}" for name, variant in named],
    )
    decisive = settings if metric else replace(settings, measures=())
    with interrupts.handled():
        try:
            sweep_run.begin()
            run = AbRun(sweep_run, console, decisive, max_seconds)
            code = _measure(run, sweep_run, assignments)
            return _show(root, settings, console, code)
        except KeyboardInterrupt:
            continuation = sweep_run.sweep.continuation(root)
            console.error(f"Interrupted. Finished points are on disk; to continue: {continuation}")
            return _INTERRUPTED


def _rule(settings: Settings, metric: str | None) -> list[str]:
    """Return the decision options that differ from their defaults, as words of the command.

    The folder stores them, since a continued run must decide by the same rule.
    """
    usual = Settings()
    words = []
    if settings.margin != usual.margin:
        words.append(f"--margin={100 * settings.margin:.12g}%")
    if settings.fdr != usual.fdr:
        words.append(f"--fdr={100 * settings.fdr:.12g}%")
    if metric and settings.measures:
        words.append(f"{sides.METRIC}{','.join(sorted(settings.measures))}")
    if settings.allowed:
        words.append(f"--allow={','.join(sorted(settings.allowed))}")
    return words


def _measure(run: AbRun, sweep_run: SweepRun, assignments: Sequence[Assignment]) -> int:
    """Measure both runs, close the folder, and return the exit code."""
    try:
        for assignment in assignments:
            sweep_run.accept(assignment)
        run.measure(assignments)
    finally:
        is_complete = sweep_run.close()
    is_sent = is_complete and all(assignment.is_sent for assignment in assignments)
    return max(run.exit_codes, default=0) or (0 if is_sent else _NOT_SENT)


def _show(root: Path, settings: Settings, console: Console, code: int) -> int:
    """Print the comparison and return an exit code.

    If the runs cannot be compared because some failed, return `code` and print why.

    Raises:
        UserError: the runs cannot be compared although none failed.
    """
    try:
        compared = judging.compare(sides.load([str(root)], None), settings)
        print_comparison(compared, console)
        console.note(comparison_table.conclusion(compared))
    except UserError as error:
        if not code:
            raise
        console.error(str(error))
    return code


def _split(name: str, text: str) -> list[str]:
    """Split the overrides of one variant into words.

    Raises:
        UserError: a word is not an override, or its key belongs to both variants.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"{name} {text!r}: {error}; quote the overrides as one argument: 'algorithm=fft'."
        ) from error
    given_keys(words, {**_SET_BY, **_COMMON})
    return arguments_of_today(words)


def _arguments(overrides: Sequence[str], variant: Sequence[str]) -> list[str]:
    """Return the command line of one variant.

    Its own overrides replace common overrides with the same key.
    """
    keys = set(map(key_of, variant))
    return [*(text for text in overrides if key_of(text) not in keys), *variant]


def _refuse_other_points(plains: Sequence[dict[str, Any]]) -> None:
    """Raise `UserError` unless both variants measure the same points.

    Their precision may differ.
    """
    points = []
    for plain in plains:
        plan = config.typed(plain)
        if plan.seeks_batch:
            raise UserError(
                "batch_size=max may find different batch sizes for A and B: set batch_size=N."
            )
        points.append({(key.phase, key.input_size, key.batch_size) for key in plan.timed_keys()})
    if points[0] != points[1]:
        raise UserError(
            "A and B measure different points: give both the same mode, input_size and batch_size."
        )


def _assignments(
    plains: Sequence[dict[str, Any]], variants: Sequence[Sequence[str]], sweep_run: SweepRun
) -> list[Assignment]:
    """Return both runs, with at least one process each.

    Both get as many processes as the folder's runs already have.

    Args:
        plains: plans of A and B as plain data.
        variants: overrides of A and of B.
        sweep_run: folder of the pair.
    """
    every = []
    for number, (plain, variant) in enumerate(zip(plains, variants, strict=True)):
        typed = {key_of(text): text.partition("=")[2] for text in variant}
        axes = {key: typed.get(key, _value(plain, key)) for key in sweep_run.axes}
        folder = naming.child_folder(None, sweep_run.paths.root, number, axes)
        refuse_link(folder)
        every.append((plain, axes, folder))
    processes = max(1, *(_processes(folder) for _, _, folder in every))
    assignments = []
    for number, (plain, axes, folder) in enumerate(every):
        plan = config.typed(plain := with_processes(plain, processes))
        membership = sweep_run.membership(number, axes, folder)
        membership.level = sequential.level(0)
        parts = (plan.model_name, plan.algorithm_name, plan.mode.name)
        name = naming.run_name(parts, axes)
        assignments.append(
            Assignment(plan=plan, plain=plain, folder=folder, name=name, sweep=membership)
        )
    return assignments


def _value(plain: dict[str, Any], key: str) -> str:
    """Return the value in this variant for a key that only the other variant overrides."""
    value = plain["choices"].get(key) or fact_at(plain, key)
    if isinstance(value, Mapping) or value is None:
        return "default"
    return str(value)


def _processes(folder: Path) -> int:
    """Return the process count in a folder's plan; 0 without a plan."""
    plan = RunPaths(folder).plan
    processes = plan_file.read(plan).get("processes") if plan.exists() else None
    if type(processes) is int:
        return min(processes, sequential.MOST)
    return 0


class AbRun:
    """Two runs measured in turn, for example A B, B A, A B.

    They are compared after each pair of processes, with a stricter level each time
    (`statistics.sequential`), so that looking often does not produce false verdicts.

    Attributes:
        exit_codes: exit codes of ended runs; the greatest counts.

    Args:
        sweep_run: the pair's folder and table.
        settings: how to compare the runs. Without measures, the most precise time at each point
            decides.
        max_seconds: time limit; no process starts that would probably end later.
    """

    def __init__(
        self,
        sweep_run: SweepRun,
        console: Console,
        settings: Settings,
        max_seconds: float,
    ) -> None:
        self.exit_codes: list[int] = []
        self._sweep_run, self._console = sweep_run, console
        self._settings = replace(settings, measures=settings.measures or judging.DECISIVE)
        # measures that the user named decide all together; else the most precise one per point does
        self._decisive = list if settings.measures else judging.decisive
        self._max_seconds, self._start = max_seconds, time.monotonic()

    def measure(self, assignments: Sequence[Assignment]) -> None:
        """Measure until there is a verdict, or until the time limit.

        Finished points are recorded before KeyboardInterrupt is raised.
        """
        results = Console(quiet=True, out=io.StringIO())  # the sweep's table shows them
        driver.measure(assignments, self._console, self._ended, turns=self._turns, results=results)

    def _turns(self, runs: Sequence[Job]) -> Iterator[tuple[Job, int | None]]:
        """Yield the next run with its replicate, for `driver.measure`, until the pair is decided.

        Args:
            runs: the two runs; a run that fails disappears from it, which ends the sequence.
        """
        if len(runs) != 2:
            return
        for number in count():
            begun = time.monotonic()
            in_turn = runs if number % 2 == 0 else runs[::-1]
            for run in list(in_turn):
                if number >= run.assignment.plan.least_processes:
                    run.set_num_processes(number + 1)
                yield run, number
            if len(runs) < 2 or self._is_over(runs, number + 1, 2 * time.monotonic() - begun):
                return

    def _is_over(self, runs: Sequence[Job], processes: int, next_end: float) -> bool:
        """Return whether measuring ends, judged by the results so far; also print them.

        Args:
            runs: the two runs.
            processes: number of processes that each run should have.
            next_end: estimated end of the next pair, on the monotonic clock, in seconds.
        """
        records = [run.assembled() for run in runs]
        measured = min(len(_replicates(record)) for record in records)
        for run in runs:
            if run.assignment.sweep:
                run.assignment.sweep.level = sequential.level(measured)
        if measured < processes:
            return True  # the run's report has the reason
        sides = []
        for name, record in zip("AB", records, strict=False):
            sides.append(Side.of(name, name, [Analysis.of(record)]))
        pairs = self._decisive(judging.compare(sides, self._settings).pairs)
        is_late = next_end - self._start > self._max_seconds
        verdicts = {pair.verdict for pair in pairs}
        if Verdict.NOT_COMPARABLE in verdicts:
            return True
        # a continued run was judged with this many processes before
        if measured > processes or processes < sequential.LEAST:
            return is_late
        self._console.note(_look(processes, pairs))
        return Verdict.UNDECIDED not in verdicts or is_late or processes >= sequential.MOST

    def _ended(self, assignment: Assignment, outcome: Record | PerfexpError) -> None:
        """Remember a run's exit code, and enter its outcome into the pair's folder."""
        if isinstance(outcome, PerfexpError):
            self._console.error(str(outcome))
            self.exit_codes.append(outcome.exit_code)
        else:
            self.exit_codes.append(exit_code(outcome))
        if assignment.sweep is not None:
            self._sweep_run.ended(assignment.sweep, assignment.name, assignment.folder, outcome)


def _replicates(record: Record) -> set[int]:
    """Return the replicates that have measured every point successfully.

    Only they count for the verdict and for the level of the next one.
    """
    timed, failed = set[int](), set[int]()
    for point in record.points:
        if point.key.is_timed:
            timed.add(point.key.replicate)
            if point.status is not Status.OK:
                failed.add(point.key.replicate)
    return timed - failed


def _look(processes: int, pairs: Sequence[Compared]) -> str:
    """Return an interim result in one line, such as `3 processes of each: latency B/A …`."""
    of_each = f"{processes} processes of each"
    if len(pairs) == 1:
        ratio, verdict = comparison_table.ratio_of(pairs[0]), comparison_table.verdict_of(pairs[0])
        return f"{of_each}: {pairs[0].measure} B/A {ratio} {verdict}"
    decided = len(pairs) - len(with_verdict(pairs, Verdict.UNDECIDED))
    return f"{of_each}: {decided} of {units.counted(len(pairs), 'figure')} decided"
