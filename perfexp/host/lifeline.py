"""Tie a process to its parent, so that nothing keeps running when the parent is killed.

Workers, loader processes and forked copies call `die_with` first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

#: Option of prctl(2).
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends for any reason.

    Works only on Linux; elsewhere nothing happens. The kernel watches the thread that started this
    process, so that thread must live as long as the parent.

    Args:
        parent: process id of the parent; if it has already ended, this process exits at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent and _has_ended(parent):  # it ended before prctl took effect
        os._exit(1)


def _has_ended(process: int) -> bool:
    """Return whether a process is gone, or is a zombie (state Z or X in /proc)."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return True
    return state in (b"Z", b"X")
