"""Replace `resume=DIR` by the command with which this user began DIR.

A folder may come from somebody else, and a command can run code. So only a command that this user
began, as the signature shows, is run; any other is shown, to be typed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from perfexp.cli import own_models
from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.plan import plan_file
from perfexp.plan.flags import CONFIG_DIR
from perfexp.plan.override_keys import key_of, line_to_type
from perfexp.plan.overrides import quoted
from perfexp.records.old_names import arguments_of_today
from perfexp.records.paths import RunPaths, SweepPaths
from perfexp.records.record import USUAL_PRECISION
from perfexp.records.sweep_record import Sweep
from perfexp.run.sweep_run import remembered_store

#: Beginnings of the overrides that are not repeated: places, launchers, and the store, which the
#: user's cache names.
_LEFT_OUT = (
    "output_dir",
    "quiet",
    "cluster",
    "hydra/launcher",
    "hydra.launcher",
    "tracking.uri",
    "tracking.experiment",
)
#: Before and after a path in an override.
_SEPARATOR = r"""[\s,=:'"\[\]{}()]"""


class Begun(NamedTuple):
    """The command that began a folder.

    Attributes:
        command: overrides and flags, as stored in the folder.
        place: the current folder at that time; None if this user did not begin it.
        plan: plan of the run, or of one of the sweep's; empty if there is none.
        sweep: identity of the sweep; None for a run alone.
    """

    command: list[str]
    place: str | None
    plan: Mapping[str, Any]
    sweep: str | None = None

    def overrides(self, typed: Collection[str], is_wanted: Callable[[str], bool]) -> list[str]:
        """Return the words of the command under today's names.

        A command that the user has to type, and that names no precision, gets the plan's: the
        default has changed.

        Args:
            typed: words that the user has typed now; their keys are left out.
            is_wanted: returns whether a word is to be repeated.
        """
        words = arguments_of_today(self.command)
        choices = self.plan.get("choices")
        if self.place is None and isinstance(choices, Mapping):
            precision = choices.get("precision")
            if precision not in (None, USUAL_PRECISION) and "precision" not in map(key_of, words):
                words = [*words, f"precision={precision}"]
        typed_keys = set(map(_key_of, typed))
        return [text for text in words if _key_of(text) not in typed_keys and is_wanted(text)]

    def refuse_untyped(self, words: Sequence[str], subject: str, typing: Sequence[str]) -> None:
        """Raise `UserError` with the command line to type, if it may be another user's.

        It also raises if the command names files by a relative path, and this is another folder.

        Args:
            words: words of the stored command that nobody has typed now.
            subject: the folder in words.
            typing: the command line to type.
        """
        if self.place is None:
            why = "you did not begin it, or did with another home"
        elif self.place != str(Path.cwd()) and (own_models.named(words) or _name_files(words)):
            why = (
                f"it was begun in {self.place}, and its command names files, which are others here"
            )
        else:
            return
        line = foreign.command_line(typing) if line_to_type(words) else None
        if line is None:
            raise UserError(
                f"{subject}: {why}. Its command can't be shown: it is too long, or a terminal or a "
                "shell could take it for another one."
            )
        raise UserError(
            f"{subject}: {why}. Nothing was run. To go on, type its command if you trust "
            f"it:\n{line}"
        )


def with_resumed(arguments: Sequence[str]) -> list[str]:
    """Replace `resume=DIR` by the command stored there; overrides typed by the user have priority.

    Without `resume=` the arguments stay unchanged.

    Raises:
        UserError: nothing can be resumed there, or the user has to type the command.
    """
    folders = [text.partition("=")[2] for text in arguments if text.startswith("resume=")]
    if not folders:
        return list(arguments)
    typed = [text for text in arguments if not text.startswith("resume=")]
    folder = Path(folders[-1])
    if "${" in str(folder.absolute()):
        raise UserError(
            f"resume={folder}: rename the folder; ${{ in a path is read as an interpolation."
        )
    typed_keys = set(map(key_of, typed))
    if "output_dir" in typed_keys:
        raise UserError(f"resume={folder} measures into that folder: leave output_dir out.")
    begun = _begun(folder)
    words = begun.overrides(typed, lambda text: not key_of(text).startswith(_LEFT_OUT))
    if not SweepPaths(folder).summary.exists() and "experiment" in map(key_of, words):
        words.append("hydra.mode=RUN")  # an experiment's file may set a sweep
    words.append(f"output_dir={quoted(str(folder.absolute()))}")
    begun.refuse_untyped(words, f"resume={folder}", [*words, *typed])
    store: Mapping[str, str] = {}
    if begun.sweep and "tracking=none" not in words:
        store = remembered_store(begun.sweep, folder, typed_keys)
    return [*words, *(f"{key}={quoted(text)}" for key, text in store.items()), *typed]


def _begun(folder: Path) -> Begun:
    """Return the command that began a run or sweep folder.

    Raises:
        UserError: the folder has none, or was measured by `perfexp ab`.
    """
    if not SweepPaths(folder).summary.exists():
        return begun_run(folder)
    sweep = Sweep.load(folder)
    # `perfexp ab` measured its variants in turn, which only its own command can continue
    if sweep.in_turn:
        line = sweep.command_line(folder)
        shown = f" if you trust it: {line}" if line else ", which can't be shown"
        raise UserError(f"resume={folder}: to continue it, repeat its command{shown}")
    return Begun(
        sweep.command,
        SweepPaths(folder).begun_in(sweep),
        _plan_of(sweep, folder),
        sweep.uid,
    )


def begun_run(folder: Path) -> Begun:
    """Return the command that began a run's folder.

    `resume=` and `perfexp reproduce` repeat it.

    Raises:
        UserError: there is no run, or its plan.yaml cannot be read.
    """
    paths = RunPaths(folder)
    if not paths.plan.exists():
        raise UserError(
            f"resume={folder}: no run (plan.yaml) and no sweep (sweep.json) found; name another "
            "folder."
        )
    plan, begun_in = plan_file.read_begun(paths.plan)
    command = plan.get("command")
    if not isinstance(command, list) or not all(isinstance(text, str) for text in command):
        raise UserError(
            f"resume={folder}: its plan.yaml has no command; repeat the one that started it."
        )
    return Begun(command, begun_in, plan, paths.sweep)


def _plan_of(sweep: Sweep, folder: Path) -> Mapping[str, Any]:
    """Return the plan of a sweep's first run that has one; empty if no run has."""
    for child in sweep.children:
        with suppress(UserError):
            if record := sweep.record_of(child, folder):
                return record.plan
            plan = RunPaths(folder / child.directory).plan
            if plan.resolve().is_relative_to(folder.resolve()):
                return plan_file.read(plan)
    return {}


def _key_of(word: str) -> str:
    """Return the key of a word; both spellings of the flag --config-dir have the same key."""
    key = key_of(word)
    if key in CONFIG_DIR:
        return CONFIG_DIR[0]
    return key


def _name_files(words: Sequence[str]) -> bool:
    """Return whether a word may name something in the current folder by a relative path."""
    plain = [word.replace("\\", "").replace("file://", " ") for word in words]
    plan_text = "\n".join(plain)
    file_names = (path.name.replace("\\", "") for path in Path.cwd().iterdir())
    # of a million names few are in the command: a pattern of all would take minutes
    names = "|".join(
        map(re.escape, [".", "..", *(name for name in file_names if name in plan_text)])
    )
    entry = re.compile(rf"(^|{_SEPARATOR})({names})(/|$|{_SEPARATOR})")
    return any("${" in word or entry.search(word) for word in plain)
