"""Reports: an .ncu-rep through ncu itself, which alone can read it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from perfexp.errors import UserError
from perfexp.roofline.listing import EXPORT

_SECONDS = 600


def export(path: Path) -> bytes:
    """A report's raw page as CSV.

    Args:
        path: of the .ncu-rep.

    Raises:
        UserError: it is not there, ncu is not, or ncu can't read it.
    """
    if not path.is_file():
        raise UserError(f"{path} can't be read: there is no such file.")
    tool = shutil.which("ncu")
    if tool is None:
        raise UserError(
            f"{path} can only be read by ncu, which is not on the PATH. Where it is installed, export the report and "
            f"bring the CSV here: {EXPORT.replace('FILE', path.stem)}"
        )
    command = [tool, "--import", str(path), "--page", "raw", "--csv", "--print-units", "base"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{path}: ncu could not be run or did not end: {error}") from error
    if done.returncode or not done.stdout.strip():
        told = (done.stderr + done.stdout).decode(errors="replace").strip().splitlines()
        reason = next((line for line in told if "ERROR" in line), told[-1] if told else "it said nothing")
        raise UserError(
            f"{path}: ncu could not read it: {reason}. A report needs an ncu as new as the one that wrote it; "
            "the CSV of that one can be read here."
        )
    return done.stdout
