"""`python -m perfexp` and the console script: a command's name goes to commands/, anything else to main."""

from __future__ import annotations

import sys


def main() -> int:
    """Dispatch the process's command line; returns its exit code."""
    from perfexp.commands import NAMES

    arguments = sys.argv[1:]
    if arguments and arguments[0] in NAMES:
        from perfexp.commands import run

        return run(arguments)
    from perfexp.main import main as application

    return application(arguments)


if __name__ == "__main__":
    sys.exit(main())
