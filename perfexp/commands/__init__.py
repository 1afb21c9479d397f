"""Commands: work on finished results, `perfexp COMMAND …`. Only the module of the command that runs is imported.

Measurements are started by `perfexp key=value …` (`perfexp.main`), and by `benchmark`, which calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from perfexp.commands.app import app, echo
from perfexp.errors import PerfexpError, UserError
from perfexp.host import crash_report
from perfexp.host.files import refuse_deleted_cwd

#: Modules that are not called as their command: `list` would hide a built-in function, `completion` is a module of cli.
_MODULES = {"list": "list_options", "env": "doctor", "completion": "shell_completion"}


def load(name: str) -> None:
    """Import the module of a command (`perfexp.cli.usage.COMMANDS`), which registers the command in `app`."""
    import_module(f"{__name__}.{_MODULES.get(name) or name.replace('-', '_')}")


def run(argv: Sequence[str]) -> int:
    """Run a command, given by its name and its arguments; return the exit code, and print errors on stderr."""
    try:
        refuse_deleted_cwd()
        load(argv[0])
        app(args=list(argv), prog_name="perfexp")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except PerfexpError as error:
        echo(f"error: {error}", err=True)
        return error.exit_code
    except Exception as error:
        echo(f"error: {crash_report.failure(error)}", err=True)
        return UserError.exit_code  # 1 is an answer: a regression, a difference
    return 0
