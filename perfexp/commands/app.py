"""The Typer application on which commands register, and functions that several commands share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.errors import UserError, did_you_mean
from perfexp.host import credentials, installation
from perfexp.host.files import write_atomically
from perfexp.host.foreign import printable
from perfexp.models import torchvision_names
from perfexp.plan.flags import refuse_no_folders
from perfexp.records.grid import Section
from perfexp.report.console import Console
from perfexp.report.tables import json_results

#: Files by which commands recognize a run's or a sweep's folder.
RECORD, SWEEP, PLAN = "record.json", "sweep.json", "plan.yaml"
#: Training frameworks call mixed precision with a scaled loss fp16 (mmcv) or amp.
MIXED = {"fp16": "amp_fp16", "amp": "amp_fp16"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
#: Limit on GPUs, images and steps on the command line.
LARGEST = 1_000_000

ConfigDir = Annotated[Path | None, typer.Option(help="Folder with groups of your own.")]
Json = Annotated[bool, typer.Option("--json", help="Print results as JSON.")]
Uri = Annotated[str | None, typer.Option(help="Tracking store; by default outputs/mlflow.db here.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]

app = typer.Typer(
    name="perfexp",
    help="Work on finished results.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _group() -> None:
    """Work on finished results."""


def echo(text: str, *, err: bool = False) -> None:
    """Print lines without terminal control sequences and without credentials.

    Texts may contain foreign file names and messages.
    """
    typer.echo("\n".join(map(printable, credentials.mask(text).split("\n"))), err=err)


def emit(document: Any, parts: Iterable[Section | str], *, as_json: bool) -> None:
    """Print a command's results: the document as JSON, or the parts for readers.

    Commands with `--json` end with it.

    Args:
        document: results as JSON values.
        parts: sections and plain lines.
        as_json: whether the user typed `--json`.
    """
    if as_json:
        echo(json_results.text(document))
        return
    console = Console()
    for part in parts:
        if isinstance(part, str):
            echo(part)
        else:
            console.show_sections([part])


def options(group: str, config_dir: Path | None = None) -> list[str]:
    """Return the option names in a group, sorted.

    Commands check names and list groups with it.
    """
    named = set(torchvision_names.names()) if group == "model" else set()
    for folder in group_folders(config_dir):
        named |= {file.stem for file in folder.glob(f"{group}/*.yaml")}
    return sorted(named)


def group_folders(config_dir: Path | None) -> list[Path]:
    """Return the folders with configuration groups, the user's own folder last.

    Commands that read groups without Hydra search them.
    """
    if config_dir is not None:
        refuse_no_folders([f"--config-dir={config_dir}"])
    return [installation.conf_dir(), *([config_dir] if config_dir else [])]


def oldest(option: str, text: str | None) -> float:
    """Return the earliest time that an age option admits, in seconds since the epoch.

    `clean --older-than` and `list runs --since` use it.

    Args:
        option: option name for the error message.
        text: age such as `7d`; None means now.

    Raises:
        UserError: the text is not an age.
    """
    now = datetime.now(UTC).timestamp()
    if text is None:
        return now
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if not match:
        raise UserError(f"{option} {text!r} is not an age; give for example 90m, 12h, 7d or 2w.")
    return now - float(match[1]) * _SECONDS[match[2]]


def command_line(overrides: Iterable[str], config_dir: Path | None) -> list[str]:
    """Return the words of a run's command: the user's folder of groups, then overrides.

    Commands that compose a run call it.

    Raises:
        UserError: a word is not an override.
    """
    words = [f"--config-dir={config_dir}"] if config_dir else []
    for text in overrides:
        if "=" not in text:
            raise UserError(f"'{text}' is not an override: set KEY=VALUE, such as model=resnet18.")
        words.append(text)
    return words


def one_of(what: str, name: str, valid: Sequence[str]) -> str:
    """Return a name if it is valid.

    Options that name one of a few choices are checked by it.

    Args:
        what: noun for the error message, such as `layout`.
        name: name that the user typed.
        valid: valid names.

    Raises:
        UserError: the name is not valid; the message suggests the nearest names.
    """
    if name not in valid:
        raise UserError(f"{what} '{name}' not found. {did_you_mean(name, valid)}".rstrip())
    return name


def refuse_to_overwrite(files: Sequence[Path], remedy: str, *, force: bool) -> None:
    """Raise `UserError` if files exist, unless `force` is set; the message has the remedy."""
    existing = [str(file) for file in files if file.exists()]
    if existing and not force:
        raise UserError(f"{', '.join(existing)} would be overwritten. {remedy}, or add --force.")


def write_files(contents: Mapping[Path, bytes], remedy: str) -> None:
    """Write files and create their folders.

    `compare`, `export` and `show` write with it.

    Raises:
        UserError: a file cannot be written; the message ends with `remedy`.
    """
    for file, content in contents.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content)
        except OSError as error:
            raise UserError(f"{file} can't be written: {error.strerror}. {remedy}") from error
