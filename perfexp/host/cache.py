"""Cache measured values between runs, as JSON files in the user's cache folder.

`JsonCache` is one such file. The races of convolution and attention algorithms store their results
here, as do the device's peak rates and the workspace sizes, so that a later run on the same device
need not measure them again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from perfexp.host.files import write_atomically
from perfexp.host.locks import private_folder


class JsonCache:
    """A JSON file with measured values by key, for one context.

    The file is read at the first access and written at each change.

    Args:
        folder: folder with the cache files.
        context: JSON values that the results depend on, such as device and library versions. Each
            context has its own file, named by a hash.
    """

    def __init__(self, folder: Path, context: Mapping[str, Any]) -> None:
        text = json.dumps(context, sort_keys=True)
        self._context = dict(context)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self._entries: dict[str, Any] | None = None

    def entries(self) -> dict[str, Any]:
        """Return all values by key, oldest first; empty if the file is missing or damaged."""
        if self._entries is None:
            self._entries = self._read()
        return self._entries

    def find(self, key: str) -> Any:
        """Return the value stored under a key; None if there is none."""
        return self.entries().get(key)

    def add(self, key: str, value: Any) -> None:
        """Store one JSON value; several runs may write to the same file at once."""
        self.update({key: value})

    def update(self, values: Mapping[str, Any], *, removed: Iterable[str] = ()) -> None:
        """Store JSON values by key, and remove other keys from the file.

        The file is read again under a lock, so that values from concurrent runs stay. If it cannot
        be written, the values last as long as this process.
        """
        self._entries = {**self.entries(), **values}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # without flock, FileLock could use a lock file, which would outlive a killed process
            with FileLock(self.path.with_suffix(".lock"), fallback_to_soft=False):
                stored = {**self._read(), **values}
                for key in removed:
                    stored.pop(key, None)
                content = {"context": self._context, "findings": stored}
                write_atomically(self.path, json.dumps(content, indent=1).encode())

    def remove(self, keys: Iterable[str]) -> None:
        """Remove entries from the file for later runs; this process still finds them."""
        self.update({}, removed=keys)

    def _read(self) -> dict[str, Any]:
        """Return the file's entries; empty if it cannot be read or has another layout."""
        try:
            entries = json.loads(self.path.read_text())["findings"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return entries


def cache_folder(name: str) -> Path:
    """Return the folder for one kind of cache, such as `~/.cache/perfexp/tracebacks`."""
    return user_folder("XDG_CACHE_HOME", ".cache") / name


def user_folder(variable: str, usual: str) -> Path:
    """Return perfexp's folder under an XDG base directory.

    Caches, the signing key and the default cluster site are below such folders.

    Args:
        variable: environment variable with the base directory, such as `XDG_CACHE_HOME`.
        usual: default base directory in the user's home, such as `.cache`.
    """
    base = os.environ.get(variable)
    return (Path(base) if base else home() / usual) / "perfexp"


def home() -> Path:
    """Return the user's home folder.

    A user without a home, for example in a container, gets a private temporary folder.
    """
    try:
        return Path.home()
    except RuntimeError:
        return private_folder()
