"""Resume: the command that a folder's run or sweep was started with, to go on with what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfexp import config
from perfexp.errors import UserError
from perfexp.paths import RunPaths, SweepPaths
from perfexp.sweep_record import Sweep

#: Hydra's flags for a folder of the user's own groups.
CONFIG_DIR = ("--config-dir", "-cd")
MULTIRUN = ("-m", "--multirun")
#: Overrides that could have code run which nobody typed here, and what could read the environment.
_UNSAFE, _UNSAFE_ANYWHERE = ("hydra", "profiler.options", "profiler.tool"), ("_target_", "${")
#: Overrides that say where output goes or who looks on and are kept all the same: names of options, not addresses.
_KEPT = ("stage", "tracking", "profiler")


def with_resumed(arguments: Sequence[str]) -> list[str]:
    """A command line in which `resume=DIR` is replaced by the command that is stored there.

    Args:
        arguments: as the user typed them.

    Raises:
        UserError: nothing can be resumed there, or not without the user saying so.
    """
    folders = [text.partition("=")[2] for text in arguments if text.startswith("resume=")]
    if not folders:
        return list(arguments)
    others = [text for text in arguments if not text.startswith("resume=")]
    folder = Path(folders[-1])
    stored, is_sweep = _stored(folder)
    _refuse_unsafe(stored, others, folder)
    kept = [text for text in stored if text in MULTIRUN or (text[0] != "-" and (_is_measured(text) or _is_kept(text)))]
    alone = [] if is_sweep else ["hydra.mode=RUN"]  # a file of the experiment's may ask for a sweep
    return [*kept, *alone, f"output_dir={_quoted(str(folder.absolute()))}", *others]


def joined_flags(arguments: Sequence[str]) -> list[str]:
    """A command line in which `--config-dir DIR` is one word, as `--config-dir=DIR`.

    Args:
        arguments: as the user typed them.
    """
    joined: list[str] = []
    for text in arguments:
        if joined and joined[-1] in CONFIG_DIR:
            joined[-1] = f"{CONFIG_DIR[0]}={text}"
        else:
            joined.append(text)
    return joined


def measures_the_same(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two commands differ only in where output goes and how it looks.

    Args:
        first: overrides and flags.
        second: likewise.
    """
    return sorted(filter(_is_measured, first)) == sorted(filter(_is_measured, second))


def _is_measured(argument: str) -> bool:
    """Whether an override says what is measured, rather than where output goes and how it looks."""
    return argument.lstrip("+~").partition("=")[0].split(".")[0] not in config.NOT_MEASURED


def _is_kept(argument: str) -> bool:
    key = argument.partition("=")[0]
    return key in _KEPT or key.startswith("profiler.")


def _stored(folder: Path) -> tuple[list[str], bool]:
    """The command of a folder's sweep or run, and whether it is a sweep."""
    if SweepPaths(folder).summary.is_file():
        return Sweep.load(folder).command, True
    plan = RunPaths(folder).plan
    if not plan.is_file():
        raise UserError(f"resume={folder}: there is no run (plan.yaml) and no sweep (sweep.json) to go on with.")
    command = config.read(plan).get("command")
    if not isinstance(command, list) or not all(isinstance(text, str) for text in command):
        raise UserError(f"resume={folder}: its plan.yaml does not say by which command it was started.")
    return list(command), False


def _refuse_unsafe(stored: Sequence[str], given: Sequence[str], folder: Path) -> None:
    """A folder may come from somebody else: what chooses code in it has to be typed again."""
    for text in stored:
        key, _, value = text.partition("=")
        if key in CONFIG_DIR and not any(argument.startswith(CONFIG_DIR) for argument in given):
            raise UserError(
                f"resume={folder}: it was started with {text}, whose files choose code. If it is yours, "
                f"say so again: perfexp --config-dir={value} resume={folder}"
            )
        if key.lstrip("+~").startswith(_UNSAFE) or any(part in text for part in _UNSAFE_ANYWHERE):
            raise UserError(
                f"resume={folder}: '{text}' is not taken from a file. Repeat the command that started it, "
                f"with output_dir={folder}."
            )


def _quoted(text: str) -> str:
    """A value as Hydra's grammar takes any text."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
