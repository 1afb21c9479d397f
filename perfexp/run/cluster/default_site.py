"""The user's default site: words that `perfexp cluster use` adds to the command of every sweep.

They are in a file in the user's configuration folder, for example `cluster=NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfexp.errors import UserError
from perfexp.host import foreign
from perfexp.host.cache import user_folder
from perfexp.host.files import write_atomically
from perfexp.plan.flags import MULTIRUN

_LAUNCHER = "hydra/launcher"


def file() -> Path:
    """Return the file that stores the arguments."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "site.txt"


def words() -> list[str]:
    """Return the stored arguments, one per line in the file; none without a file.

    `perfexp cluster use` prints them, and `with_site` inserts them.

    Raises:
        UserError: the file is unreadable.
    """
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
    """Store arguments for later sweeps, or remove the file if there are none.

    `perfexp cluster use` calls it.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if chosen:
            file().parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file(), "".join(f"{word}\n" for word in chosen).encode())
        else:
            file().unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{file()} can't be written: {error.strerror}.") from error


def with_site(arguments: Sequence[str]) -> list[str]:
    """Insert the stored arguments at the start of a sweep command line.

    A typed key or folder replaces the stored value. With a typed launcher, the stored launcher
    settings are left out. Command lines without -m stay as they are. `main` calls it before
    composing.

    Args:
        arguments: command line with joined flags (`--config-dir=DIR`).
    """
    if not any(text in MULTIRUN for text in arguments):
        return list(arguments)
    typed = {text.lstrip("+~").partition("=")[0] for text in arguments}
    added = [word for word in words() if word.partition("=")[0] not in typed]
    if _LAUNCHER in typed:
        added = [word for word in added if not word.startswith("hydra.launcher.")]
    return [*added, *arguments]
