"""perfexp reproduce: measure the plan of a record again, and show whether the figures are the same."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perfexp.cli.composition import compose
from perfexp.cli.resume import Begun, begun_run
from perfexp.commands import compare, sides
from perfexp.commands.app import RECORD, SWEEP, ConfigDir, app, echo
from perfexp.commands.show import refuse_unfinished
from perfexp.commands.train_speed import given_keys
from perfexp.comparison import comparability, judging, reproduction
from perfexp.comparison.document import Comparison
from perfexp.comparison.judging import Settings
from perfexp.comparison.pairing import Side
from perfexp.comparison.reproduction import EXIT_CODES, Outcome, Reproduction
from perfexp.devices import nvml
from perfexp.devices.cpu import processor_name
from perfexp.doctor import environment
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.plan import config, naming, plan_file
from perfexp.plan.flags import CONFIG_DIR, DRY_RUN
from perfexp.plan.override_keys import is_measured, key_of
from perfexp.plan.overrides import quoted
from perfexp.records.analysis import Analysis
from perfexp.records.fact_lookup import fact_at
from perfexp.records.record import LARGEST, TIMED, Record, Status
from perfexp.records.sizes import seeks_batch
from perfexp.run import container

#: Fresh processes that measure a small run again at least, and the largest number of points of a small run.
_PROCESSES, _FEW_POINTS = 5, 3
#: Largest number of processes that a record may choose: it may be somebody else's.
_MOST_PROCESSES = 100


@app.command()
def reproduce(
    place: Annotated[
        Path, typer.Argument(metavar="DIR", help="A run's folder, or its record.json.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Overrides of a record that you did not begin, or that differ here.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Fresh processes; by default as in the record, at least 5 for 3 points.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Measure in this container image, which is on this machine."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="PROGRAM", help="Container engine; by default docker, or else podman."
        ),
    ] = None,
    margin: sides.Margin = "1%",
    fdr: sides.Fdr = "5%",
    metric: sides.Metrics = None,
    allow: sides.Allow = None,
    config_dir: ConfigDir = None,
    dry_run: Annotated[
        bool, typer.Option(DRY_RUN, help="Check the record, and print what would be measured.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print outcome, folder and comparison; all else goes to stderr."
        ),
    ] = False,
) -> None:
    """Measure a record's plan again and compare: REPRODUCED, DIFFERS, UNDECIDED or NOT COMPARABLE.

    The command of a record that you did not begin must be typed. The same command with the output_dir of an attempt
    continues it. Exit codes: 0 reproduced, 1 differs, 2 undecided, not comparable or refused.

    Example: perfexp reproduce outputs/2026-11-28/100000-resnet50-b1
    """
    settings = sides.settings(margin, fdr, metric or ",".join(reproduction.MEASURES), allow)
    record = _read(place)
    side = Side.of("A", str(place), [Analysis.of(record)])
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        again = _settle(
            record, place, overrides or (), processes, config_dir, composed_here=image is None
        )
        outcome, compared = _known(record, settings, in_image=image is not None), None
        if outcome is None:
            code = _measure(again, image, engine, dry_run=dry_run)
            if dry_run or code not in (
                0,
                1,
                3,
            ):  # refused or interrupted; 1: some points failed, 3: not sent
                raise typer.Exit(code)
            outcome, compared = _judge(side, again, settings)
        if compared is not None and not as_json:
            compare.print_comparison(compared)
        for line in outcome.lines():
            echo(line)
    if as_json:
        answer = {
            "outcome": outcome.outcome,
            "reasons": outcome.reasons,
            "folder": str(again.folder),
        }
        echo(json.dumps(answer | {"comparison": msgspec.to_builtins(compared)}, indent=1))
    raise typer.Exit(EXIT_CODES[outcome.outcome])


@dataclass(frozen=True, kw_only=True)
class _Repetition:
    """The command line that measures a record's plan again, and its folder.

    Attributes:
        plan: plan of the record.
        chosen: keys with other values than in the record's command.
        readable: paths of the command line that a container needs.
    """

    arguments: tuple[str, ...]
    folder: Path
    plan: Mapping[str, Any]
    chosen: tuple[str, ...]
    readable: tuple[Path, ...]
    has_gpus: bool

    def changes(self, plain: Mapping[str, Any]) -> list[str]:
        """The keys in which a plan measures something else than the record's, without those chosen now."""
        as_stored = json.loads(json.dumps(plain, default=str))
        lines = plan_file.differences(self.plan, as_stored)
        return [
            line
            for line in lines
            if not f"{line.partition(':')[0]}.".startswith(tuple(f"{key}." for key in self.chosen))
        ]


def _read(place: Path) -> Record:
    """Read a record whose plan is the one that was measured; raises UserError for any other."""
    if place.is_dir() and not (place / RECORD).exists():
        if (place / SWEEP).is_file():
            raise UserError(
                f"{place} is a sweep; name the folder of one of its runs (perfexp status {place})."
            )
        refuse_unfinished(place)
    record = Record.load(place)
    if plan_file.plan_hash(record.plan) != record.plan_hash:
        raise UserError(
            f"{place}: the plan in it does not match its plan_hash; it was changed. Nothing was run."
        )
    return record


def _settle(
    record: Record,
    place: Path,
    overrides: Sequence[str],
    processes: int | None,
    config_dir: Path | None,
    *,
    composed_here: bool,
) -> _Repetition:
    """Compose the record's command; raises UserError if somebody has to type it, or it has another plan here."""
    given = given_keys(overrides, {"processes": "--processes", "resume": "the folder"})
    processes = processes or _default_processes(record)
    found = [] if "batch_size" in given else _found_batches(record, given)
    flags = [] if config_dir is None else [f"{CONFIG_DIR[0]}={config_dir}"]
    typed = [*flags, *overrides, *found, *([] if processes is None else [f"processes={processes}"])]
    begun = _begun(record, place)
    repeated = begun.overrides(typed, is_measured)
    if repeated:
        begun.refuse_untyped(
            repeated, str(place), ["reproduce", str(place), *repeated, *flags, *overrides]
        )
    arguments = [*repeated, *typed]
    plain = compose(arguments)
    plan = config.typed(plain)
    folder = naming.run_folder(replace(plan, stage=None), "again").absolute()
    if folder.resolve() == _folder_of(place).resolve():
        raise UserError(f"output_dir={folder} is the record's own folder; choose another.")
    named = (
        Path(text.partition("=")[2]) for text in arguments if not text.startswith("output_dir=")
    )
    differing = {key_of(text) for text in [*overrides, *found] if text not in record.command}
    again = _Repetition(
        arguments=tuple(
            [text for text in arguments if not text.startswith("output_dir=")]
            + ["hydra.mode=RUN", f"output_dir={quoted(str(folder))}"]
        ),
        folder=folder,
        plan=record.plan,
        chosen=(*differing, "processes"),
        readable=tuple(path for path in named if path.is_absolute() and path.exists()),
        has_gpus=fact_at(record.environment, "device.kind") == "cuda",
    )
    if composed_here and (why := plan_file.refusal_of_sources(record.plan, plain)):
        raise UserError(f"{place} was measured with other code: {why} Nothing was run.")
    if composed_here and (changes := again.changes(plain)):
        listed = "\n  ".join(changes[:20])
        commit = fact_at(record.environment, "git.commit")
        made = f"perfexp {record.perfexp_version}{f' (commit {commit})' if commit else ''}"
        raise UserError(
            f"{place}: its command gives another plan here than in the record, which {made} made:\n  {listed}\n"
            "Use that version, or type the values again as KEY=VALUE. Nothing was run."
        )
    return again


def _folder_of(place: Path) -> Path:
    return place if place.is_dir() else place.parent


def _begun(record: Record, place: Path) -> Begun:
    """The record's command: that of this user if the plan beside it is signed and has the same."""
    with suppress(UserError):
        begun = begun_run(_folder_of(place))
        if begun.command == record.command:
            return begun
    return Begun(record.command, None, record.plan)


def _found_batches(record: Record, given: Collection[str] = ()) -> list[str]:
    """Overrides with the batches that a search has found, so that it is not repeated; keys that are given now stay."""
    shared, overrides = record.plan.get("batch_size"), []
    for phase in TIMED:  # names of a record may not choose keys
        key, own = (
            f"mode.{phase}.batch_size",
            fact_at(record.plan, f"mode.{phase}.batch_size"),
        )
        is_measured = fact_at(record.plan, f"mode.{phase}") is not None
        if not is_measured or key in given or not seeks_batch(shared if own is None else own):
            continue
        points = [point.key for point in record.points if point.key.phase == phase]
        if len({key.input_size for key in points}) > 1:
            raise UserError(
                "Each size of this record has a largest batch of its own: type batch_size=max or =N."
            )
        batches = sorted({key.batch_size for key in points} - {LARGEST})
        overrides.append(f"{key}={batches or 'max'}".replace(" ", ""))
    return [*overrides, *(["batch_size=1"] if seeks_batch(shared) else [])]


def _default_processes(record: Record) -> int | None:
    """Fresh processes of a small run; None leaves the number of the plan, as for whole trainings and several ranks."""
    timed = [
        point.key for point in record.points if point.key.is_timed and point.status is Status.OK
    ]
    has_ranks = any(
        fact_at(record.plan, f"gpu.{name}") not in (None, 1) for name in ("count", "nodes")
    )
    is_long = record.plan.get("epochs") or has_ranks
    if is_long or sum(key.replicate == 0 for key in timed) > _FEW_POINTS:
        return None
    processes = max(_PROCESSES, len({key.replicate for key in timed}))
    if processes > _MOST_PROCESSES:
        raise UserError(f"The record is of {processes} processes: set --processes=N.")
    return processes


def _known(record: Record, settings: Settings, *, in_image: bool) -> Reproduction | None:
    """The outcome where facts of this machine rule out a comparison before anything is measured."""
    now = {**environment.collect(), "device": _device(record)}
    if in_image:  # it has its own software
        now = {name: now[name] for name in ("cpu", "device")}
    here = msgspec.structs.replace(record, environment=now)
    differing = comparability.differences(record, here, settings.allowed)
    for one in differing:
        echo(f"differs here: {one.key} {one.baseline} → {one.other}")
    return reproduction.not_comparable(differing)


def _device(record: Record) -> dict[str, Any]:
    """Facts of this machine's device that corresponds to the record's, as far as they are known without torch."""
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
    same = sorted(
        (one for one in boards if one["name"] == name), key=lambda one: bool(one["uuid"] != uuid)
    )
    own = next(iter([*same, *boards]), None)
    if own is None and is_absent:
        return {"kind": "cpu", "name": processor_name()}
    return {"kind": "cuda", "name": own["name"], "uuid": own["uuid"], **own["facts"]} if own else {}


def _measure(again: _Repetition, image: str | None, engine: str | None, *, dry_run: bool) -> int:
    if image is None:
        return main([*again.arguments, *([DRY_RUN] if dry_run else [])])
    program = container.engine_path(engine)
    argv = container.command(
        program,
        image,
        container.image_digest(program, image),
        [
            *again.arguments,
            *([] if "tracking" in map(key_of, again.arguments) else ["tracking=none"]),
        ],
        writable=again.folder,
        readable=again.readable,
        has_gpus=again.has_gpus,
    )
    echo(shlex.join(argv))
    if dry_run:
        return 0
    again.folder.mkdir(parents=True, exist_ok=True)
    return container.run(argv)


def _judge(
    side: Side, again: _Repetition, settings: Settings
) -> tuple[Reproduction, Comparison | None]:
    new = Record.load(again.folder)
    if changes := again.changes(new.plan):  # an image has its own configuration
        return Reproduction(
            Outcome.NOT_COMPARABLE, (f"the plans differ in {'; '.join(changes)}",)
        ), None
    if all(point.status is not Status.OK for point in new.points if point.key.is_timed):
        return Reproduction(
            Outcome.DIFFERS, (f"no point was measured again ({new.status.value})",)
        ), None
    compared = judging.compare(
        [side, Side.of("B", str(again.folder), [Analysis.of(new)])], settings
    )
    return reproduction.judge(compared), compared
