"""Output: what commands print, without anything that a terminal would act on."""

from __future__ import annotations

import typer

from perfexp.host import credentials
from perfexp.host.untrusted import printable


def echo(text: str, *, err: bool = False) -> None:
    """Print lines that may hold names of files and messages of others.

    Args:
        text: one or several lines.
        err: print on stderr.
    """
    typer.echo("\n".join(map(printable, credentials.mask(text).split("\n"))), err=err)
