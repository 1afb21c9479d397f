"""Stored sweeps: compare the commands of two sweeps, and remember in the user's cache where a sweep's runs are sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from perfexp.host import credentials
from perfexp.host.cache import Kept, cache_folder
from perfexp.plan import plan_file

#: Findings about a sweep in the user's cache: a folder that somebody else made may name another store.
_SWEEPS, _STORE = "sweeps", "store"


def remember_store(sweep: str, folder: Path, settings: Mapping[str, str]) -> None:
    """Keep where a sweep's runs are sent, so that resuming it from elsewhere sends the others there, too.

    Args:
        sweep: uid of the sweep.
        folder: folder of the sweep; another one with the same uid is a copy, or somebody else's.
        settings: see `Tracker`.
    """
    Kept(cache_folder(_SWEEPS), {"sweep": sweep, "folder": str(folder.resolve())}).add(_STORE, dict(settings))


def remembered_store(sweep: str, folder: Path, typed: Collection[str]) -> dict[str, str]:
    """Overrides, by key, for the store that this user's sweep was started with; typed overrides win.

    Args:
        sweep: uid of the sweep.
        folder: of the sweep, or of one of its runs.
        typed: keys of the overrides that the user typed.
    """
    places = (folder.resolve(), folder.resolve().parent)
    kept = [Kept(cache_folder(_SWEEPS), {"sweep": sweep, "folder": str(place)}).find(_STORE) for place in places]
    known = next((found for found in kept if isinstance(found, dict)), None)
    if "tracking" in typed or known is None:
        return {}
    texts = {f"tracking.{name}": str(text) for name, text in known.items()}
    return {key: text for key, text in texts.items() if key not in typed and not credentials.is_masked(text)}


def measures_the_same(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two commands differ only in where output goes and how it looks.

    Args:
        first: overrides and flags.
        second: the same of the other command.
    """
    return sorted(filter(is_measured, first)) == sorted(filter(is_measured, second))


def is_measured(argument: str) -> bool:
    """Whether an override changes the measurement, and not only where output goes or how it looks.

    Args:
        argument: `key=value`.
    """
    return key_of(argument).split(".")[0] not in plan_file.NOT_MEASURED


def key_of(argument: str) -> str:
    """The key of an override, without `+` and `~`.

    Args:
        argument: `key=value`.
    """
    return argument.lstrip("+~").partition("=")[0]
