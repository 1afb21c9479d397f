"""Kept: what was found out once, kept from run to run in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfexp.host import untrusted
from perfexp.host.files import write_atomically
from perfexp.host.locks import private_folder


class Kept:
    """A file of findings for one context; another device, library or limit is another file.

    Args:
        folder: of all contexts.
        context: what all findings of the file have in common, as JSON values.
    """

    def __init__(self, folder: Path, context: Mapping[str, Any]) -> None:
        text = json.dumps(context, sort_keys=True)
        self._context = dict(context)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self._known: dict[str, Any] | None = None

    def find(self, key: str) -> Any:
        """What was found for a key, or None.

        Args:
            key: as it was added.
        """
        if self._known is None:
            self._known = self._read()
        return self._known.get(key)

    def add(self, key: str, finding: Any) -> None:
        """Keep a finding; runs beside this one may do so at the same time.

        Args:
            key: of what it was found for.
            finding: JSON values.
        """
        self._known = {**(self._known or {}), key: finding}
        self._rewrite(lambda known: {**known, key: finding})

    def remove(self, keys: Iterable[str]) -> None:
        """Forget findings.

        Args:
            keys: as they were added.
        """
        gone = set(keys)
        self._rewrite(lambda known: {key: finding for key, finding in known.items() if key not in gone})

    def _rewrite(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change the file; where that can't be done, the findings are those of this process."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with untrusted.open_append(self.path.with_suffix(".lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                content = {"context": self._context, "findings": change(self._read())}
                write_atomically(self.path, json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        """What lies there; a file that can't be read is begun anew."""
        try:
            findings = json.loads(self.path.read_text())["findings"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return findings if isinstance(findings, dict) else {}


def cache_folder(name: str) -> Path:
    """Where findings of a kind are kept unless the user says otherwise, by the XDG Base Directory Specification.

    Args:
        name: of the kind.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home() / ".cache") / "perfexp" / name


def home() -> Path:
    """The user's home; a private folder of temporary files for a user without one, as in containers."""
    try:
        return Path.home()
    except RuntimeError:
        return private_folder()
