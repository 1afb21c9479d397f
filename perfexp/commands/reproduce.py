"""perfexp reproduce: measure a record's plan again, and show whether the figures are the same."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perfexp.cli.composition import compose
from perfexp.cli.resume import Begun, begun_run
from perfexp.commands import compare, sides
from perfexp.commands.app import RECORD, SWEEP, ConfigDir, app, command_line, echo
from perfexp.commands.show import refuse_unfinished
from perfexp.commands.train_speed import given_keys
from perfexp.comparison import comparability, comparison_table, judging
from perfexp.comparison.comparability import Difference, Role
from perfexp.comparison.document import Compared, Comparison, Verdict, measures_of, with_verdict
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.devices import nvml
from perfexp.devices.cpu import processor_name
from perfexp.doctor import environment
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.plan import config, naming, plan_file
from perfexp.plan.config import Plan
from perfexp.plan.flags import DRY_RUN
from perfexp.plan.override_keys import is_measured, key_of
from perfexp.plan.overrides import quoted
from perfexp.records import units
from perfexp.records.analysis import Analysis
from perfexp.records.fact_lookup import fact_at
from perfexp.records.paths import folder_of
from perfexp.records.record import LARGEST, TIMED, Record, Status
from perfexp.records.sizes import seeks_batch
from perfexp.run import container

#: Least number of fresh processes that measure a small run again.
_PROCESSES = 5
#: Largest number of points in a small run.
_FEW_POINTS = 3
#: Largest number of processes that a record may choose: it may be somebody else's.
_MOST_PROCESSES = 100
#: Measures that decide by default: p95 rarely has an interval, and another clock changes cycles but
#: not times.
MEASURES = ("device", "latency", "throughput", "memory", "energy", "accuracy")


Place = Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or its record.json.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides of a record that you did not begin, or that differ here.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Fresh processes; by default as in the record, at least 5 for 3 points.",
    ),
]
Image = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Measure in this container image, which is on this machine."),
]
Engine = Annotated[
    str | None,
    typer.Option(metavar="PROGRAM", help="Container engine; by default docker, or else podman."),
]
DryRun = Annotated[
    bool, typer.Option(DRY_RUN, help="Check the record, and print what would be measured.")
]
OutcomeJson = Annotated[
    bool,
    typer.Option("--json", help="Print outcome, folder and comparison; all else goes to stderr."),
]


@app.command()
def reproduce(
    place: Place,
    overrides: Overrides = None,
    processes: Processes = None,
    image: Image = None,
    engine: Engine = None,
    margin: sides.Margin = "1%",
    fdr: sides.Fdr = "5%",
    metric: sides.Metrics = None,
    allow: sides.Allow = None,
    config_dir: ConfigDir = None,
    dry_run: DryRun = False,
    as_json: OutcomeJson = False,
) -> None:
    """Measure a record's plan again and compare: REPRODUCED, DIFFERS, UNDECIDED or NOT COMPARABLE.

    Type the overrides of a record that you did not begin. The same command with the output_dir of
    an attempt continues it. Exit codes: 0 reproduced, 1 differs, 2 undecided, not comparable or
    refused.

    Example: perfexp reproduce outputs/2026-11-28/100000-resnet50-b1
    """
    settings = sides.settings(margin, fdr, metric or ",".join(MEASURES), allow)
    record = _read(place)
    side = Side.of("A", str(place), [Analysis.of(record)])
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        repetition = _settle(
            record, place, overrides or (), processes, config_dir, composed_here=image is None
        )
        outcome, compared = _known(record, settings, in_image=image is not None), None
        if outcome is None:
            code = _measure(repetition, image, engine, dry_run=dry_run)
            # 1: some points failed; 3: not sent to tracking; others: refused or interrupted
            if dry_run or code not in (0, 1, 3):
                raise typer.Exit(code)
            outcome, compared = _judge(side, repetition, settings)
        if compared is not None and not as_json:
            compare.print_comparison(compared)
        for line in outcome.lines():
            echo(line)
    if as_json:
        answer = {
            "outcome": outcome.outcome,
            "reasons": outcome.reasons,
            "folder": str(repetition.folder),
        }
        echo(json.dumps(answer | {"comparison": msgspec.to_builtins(compared)}, indent=1))
    # the same as for `perfexp check`
    raise typer.Exit({Outcome.REPRODUCED: 0, Outcome.DIFFERS: 1}.get(outcome.outcome, 2))


@dataclass(frozen=True, kw_only=True)
class _Repetition:
    """The command line that measures a record's plan again, and its folder.

    Attributes:
        arguments: words after `perfexp`.
        folder: output folder.
        plan: plan of the record.
        chosen: keys whose values differ from the record's command.
        readable: paths in the command line, which a container mounts.
        has_gpus: whether the record was measured on CUDA devices.
    """

    arguments: tuple[str, ...]
    folder: Path
    plan: Mapping[str, Any]
    chosen: tuple[str, ...]
    readable: tuple[Path, ...]
    has_gpus: bool

    def changes(self, plain: Mapping[str, Any]) -> list[str]:
        """Return the differences between a plan and the record's, except in `chosen` keys.

        Each is a line `KEY: OLD → NEW`.
        """
        as_stored = json.loads(json.dumps(plain, default=str))
        chosen = tuple(f"{key}." for key in self.chosen)
        lines = []
        for line in plan_file.differences(self.plan, as_stored):
            key, _, _ = line.partition(":")
            if not f"{key}.".startswith(chosen):  # the key, or one below it
                lines.append(line)
        return lines


def _read(path: Path) -> Record:
    """Read a record.

    Raises:
        UserError: it is unfinished or a sweep, or its plan was changed after the measurement.
    """
    if path.is_dir() and not (path / RECORD).exists():
        if (path / SWEEP).is_file():
            raise UserError(
                f"{path} is a sweep; name the folder of one of its runs (perfexp status {path})."
            )
        refuse_unfinished(path)
    record = Record.load(path)
    if plan_file.plan_hash(record.plan) != record.plan_hash:
        raise UserError(
            f"{path}: the plan in it does not match its plan_hash; it was changed. Nothing was run."
        )
    return record


def _settle(
    record: Record,
    source: Path,
    overrides: Sequence[str],
    processes: int | None,
    config_dir: Path | None,
    *,
    composed_here: bool,
) -> _Repetition:
    """Compose the record's command for a repetition.

    Args:
        record: record to reproduce.
        source: its folder, or its record.json.
        overrides: overrides that the user typed.
        processes: number of fresh processes; None for the default.
        config_dir: further folder with options.
        composed_here: whether the plan must be the record's; a container composes its own.

    Raises:
        UserError: the user must type the command, or it gives another plan here.
    """
    given_names = given_keys(overrides, {"processes": "--processes", "resume": "the folder"})
    processes = processes or _default_processes(record)
    batch_overrides = []
    # measure the batch size that the record's search found, instead of searching again
    if "batch_size" not in given_names:
        batch_overrides = _found_batches(record, given_names)
    flags = command_line((), config_dir)
    typed = [*flags, *overrides, *batch_overrides]
    if processes is not None:
        typed.append(f"processes={processes}")
    begun = _begun(record, source)
    repeated = begun.overrides(typed, is_measured)
    if repeated:
        begun.refuse_untyped(
            repeated, str(source), ["reproduce", str(source), *repeated, *flags, *overrides]
        )
    arguments = [*repeated, *typed]
    elsewhere = [text for text in arguments if not text.startswith("output_dir=")]
    plain = compose(arguments)
    plan = config.typed(plain)
    folder = _folder(plan, source)
    named = (Path(text.partition("=")[2]) for text in elsewhere)
    differing = {
        key_of(text) for text in [*overrides, *batch_overrides] if text not in record.command
    }
    repetition = _Repetition(
        arguments=(*elsewhere, "hydra.mode=RUN", f"output_dir={quoted(str(folder))}"),
        folder=folder,
        plan=record.plan,
        chosen=(*differing, "processes"),
        readable=tuple(path for path in named if path.is_absolute() and path.exists()),
        has_gpus=fact_at(record.environment, "device.kind") == "cuda",
    )
    # a container composes its own plan, with the code in its image
    if composed_here:
        _refuse_other_plan(record, source, repetition, plain)
    return repetition


def _folder(plan: Plan, source: Path) -> Path:
    """Return the repetition's folder; raise `UserError` if it is the record's own."""
    folder = naming.run_folder(replace(plan, stage=None), "again").absolute()
    if folder.resolve() == folder_of(source).resolve():
        raise UserError(f"output_dir={folder} is the record's own folder; choose another.")
    return folder


def _refuse_other_plan(
    record: Record, source: Path, repetition: _Repetition, plain: Mapping[str, Any]
) -> None:
    """Raise `UserError` if the record's command gives another plan or other code here.

    Args:
        plain: the plan as composed here.
    """
    if why := plan_file.refusal_of_sources(record.plan, plain):
        raise UserError(f"{source} was measured with other code: {why} Nothing was run.")
    if changes := repetition.changes(plain):
        listed = "\n  ".join(changes[:20])
        maker = f"perfexp {record.perfexp_version}"
        if commit := fact_at(record.environment, "git.commit"):
            maker += f" (commit {commit})"
        raise UserError(
            f"{source}: its command gives another plan here than in the record, "
            f"which {maker} made:\n  {listed}\n"
            "Use that version, or type the values again as KEY=VALUE. Nothing was run."
        )


def _begun(record: Record, path: Path) -> Begun:
    """Return the record's command, as this user's own if the plan beside it is signed for it."""
    with suppress(UserError):
        begun = begun_run(folder_of(path))
        if begun.command == record.command:
            return begun
    return Begun(record.command, None, record.plan)


def _found_batches(record: Record, given_names: Collection[str] = ()) -> list[str]:
    """Return overrides with the batch sizes that a search found, so that it is not repeated.

    Args:
        given_names: keys that the user typed, which keep their values.

    Raises:
        UserError: each size has another batch.
    """
    shared = record.plan.get("batch_size")
    overrides = []
    for phase in TIMED:  # names of a record may not choose keys
        key = f"mode.{phase}.batch_size"
        phase_batch = fact_at(record.plan, key)
        is_measured = fact_at(record.plan, f"mode.{phase}") is not None
        if (
            not is_measured
            or key in given_names
            or not seeks_batch(shared if phase_batch is None else phase_batch)
        ):
            continue
        points = [point.key for point in record.points if point.key.phase == phase]
        if len({key.input_size for key in points}) > 1:
            raise UserError(
                "Each size of this record has a largest batch of its own: "
                "type batch_size=max or =N."
            )
        batches = sorted({key.batch_size for key in points} - {LARGEST})
        overrides.append(f"{key}={batches or 'max'}".replace(" ", ""))
    if seeks_batch(shared):
        overrides.append("batch_size=1")
    return overrides


def _default_processes(record: Record) -> int | None:
    """Return the number of fresh processes for a small run.

    It is None, which keeps the plan's number, for large runs, whole trainings and several ranks.

    Raises:
        UserError: the record has more processes than a record may choose.
    """
    gpus = fact_at(record.plan, "gpu.count"), fact_at(record.plan, "gpu.nodes")
    has_ranks = not {None, 1}.issuperset(gpus)
    points = Counter(
        point.key.replicate
        for point in record.points
        if point.key.is_timed and point.status is Status.OK
    )
    if record.plan.get("epochs") or has_ranks or points[0] > _FEW_POINTS:
        return None
    processes = max(_PROCESSES, len(points))
    if processes > _MOST_PROCESSES:
        raise UserError(f"The record is of {processes} processes: set --processes=N.")
    return processes


def _known(record: Record, settings: Settings, *, in_image: bool) -> Reproduction | None:
    """Return the outcome if this machine's facts rule out a comparison; None if they do not."""
    now = {**environment.collect(), "device": _device(record)}
    if in_image:  # it has its own software
        now = {"cpu": now["cpu"], "device": now["device"]}
    record_here = msgspec.structs.replace(record, environment=now)
    differing = comparability.differences(record, record_here, settings.allowed)
    for difference in differing:
        echo(f"differs here: {difference.key} {difference.baseline} → {difference.other}")
    return not_comparable(differing)


def _device(record: Record) -> dict[str, Any]:
    """Return facts about this machine's device for the record, without torch.

    It is the GPU with the record's UUID, or else with its name, or else the first.
    """
    kind, rocm, name, uuid = (
        fact_at(record.environment, f"device.{fact}") for fact in ("kind", "rocm", "name", "uuid")
    )
    if kind == "cpu":
        return {"kind": "cpu", "name": processor_name()}
    boards, is_absent = list[dict[str, Any]](), False
    if kind == "cuda" and not rocm:
        try:
            boards, is_absent = nvml.all_boards()["boards"], True
        except Exception as error:  # only a missing library shows that no board is here
            is_absent = type(error).__name__ == "NVMLError_LibraryNotFound"
    # the same board, otherwise the same product, otherwise any
    board_here = max(
        boards,
        key=lambda board: (board["name"] == name, (board["name"], board["uuid"]) == (name, uuid)),
        default=None,
    )
    if board_here is None and is_absent:
        return {"kind": "cpu", "name": processor_name()}
    if not board_here:
        return {}
    return {
        "kind": "cuda",
        "name": board_here["name"],
        "uuid": board_here["uuid"],
        **board_here["facts"],
    }


def _measure(
    repetition: _Repetition, image: str | None, engine: str | None, *, dry_run: bool
) -> int:
    """Measure the repetition here or in a container image, and return the exit code."""
    if image is None:
        return main([*repetition.arguments, *([DRY_RUN] if dry_run else [])])
    program = container.engine_path(engine)
    argv = container.command(
        program,
        image,
        container.image_digest(program, image),
        [
            *repetition.arguments,
            *([] if "tracking" in map(key_of, repetition.arguments) else ["tracking=none"]),
        ],
        writable=repetition.folder,
        readable=repetition.readable,
        has_gpus=repetition.has_gpus,
    )
    echo(shlex.join(argv))
    if dry_run:
        return 0
    repetition.folder.mkdir(parents=True, exist_ok=True)
    return container.run(argv)


def _judge(
    side: Side, repetition: _Repetition, settings: Settings
) -> tuple[Reproduction, Comparison | None]:
    """Return the outcome, and the comparison of the record with its repetition.

    Without a comparison the outcome has the reason.
    """
    new = Record.load(repetition.folder)
    if changes := repetition.changes(new.plan):  # an image has its own configuration
        return Reproduction(
            Outcome.NOT_COMPARABLE, (f"the plans differ in {'; '.join(changes)}",)
        ), None
    if all(point.status is not Status.OK for point in new.points if point.key.is_timed):
        return Reproduction(
            Outcome.DIFFERS, (f"no point was measured again ({new.status.value})",)
        ), None
    compared = judging.compare(
        [side, Side.of("B", str(repetition.folder), [Analysis.of(new)])], settings
    )
    return outcome_of(compared), compared


class Outcome(StrEnum):
    """Outcome of a reproduction."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    UNDECIDED = "undecided"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Reproduction:
    """Outcome with its reasons, a line each, at least one."""

    outcome: Outcome
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return lines for the console, outcome first."""
        joint = " because" if self.outcome is Outcome.NOT_COMPARABLE else ":"
        first = f"{self.outcome.value.upper()}{joint} {self.reasons[0]}"
        return [first, *(f"  {line}" for line in self.reasons[1:])]


def not_comparable(differences: Sequence[Difference]) -> Reproduction | None:
    """Return the outcome if the runs' facts rule out comparing any figure; otherwise None.

    `perfexp reproduce` asks before it measures: another device, or a confounder that affects all
    measures and is not allowed, makes a measurement useless.
    """
    reasons = []
    for item in differences:
        is_confounder = item.role is Role.CONFOUNDER and not item.allowed and not item.measures
        if is_confounder or item.key == "device":
            remedy = f"; {item.help}" if item.help else ""
            reasons.append(f"{item.key}: {item.baseline} → {item.other}{remedy}")
    if not reasons:
        return None
    return Reproduction(Outcome.NOT_COMPARABLE, tuple(reasons))


def outcome_of(compared: Comparison) -> Reproduction:
    """Combine the verdicts on two runs of the same plan; the worst verdict counts.

    A figure that differs counts before a confounded figure, and that before an undecided one.

    Args:
        compared: comparison of the record (`A`) with the new run.
    """
    if reproduction := not_comparable(compared.sides[1].differences):
        return reproduction
    differing = _lines(compared, Verdict.WORSE, Verdict.BETTER)
    undecided = _lines(compared, Verdict.UNDECIDED)
    for item in compared.alone:
        if item.side == "A":
            # a point that the new run tried has a status
            lines = undecided if item.status is None else differing
            lines.append(f"not measured again: {comparison_table.alone_of(item)}")
    confounded = []
    if with_verdict(compared.pairs, Verdict.NOT_COMPARABLE):
        confounded = comparison_table.confounders(compared.sides[1])
    for outcome, reasons in (
        (Outcome.DIFFERS, differing),
        (Outcome.NOT_COMPARABLE, confounded),
        (Outcome.UNDECIDED, undecided),
    ):
        if reasons:
            return Reproduction(outcome, tuple(reasons))
    points = len({(pair.point, pair.key) for pair in compared.pairs})
    names = ", ".join(measures_of(compared.pairs))
    if not names:
        return Reproduction(Outcome.UNDECIDED, ("no figure was measured on both sides",))
    within = f"within ±{comparison_table.bare(compared.margin)}"
    reason = f"{names} of {units.counted(points, 'point')} {within}"
    return Reproduction(Outcome.REPRODUCED, (reason,))


def _lines(compared: Comparison, *verdicts: Verdict) -> list[str]:
    """Return a line for each figure with one of these verdicts, with both values and the ratio."""
    lines = []
    for pair in compared.pairs:
        if pair.verdict in verdicts:
            before = comparison_table.figure(pair.baseline, pair.unit)
            now = comparison_table.figure(pair.other, pair.unit)
            change = "" if pair.ratio is None else f", by {100 * (pair.ratio - 1):+.3g} %"
            lines.append(
                f"{pair.measure} of {pair.point}: {before} → {now}{change} "
                f"(ratio {comparison_table.ratio_of(pair)}){_why(pair, compared.margin)}"
            )
    return lines


def _why(pair: Compared, margin: float) -> str:
    """Return why a figure is undecided, as the end of its line; empty if it is decided."""
    if pair.verdict is not Verdict.UNDECIDED:
        return ""
    if pair.low is None or pair.high is None:
        return "; no interval: one side has a single process"
    if pair.high < 1 / (1 + margin) or pair.low > 1 + margin:
        return "; too few processes for a verdict among all figures"
    return f"; the interval is neither within nor beyond ±{comparison_table.bare(margin)}"
