"""Resume: replace `resume=DIR` by the command stored in a run's or sweep's folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfexp.cli import stored_command
from perfexp.cli.flags import CONFIG_DIR, MULTIRUN, flag_values
from perfexp.cli.overrides import quoted
from perfexp.cli.stored_command import Offer
from perfexp.errors import UserError
from perfexp.host import installation
from perfexp.orchestration.sweep_run import remembered_store
from perfexp.plan import plan_file
from perfexp.plan.override_keys import is_measured, key_of
from perfexp.records.old_names import arguments_of_today
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import USUAL_PRECISION
from perfexp.records.sweep_record import Sweep

#: Overrides that are repeated although they do not concern the measurement: names of options, not addresses.
_REPEATED = ("tracking", "profiler")
#: Texts that a tracking store shows.
_TEXTS = ("tracking.run_name", "tracking.description", "tracking.tags")


def with_resumed(arguments: Sequence[str]) -> tuple[list[str], Offer | None]:
    """Replace `resume=DIR` by the command stored there; overrides that the user typed take precedence.

    Returns the command line, and the options that the stored command may choose; None if nothing is resumed. Raises
    UserError if nothing can be resumed there, or the user has to type more.
    """
    folders = [text.partition("=")[2] for text in arguments if text.startswith("resume=")]
    if not folders:
        return list(arguments), None
    typed = [text for text in arguments if not text.startswith("resume=")]
    folder = Path(folders[-1])
    if "${" in str(folder.absolute()):
        raise UserError(
            f"resume={folder}: rename the folder; ${{ in a path is read as an interpolation."
        )
    command, is_sweep, sweep, plan = _stored(folder)
    repeated, offer = repeated_overrides(command, plan, typed, [f"resume={folder}"], _is_repeated)
    flags = [text for text in command if text in MULTIRUN]
    mode = [] if is_sweep else ["hydra.mode=RUN"]  # an experiment's file may set a sweep
    typed_keys = {key_of(text) for text in typed}
    if "output_dir" in typed_keys:
        raise UserError(f"resume={folder} measures into that folder: leave output_dir out.")
    store = (
        remembered_store(sweep, folder, typed_keys)
        if sweep and "tracking=none" not in repeated
        else {}
    )
    sent = [f"{key}={quoted(text)}" for key, text in store.items()]
    return [
        *flags,
        *repeated,
        *mode,
        *sent,
        f"output_dir={quoted(str(folder.absolute()))}",
        *typed,
    ], offer


def repeated_overrides(
    command: Sequence[str],
    plan: Mapping[str, Any],
    typed: Sequence[str],
    words: Sequence[str],
    is_wanted: Callable[[str], bool] = is_measured,
) -> tuple[list[str], Offer]:
    """Select the overrides of a stored command that are repeated; those that the user typed take precedence.

    The precision is that of the stored plan where the command names none: the default was another one once.

    Returns them with the options that they may choose. Raises UserError, which names the folder by `words`, if the user
    has to type more.
    """
    command = arguments_of_today(command)
    _refuse_flags(command, typed, words)
    typed_keys = {key_of(text) for text in typed}
    choices = plan.get("choices")
    precision = choices.get("precision") if isinstance(choices, Mapping) else None
    if precision not in (None, USUAL_PRECISION) and "precision" not in map(key_of, command):
        command = [*command, f"precision={precision}"]
    repeated = [
        text
        for text in command
        if text[:1] != "-" and key_of(text) not in typed_keys and is_wanted(text)
    ]
    offer = Offer((installation.conf_dir(), *map(Path, flag_values(typed, *CONFIG_DIR))))
    stored_command.check(repeated, offer, words)
    return repeated, offer


def _is_repeated(argument: str) -> bool:
    key = key_of(argument)
    if key == "timeout_seconds":  # a limit of a moment would end every worker
        return re.fullmatch(r"[1-9]\d{0,6}(\.\d+)?", argument.partition("=")[2]) is not None
    is_text = key in _TEXTS or key.startswith("tracking.tags.")
    return is_measured(argument) or key in _REPEATED or key.startswith("profiler.") or is_text


def _stored(folder: Path) -> tuple[list[str], bool, str | None, Mapping[str, Any]]:
    """The command in a folder, whether it is a sweep's, the sweep's identity, and a plan (empty without one)."""
    if SweepPaths(folder).summary.exists():
        sweep = Sweep.load(folder)
        if sweep.in_turn:
            raise UserError(
                f"resume={folder}: repeat its command to continue it: {sweep.continuation(folder)}"
            )
        return sweep.command, True, sweep.uid, _plan_of(sweep, folder)
    path = RunPaths(folder).plan
    if not path.exists():
        raise UserError(
            f"resume={folder}: no run (plan.yaml) and no sweep (sweep.json) found; name another folder."
        )
    plan = plan_file.read_to_resume(path)
    command = plan.get("command")
    if not isinstance(command, list) or not all(isinstance(text, str) for text in command):
        raise UserError(
            f"resume={folder}: its plan.yaml has no command; repeat the one that started it."
        )
    return list(command), False, RunPaths(folder).sweep, plan


def _plan_of(sweep: Sweep, folder: Path) -> Mapping[str, Any]:
    """The plan of the first run of a sweep that has one."""
    for child in sweep.children:
        with suppress(UserError):
            if record := sweep.record_of(child, folder):
                return record.plan
            if (
                (plan := RunPaths(folder / child.directory).plan)
                .resolve()
                .is_relative_to(folder.resolve())
            ):
                return plan_file.read(plan)
    return {}


def _refuse_flags(command: Sequence[str], typed: Sequence[str], words: Sequence[str]) -> None:
    """Refuse a command with options from a folder that the user did not type, or with settings of Hydra."""
    for text in command:
        key, _, value = text.partition("=")
        if key in CONFIG_DIR and not flag_values(typed, *CONFIG_DIR):
            why = f"it was started with {text}, whose files choose code"
            raise stored_command.refusal(why, [f"--config-dir={value}"], words)
        if re.fullmatch(r"hydra([./].*)?", key_of(text)) and key_of(text) not in map(key_of, typed):
            raise stored_command.refusal(f"{text!r} is not accepted from a file", [text], words)
