"""Sender: a process that sends what it reads from stdin, a line of JSON each, and answers each on stdout."""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from typing import Any

import psutil

from perfexp.host.lifeline import die_with
from perfexp.host.locks import LockTimeout
from perfexp.tracking.delivery import Delivery
from perfexp.tracking.sending import reason, send

#: Memory that sending may use beyond what is imported: an answer of any length ends in an error.
_MEMORY_BYTES = 2**30


def main(parent: int) -> None:
    """Send until stdin ends.

    Args:
        parent: process id of the one that reads the answers; this process ends when that one does.
    """
    die_with(parent)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # MLflow prints
        with suppress(ImportError):  # `send` raises it again
            import mlflow  # noqa: F401 - before memory is limited
        _limit_memory()
        for line in sys.stdin.buffer:
            answers.write(f"{json.dumps(_answer(line))}\n")
            answers.flush()


def _answer(line: bytes) -> dict[str, Any]:
    try:
        return {"link": send(Delivery.from_line(line))}
    except Exception as error:
        return {"error": reason(error), "is_late": isinstance(error, LockTimeout)}


def _limit_memory() -> None:
    """Limit the address space, where the system can."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = psutil.Process().memory_info().vms + _MEMORY_BYTES
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


if __name__ == "__main__":
    main(int(sys.argv[1]))
