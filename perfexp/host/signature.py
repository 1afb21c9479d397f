"""Sign a plan with this user's key, to tell own folders from foreign ones.

A run folder stores the command that began it, and resuming runs that command again. It is run only
if the folder's signature is the user's. The key is a file in the user's state folder.
"""

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
    """Return the user's signature of some content, in hexadecimal digits.

    None means that no key can be stored or read.
    """
    try:
        key = _key()
    except (OSError, PerfexpError):
        return None
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def is_of(mark: object, content: bytes) -> bool:
    """Return whether `mark`, read from a folder, is the user's signature of this content.

    Plans and the places of sweeps are signed.
    """
    expected = of(content)
    return (
        expected is not None
        and isinstance(mark, str)
        and hmac.compare_digest(expected.encode(), mark.encode(errors="replace"))
    )


def _key() -> bytes:
    """Return the user's key (32 bytes), and create it if it is missing.

    Raises:
        OSError: other users can read the key, or may have created it.
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
        status = os.fstat(file.fileno())
        key = file.read(_NUM_BYTES + 1)
    if (
        status.st_uid != os.geteuid()
        or stat.S_IMODE(status.st_mode) & 0o077
        or len(key) != _NUM_BYTES
    ):
        raise PermissionError(f"{path} is not a key of this user alone")
    return key
