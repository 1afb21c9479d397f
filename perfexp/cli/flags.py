"""Flags: the words of a command line that begin with a hyphen, perfexp's and Hydra's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

#: Hydra's flags for a folder of the user's own groups, and for a sweep.
CONFIG_DIR = ("--config-dir", "-cd")
MULTIRUN = ("-m", "--multirun")
#: Raises the limit on the runs of a sweep.
MAX_JOBS = "--max-jobs"
#: Says what would be measured, and measures nothing.
DRY_RUN = "--dry-run"
#: Replaces the results that are in the run's folder.
OVERWRITE = "--overwrite"


def joined_flags(arguments: Sequence[str]) -> list[str]:
    """A command line in which `--config-dir DIR` is one word, as `--config-dir=DIR`.

    Args:
        arguments: as the user typed them.
    """
    joined: list[str] = []
    for text in arguments:
        if joined and joined[-1] in CONFIG_DIR:
            joined[-1] = f"{CONFIG_DIR[0]}={text}"
        else:
            joined.append(text)
    return joined


def flag_values(arguments: Sequence[str], *names: str) -> list[str]:
    """The values of one of Hydra's flags, written `--flag value` or `--flag=value`.

    Args:
        arguments: command line.
        names: of the flag.
    """
    found = [value for name, value in pairwise(arguments) if name in names]
    return found + [value for name, _, value in (text.partition("=") for text in arguments) if name in names and value]
