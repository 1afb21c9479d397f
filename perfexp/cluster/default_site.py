"""The user's site: words of `perfexp cluster use` that come before those of each sweep that is typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfexp.cli.flags import MULTIRUN
from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.host.cache import user_folder
from perfexp.host.files import write_atomically

_LAUNCHER = "hydra/launcher"


def file() -> Path:
    """Return the file of the words."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "site.txt"


def words() -> list[str]:
    """Return the words, one per line of the file; none without one."""
    try:
        lines = foreign.read_bytes(file()).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"{file()} can't be read: {error}. Write it again: perfexp cluster use SITE."
        ) from error
    return [line for line in lines if line.strip()]


def use(chosen: Sequence[str]) -> None:
    """Store the words, or remove the file if there are none; raises UserError where it can't be written."""
    try:
        if chosen:
            file().parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file(), "".join(f"{word}\n" for word in chosen).encode())
        else:
            file().unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{file()} can't be written: {error.strerror}.") from error


def with_site(arguments: Sequence[str]) -> list[str]:
    """Put the words before those of a sweep (joined flags); a key or folder that was typed replaces the stored one.

    With another launcher than the stored one, none of its settings are added.
    """
    if not any(text in MULTIRUN for text in arguments):
        return list(arguments)
    typed = {text.lstrip("+~").partition("=")[0] for text in arguments}
    added = [word for word in words() if word.partition("=")[0] not in typed]
    if _LAUNCHER in typed:
        added = [word for word in added if not word.startswith("hydra.launcher.")]
    return [*added, *arguments]
