"""Start perfexp in a process of its own, for tests that signal it, or look at what it leaves."""

import subprocess
import sys


def start(*arguments, **options):
    """Start perfexp.

    Args:
        arguments: command line of perfexp.
        options: options for `subprocess.Popen`.
    """
    return subprocess.Popen([sys.executable, "-m", "perfexp", *arguments], **options)


def run(*arguments, seconds=120, **options):
    """Run perfexp to its end: a `subprocess.CompletedProcess` with what it printed, as text."""
    command = [sys.executable, "-m", "perfexp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **options)
