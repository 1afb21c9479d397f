"""The Typer application; each command's module registers its command on import."""

from __future__ import annotations

import typer

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
