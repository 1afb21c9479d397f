"""`python -m perfexp` and the console script: a command's name goes to commands/, anything else to main."""

from __future__ import annotations

import sys

from perfexp import interrupts


def main() -> int:
    """Dispatch the process's command line; returns its exit code."""
    from perfexp.commands import NAMES

    arguments = sys.argv[1:]
    if arguments and arguments[0] in NAMES:
        from perfexp.commands import run

        return run(arguments)
    try:
        from perfexp.main import main as application

        code = application(arguments)
    except KeyboardInterrupt:  # before there was anything to interrupt
        code = 130
    interrupts.ignore()
    return code


if __name__ == "__main__":
    sys.exit(main())
