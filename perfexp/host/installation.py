"""Locate the configuration groups (conf/), and build commands that start Python processes."""

from __future__ import annotations

import sys
from pathlib import Path

from perfexp.errors import PerfexpError


def conf_dir() -> Path:
    """Return the folder with the configuration groups.

    It is next to the package in a checkout, and inside the package when installed.

    Raises:
        PerfexpError: there is no such folder.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise PerfexpError(
        f"perfexp is installed without its configuration: no conf/ in or beside {package}."
    )


def is_here_on_path() -> bool:
    """Return whether Python searches the current folder for modules.

    `python -m perfexp` does, for example, but `perfexp` does not. It decides whether new processes,
    and messages about missing modules, consider that folder.
    """
    return "" in sys.path or str(Path.cwd()) in sys.path


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new process.

    The new process searches the current folder for modules only if this process does (`python -m
    perfexp`). A foreign folder may contain a torch.py. Workers, the fork server and the tracker's
    sender are started by it.
    """
    return [sys.executable, *([] if is_here_on_path() else ["-P"]), "-m", module, *arguments]
