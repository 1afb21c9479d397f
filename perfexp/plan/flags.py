"""Flags on a command line: words that start with a hyphen, from perfexp and from Hydra.

`main` separates them from overrides (`KEY=VALUE`) before Hydra reads the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from perfexp.errors import UserError

#: Hydra's flags for a folder with the user's own groups, and for a sweep.
CONFIG_DIR = ("--config-dir", "-cd")
MULTIRUN = ("-m", "--multirun")
#: Raise the limit on runs per sweep.
MAX_JOBS = "--max-jobs"
#: Print the plan without measuring.
DRY_RUN = "--dry-run"
#: Print results as JSON on stdout, and everything else on stderr.
JSON = "--json"
#: Print the metrics and notes that report.md has otherwise.
VERBOSE = ("-v", "--verbose")
#: Replace the results in the run's folder.
OVERWRITE = "--overwrite"
#: Flags for the process that measures one sweep run; nobody types them.
OF_SWEEP, REQUEUE, PARENT = "--of-sweep", "--requeue", "--parent"


def joined_flags(arguments: Sequence[str]) -> list[str]:
    """Join `--config-dir DIR` to the single word `--config-dir=DIR`, and `--max-jobs N` alike.

    Later code can then look at each word on its own.
    """
    joined: list[str] = []
    for text in arguments:
        if joined and joined[-1] in (*CONFIG_DIR, MAX_JOBS):
            name = MAX_JOBS if joined[-1] == MAX_JOBS else CONFIG_DIR[0]
            joined[-1] = f"{name}={text}"
        else:
            joined.append(text)
    return joined


def flag_values(arguments: Sequence[str], *names: str) -> list[str]:
    """Return the values of a Hydra flag with these spellings: `--flag value` or `--flag=value`.

    Commands need --config-dir before Hydra reads it.
    """
    values = [value for name, value in pairwise(arguments) if name in names]
    for text in arguments:
        name, _, value = text.partition("=")
        if name in names and value:
            values.append(value)
    return values


def refuse_no_folders(arguments: Sequence[str]) -> None:
    """Raise `UserError` for a `--config-dir` that is not a folder.

    `call_with_hydra` and commands call it.
    """
    for folder in flag_values(arguments, *CONFIG_DIR):
        if not Path(folder).is_dir():
            raise UserError(
                f"--config-dir {folder}: there is no such folder; "
                "name one that holds GROUP/NAME.yaml."
            )
