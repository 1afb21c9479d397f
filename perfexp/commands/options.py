"""list: what can be chosen in each group of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from perfexp import config
from perfexp.errors import UserError, did_you_mean


def list_options(
    group: Annotated[
        str | None, typer.Argument(help="models, algorithms, gpus, modes, experiments, …; all if none.")
    ] = None,
    config_dir: Annotated[Path | None, typer.Option(help="Folder with groups of your own.")] = None,
) -> None:
    """List the options of a group, each with what its file says of itself."""
    folders = [config.conf_dir(), *([config_dir] if config_dir else [])]
    groups = sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")})
    if group is None:
        for name in groups:
            typer.echo(f"{name:<12} {', '.join(file.stem for file in _files(folders, name))}")
        return
    chosen = next((name for name in groups if group in (name, f"{name}s", f"{name}es")), None)
    if chosen is None:
        raise UserError(f"There is no group '{group}'. {did_you_mean(group, groups)}")
    files = _files(folders, chosen)
    width = max(len(file.stem) for file in files) + 2
    for file in files:
        typer.echo(f"{file.stem:<{width}}{_about(file)}".rstrip())


def _files(folders: list[Path], group: str) -> list[Path]:
    return sorted({file.stem: file for folder in folders for file in folder.glob(f"{group}/*.yaml")}.values())


def _about(file: Path) -> str:
    """The first comment of a file; of a device its memory and power as well."""
    text = file.read_text(encoding="utf-8")
    comments = (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    about = next((comment for comment in comments if not comment.startswith("@package")), "")
    facts = (yaml.safe_load(text) or {}).get("facts")
    if not facts:
        return about
    bandwidth = f"{facts['memory_bytes_per_second'] / 1e12:.2f} TB/s"
    power = f"{facts['power_watts']:.0f} W" if facts["power_watts"] else "power not given"
    return f"{about}; {bandwidth}, {power}"
