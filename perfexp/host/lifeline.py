"""Lifeline: what ties a process to the one that started it, so that nothing keeps running when that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

#: Of prctl(2).
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that does (Linux; elsewhere nothing happens).

    The kernel looks at the thread that started this process: the parent's must live as long as it does itself.

    Args:
        parent: its process id; where it has ended already, so does this process, now.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent and _has_ended(parent):  # before this process came to here
        os._exit(1)


def _has_ended(process: int) -> bool:
    """Whether a process is no more, or is only waited for by its parent (Linux)."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return True
    return state in (b"Z", b"X")
