"""Installation: location of the configuration groups, and whether modules are searched in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

from perfexp.errors import PerfexpError


def conf_dir() -> Path:
    """Return the folder of the configuration groups: next to the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise PerfexpError(
        f"perfexp is installed without its configuration: no conf/ in or beside {package}."
    )


def is_here_on_path() -> bool:
    """Return whether modules are searched in the current folder, as by `python -m perfexp` but not by `perfexp`."""
    return "" in sys.path or str(Path.cwd()) in sys.path


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process of its own.

    The working directory is on its path only if it is on this process's (`python -m perfexp`): a foreign folder may
    hold a torch.py.
    """
    return [sys.executable, *([] if is_here_on_path() else ["-P"]), "-m", module, *arguments]
