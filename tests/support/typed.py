"""Commands that perfexp prints for the user to type."""

import shlex


def shown(printed: str, begins: str = "perfexp ") -> list[str]:
    """Return the words of the only command line in a text, without its program."""
    [line] = [line for line in printed.splitlines() if line.startswith(begins)]
    return shlex.split(line)[1:]
