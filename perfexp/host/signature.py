"""Signature: whether this user gave a folder's command, by a key in the user's state folder."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from contextlib import suppress

from perfexp.errors import PerfexpError
from perfexp.host import foreign
from perfexp.host.cache import user_folder

_NUM_BYTES = 32


def of(content: bytes) -> str | None:
    """Return the user's signature of some content; None where no key can be kept."""
    try:
        key = _key()
    except (OSError, PerfexpError):
        return None
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def is_of(mark: object, content: bytes) -> bool:
    """Whether a mark is the user's signature of some content."""
    own = of(content)
    return (
        own is not None
        and isinstance(mark, str)
        and hmac.compare_digest(own.encode(), mark.encode(errors="replace"))
    )


def _key() -> bytes:
    """Return the user's key, made if it is missing.

    Raises `OSError` for a key that others can read, or may have made.
    """
    path = user_folder("XDG_STATE_HOME", ".local/state") / "key"
    if not os.path.lexists(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 0600
            file.write(secrets.token_bytes(_NUM_BYTES))
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was first
                os.link(file.name, path)
    with os.fdopen(foreign.open_regular(path, os.O_RDONLY), "rb") as file:
        about = os.fstat(file.fileno())
        key = file.read(_NUM_BYTES + 1)
    if (
        about.st_uid != os.geteuid()
        or stat.S_IMODE(about.st_mode) & 0o077
        or len(key) != _NUM_BYTES
    ):
        raise PermissionError(f"{path} is not a key of this user alone")
    return key
