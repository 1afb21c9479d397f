"""perfexp completion: print the shell script that completes commands, groups and options."""

from __future__ import annotations

from typing import Annotated

import typer

from perfexp.cli.completion import script
from perfexp.commands.app import app


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print a shell's completion script.

    Example: eval "$(perfexp completion bash)", or perfexp completion fish | source
    """
    typer.echo(script(shell), nl=False)
