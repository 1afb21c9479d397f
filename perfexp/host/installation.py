"""Location of the configuration groups."""

from __future__ import annotations

from pathlib import Path

from perfexp.errors import PerfexpError


def conf_dir() -> Path:
    """Return the folder of the configuration groups: next to the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise PerfexpError(f"perfexp is installed without its configuration: no conf/ in or beside {package}.")
