"""Print the output of commands without terminal control sequences."""

from __future__ import annotations

import typer

from perfexp.host import credentials
from perfexp.host.untrusted import printable


def echo(text: str, *, err: bool = False) -> None:
    """Print lines that may contain foreign file names and messages."""
    typer.echo("\n".join(map(printable, credentials.mask(text).split("\n"))), err=err)
