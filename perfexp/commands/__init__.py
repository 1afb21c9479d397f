"""Commands: one module for each `perfexp COMMAND …` on finished results.

May import: cli, comparison, convolution, data, devices, doctor, host, main, measuring, models,
    plan, prediction, records, report, roofline, run, statistics.
Used by: __main__, api.

Only the module of the running command is imported. Measurements start elsewhere: with `perfexp
key=value …` (`perfexp.main`), or with commands that call it, such as `train-speed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer

from perfexp.cli.usage import OLD_COMMANDS
from perfexp.commands.app import app, echo
from perfexp.errors import PerfexpError, UserError
from perfexp.host import crash_report
from perfexp.host.files import refuse_deleted_cwd

#: Modules named unlike their command: `list` would hide a built-in function, and
#: `completion` is a module of cli.
_MODULES = {
    "list": "list_options",
    "env": "doctor",
    "completion": "shell_completion",
    "baseline": "check",
}
#: Click's error for a wrong command line; Typer 0.29 has its own copy of Click.
_COMMAND_LINE_ERROR: Any = typer.BadParameter.mro()[2]


def load(name: str) -> None:
    """Import the module of a command in `perfexp.cli.usage.COMMANDS`, which registers it."""
    import_module(f"{__name__}.{_MODULES.get(name) or name.replace('-', '_')}")


def run(argv: Sequence[str]) -> int:
    """Run a command and return its exit code; print errors on stderr.

    `__main__` calls it if the first word is a command.

    Args:
        argv: command name, then its arguments.
    """
    name, *words = argv
    command = [*OLD_COMMANDS.get(name, (name,)), *words]
    try:
        refuse_deleted_cwd()
        load(command[0])
        code = app(args=command, prog_name="perfexp", standalone_mode=False)
    except _COMMAND_LINE_ERROR as error:
        echo(
            f"error: {_explained(error, command)}; perfexp {command[0]} --help explains it.",
            err=True,
        )
        return UserError.exit_code
    except PerfexpError as error:
        echo(f"error: {error}", err=True)
        return error.exit_code
    except Exception as error:
        echo(f"error: {crash_report.failure(error)}", err=True)
        return UserError.exit_code  # 1 is an answer: a regression, a difference
    if not isinstance(code, int):
        return 0
    return code


def _explained(error: Any, words: Sequence[str]) -> str:
    """Return the message for a wrong command line.

    An option that lacks its value is shown with a placeholder for the value.

    Args:
        error: Click's error.
        words: the command line.
    """
    text = " ".join(error.format_message().split()).rstrip(".")
    if "requires an argument" not in text:
        return text
    command: Any = typer.main.get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    name = error.option_name
    metavar = next((param.metavar for param in command.params if name in param.opts), None)
    return f"{name} needs a value: {name} {metavar or 'VALUE'}"
