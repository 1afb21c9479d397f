"""Words: names on the command line that have to be one of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfexp.errors import UserError, did_you_mean
from perfexp.host import installation

#: What training frameworks call fp16 is mixed precision with a scaled loss: fp16 in mmcv, amp elsewhere.
MIXED = {"fp16": "amp_fp16", "amp": "amp_fp16"}


def options(group: str, config_dir: Path | None = None) -> list[str]:
    """The names of a group's options.

    Args:
        group: `model`, `precision`, ….
        config_dir: folder with groups of the user's own.
    """
    folders = [installation.conf_dir(), *([config_dir] if config_dir else [])]
    return sorted({file.stem for folder in folders for file in folder.glob(f"{group}/*.yaml")})


def one_of(what: str, name: str, valid: Sequence[str]) -> str:
    """A name that is one of several.

    Args:
        what: it is.
        name: that was given.
        valid: all that are possible.

    Raises:
        UserError: it is none of them.
    """
    if name not in valid:
        raise UserError(f"'{name}' is no {what}. {did_you_mean(name, valid)}".rstrip())
    return name
