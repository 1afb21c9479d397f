"""A check that an mmsegmentation configuration exists, without importing mmseg or torch.

Composition runs it, so that a misspelled name is reported before a process starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfexp.errors import UserError, did_you_mean

INSTALL = "pip install 'perfexp[seg]'"
#: Maximum number of similar names in an error message.
_SHOWN = 6
_MODEL = "perfexp.models.mmseg.Mmseg"
#: Configuration folder in mmsegmentation's wheels.
CONFIGS = Path(".mim") / "configs"


def check(model: Mapping[str, Any]) -> None:
    """Raise `UserError` if an mmsegmentation model node names a missing configuration."""
    if model.get("_target_") != _MODEL or not isinstance(model.get("config"), str):
        return
    folder = _folder()
    if folder is None:
        raise UserError(
            f"model.config={model['config']} needs mmsegmentation, which is not installed. "
            f"{INSTALL}"
        )
    # a checkout has them elsewhere; reading them raises the error
    if folder.is_dir():
        find(model["config"], folder)


def find(name: str, folder: Path) -> Path:
    """Return a configuration file of mmsegmentation, by name or path.

    A user's own file counts unless mmsegmentation has a configuration with exactly this name.
    Raises `UserError` if there is none.
    """
    path = Path(name).expanduser()
    files = {file.stem: file for file in folder.rglob("*.py") if "_base_" not in file.parts}
    if name not in files and path.is_file():
        return path
    stem = path.name.removesuffix(".py")
    if stem in files and (len(path.parts) == 1 or (folder / path.parent / f"{stem}.py").is_file()):
        return files[stem]
    like = sorted(stem_of_file for stem_of_file in files if stem.lower() in stem_of_file.lower())
    shown = ", ".join(like[:_SHOWN]) + (
        f" and {len(like) - _SHOWN} more" if len(like) > _SHOWN else ""
    )
    hint = f"With that in their names: {shown}." if like else did_you_mean(stem, files)
    raise UserError(
        f"model.config={name} is neither a file nor one of mmsegmentation's {len(files)} "
        "configurations. "
        f"{f'{hint} ' if hint else ''}They lie in {folder}."
    )


def is_own(name: str) -> bool:
    """Return whether mmsegmentation has a configuration with this name, without `.py`."""
    folder = _folder()
    return folder is not None and any(file.stem == name for file in folder.rglob("*.py"))


def _folder() -> Path | None:
    """Return the folder with mmsegmentation's configurations; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("mmseg")
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent / CONFIGS if spec and spec.origin else None
