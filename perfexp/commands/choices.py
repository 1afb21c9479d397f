"""Choices: check that a name on the command line is one of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfexp.errors import UserError, did_you_mean
from perfexp.host import installation

#: In training frameworks fp16 is mixed precision with a scaled loss: fp16 in mmcv, amp elsewhere.
MIXED = {"fp16": "amp_fp16", "amp": "amp_fp16"}


def options(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the names of a group's options, those in the folder of the user's own groups included."""
    folders = [installation.conf_dir(), *([config_dir] if config_dir else [])]
    return sorted({file.stem for folder in folders for file in folder.glob(f"{group}/*.yaml")})


def one_of(what: str, name: str, valid: Sequence[str]) -> str:
    """Return a name if it is valid.

    Args:
        what: noun for the name, for the message.

    Raises:
        UserError: the name is not valid.
    """
    if name not in valid:
        raise UserError(f"{what} '{name}' not found. {did_you_mean(name, valid)}".rstrip())
    return name
