"""Stored sweeps: compare the commands of two sweeps, and remember a sweep's tracking store in the user's cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from perfexp.host import credentials
from perfexp.host.cache import JsonCache, cache_folder
from perfexp.plan import plan_file

#: Entries of the user's cache: the store is not read from the sweep's folder, which somebody else may have made.
_SWEEPS, _STORE = "sweeps", "store"


def remember_store(sweep: str, folder: Path, settings: Mapping[str, str]) -> None:
    """Cache the store of a sweep for resuming it from elsewhere; another folder with its uid is a copy, or foreign."""
    JsonCache(cache_folder(_SWEEPS), {"sweep": sweep, "folder": str(folder.resolve())}).add(_STORE, dict(settings))


def remembered_store(sweep: str, folder: Path, typed: Collection[str]) -> dict[str, str]:
    """Return the cached store of a sweep, for its folder or a run's, as overrides by key; typed keys prevail."""
    places = (folder.resolve(), folder.resolve().parent)
    identities = ({"sweep": sweep, "folder": str(place)} for place in places)
    entries = (JsonCache(cache_folder(_SWEEPS), identity).find(_STORE) for identity in identities)
    store = next((entry for entry in entries if isinstance(entry, dict)), None)
    if "tracking" in typed or store is None:
        return {}
    texts = {f"tracking.{name}": str(text) for name, text in store.items()}
    return {key: text for key, text in texts.items() if key not in typed and not credentials.is_masked(text)}


def measures_the_same(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether two commands differ only in the place and appearance of output."""
    return sorted(filter(is_measured, first)) == sorted(filter(is_measured, second))


def is_measured(argument: str) -> bool:
    """Whether an override changes the measurement, and not only the place and appearance of output."""
    return key_of(argument).split(".")[0] not in plan_file.NOT_MEASURED


def key_of(argument: str) -> str:
    """Return the key of an override, without `+` and `~`."""
    return argument.lstrip("+~").partition("=")[0]
