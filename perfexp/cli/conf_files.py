"""Read the files in conf/ as text, without Hydra, for help, completion and lists.

Composing with Hydra would take a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from perfexp.plan.override_keys import flat


def options_below(folders: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """Return each group's options in some folders, with their files; a later folder wins.

    Help, completion and lists show them.
    """
    options: dict[str, dict[str, Path]] = {}
    for folder in folders:
        for file in sorted(folder.glob("*/*.yaml")):
            options.setdefault(file.parent.name, {})[file.stem] = file
    return options


def config_values(conf: Path) -> dict[str, Any]:
    """Return config.yaml values by key, for example `probes.layers`, without groups and Hydra.

    Help, completion and the check of words use their keys.
    """
    content = yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8"))
    return flat({key: content[key] for key in content if key not in ("defaults", "hydra")})


def comment_of(file: Path) -> str:
    """Return the comment at the top of an option's file, its description in lists."""
    text = file.read_text(encoding="utf-8")
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in lines if not line.startswith("# @package"))
