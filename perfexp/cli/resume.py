"""Resume: the command that a folder's run or sweep was started with, to go on with what is missing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from perfexp.cli import stored_command
from perfexp.cli.flags import CONFIG_DIR, MULTIRUN, flag_values
from perfexp.cli.overrides import quoted
from perfexp.cli.stored_command import Offer
from perfexp.errors import UserError
from perfexp.host import installation
from perfexp.orchestration.stored_sweep import is_measured, key_of, remembered_store
from perfexp.plan import plan_file
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.sweep_record import Sweep

#: Overrides that say where output goes or who looks on and are kept all the same: names of options, not addresses.
_KEPT = ("tracking", "profiler")


def with_resumed(arguments: Sequence[str]) -> tuple[list[str], Offer | None]:
    """A command line in which `resume=DIR` is replaced by the command that is stored there.

    What the user typed beside it wins over what is stored.

    Args:
        arguments: as the user typed them.

    Returns:
        The command line, and what the stored command could choose from; None where nothing is resumed.

    Raises:
        UserError: nothing can be resumed there, or not without the user typing more.
    """
    folders = [text.partition("=")[2] for text in arguments if text.startswith("resume=")]
    if not folders:
        return list(arguments), None
    typed = [text for text in arguments if not text.startswith("resume=")]
    folder = Path(folders[-1])
    if "${" in str(folder.absolute()):
        raise UserError(f"resume={folder}: rename the folder; ${{ in a path is read as an interpolation.")
    command, is_sweep, sweep = _stored(folder)
    _refuse_flags(command, typed, folder)
    again = {key_of(text) for text in typed}
    kept = [text for text in command if text[:1] != "-" and key_of(text) not in again and _is_repeated(text)]
    offer = Offer((installation.conf_dir(), *map(Path, flag_values(typed, *CONFIG_DIR))))
    stored_command.check(kept, offer, folder)
    flags = [text for text in command if text in MULTIRUN]
    alone = [] if is_sweep else ["hydra.mode=RUN"]  # a file of the experiment's may ask for a sweep
    store = remembered_store(sweep, folder, again) if sweep and "tracking=none" not in kept else {}
    sent = [f"{key}={quoted(text)}" for key, text in store.items()]
    return [*flags, *kept, *alone, *sent, f"output_dir={quoted(str(folder.absolute()))}", *typed], offer


def _is_repeated(argument: str) -> bool:
    """Whether a stored override is repeated; where output goes is up to the command line."""
    key = key_of(argument)
    if key == "timeout_seconds":  # a run that hung hangs again; a limit of a moment would end every worker
        return re.fullmatch(r"[1-9]\d{0,6}(\.\d+)?", argument.partition("=")[2]) is not None
    return is_measured(argument) or key in _KEPT or key.startswith("profiler.")


def _stored(folder: Path) -> tuple[list[str], bool, str | None]:
    """The command of a folder, whether it is that of a sweep, and the uid of the sweep that the folder belongs to."""
    if SweepPaths(folder).summary.exists():
        sweep = Sweep.load(folder)
        return sweep.command, True, sweep.uid
    plan = RunPaths(folder).plan
    if not plan.exists():
        raise UserError(f"resume={folder}: there is no run (plan.yaml) and no sweep (sweep.json) to go on with.")
    command = plan_file.read_to_resume(plan).get("command")
    if not isinstance(command, list) or not all(isinstance(text, str) for text in command):
        raise UserError(f"resume={folder}: its plan.yaml does not say by which command it was started.")
    return list(command), False, RunPaths(folder).sweep


def _refuse_flags(command: Sequence[str], typed: Sequence[str], folder: Path) -> None:
    """Refuse a command that took options from a folder which is not named now, or changed Hydra itself."""
    for text in command:
        key, _, value = text.partition("=")
        if key in CONFIG_DIR and not flag_values(typed, *CONFIG_DIR):
            again = shlex.join(["perfexp", f"--config-dir={value}", f"resume={folder}"])
            raise UserError(
                f"resume={folder}: it was started with {text}, whose files choose code. If it is yours, "
                f"say so again: {again}"
            )
        if re.fullmatch(r"hydra([./].*)?", key_of(text)) and key_of(text) not in map(key_of, typed):
            raise UserError(
                f"resume={folder}: {text!r} is not taken from a file. Repeat the command that started it, "
                f"with output_dir={folder}."
            )
