"""Entry point: `python -m perfexp` and the console script `perfexp`.

The first word decides: a command's name, such as `list`, goes to `perfexp.commands`; help and
completion are answered here; anything else is a measurement and goes to `perfexp.main`. Each path
imports only what it needs, since imports delay every command.
"""

from __future__ import annotations

import sys
from pathlib import Path

from perfexp.errors import UserError, missing_package
from perfexp.version import __version__

try:
    from perfexp.cli import usage
    from perfexp.cli.completion import QUERY, candidates
    from perfexp.cli.usage import COMMANDS, OLD_COMMANDS
    from perfexp.host import crash_report, interrupts, streams
    from perfexp.host.installation import conf_dir
    from perfexp.plan.flags import CONFIG_DIR, flag_values
except ModuleNotFoundError as error:
    print(f"error: {missing_package(error) or error}", file=sys.stderr)
    sys.exit(UserError.exit_code)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    streams.install()
    try:
        return dispatch(sys.argv[1:])
    except Exception as error:  # such as a module that can't be imported
        failure = crash_report.failure(error)
        print(f"error: {failure}", file=sys.stderr)
        return failure.exit_code


def dispatch(arguments: list[str]) -> int:
    """Run a command line and return its exit code.

    Help and version need neither Hydra nor Typer.

    Args:
        arguments: words after the program's name.
    """
    try:
        if arguments[:1] == ["help"] and arguments[1:2] and arguments[1] in COMMANDS:
            arguments = [*arguments[1:], "--help"]
        if arguments and arguments[0] in (*COMMANDS, *OLD_COMMANDS):
            from perfexp.commands import run  # Typer and rich: not needed to measure

            return run(arguments)
        if arguments and arguments[0] == QUERY:
            for text in candidates(arguments[1:]):
                print(text)
            return 0
        if usage.is_asked_for(arguments):
            folders = [conf_dir(), *map(Path, flag_values(arguments, *CONFIG_DIR))]
            try:
                print(usage.text(folders, arguments))
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code
            return 0
        if "--version" in arguments or arguments == ["-V"]:
            print(f"perfexp {__version__}")
            return 0
        from perfexp.main import main as application

        code = application(arguments)
    except KeyboardInterrupt:  # before there was anything to interrupt
        code = 130
    interrupts.ignore()
    return code


if __name__ == "__main__":
    sys.exit(main())
