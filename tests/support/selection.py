"""Which tests a run takes: the fast ones, and the slow ones that matter most; `--all` takes every test.

Only the tree decides, so two runs of one tree take the same tests.
"""

import zlib

import pytest


def add_options(parser):
    """Add `--all` and `--shard` to pytest's options."""
    group = parser.getgroup("perfexp")
    group.addoption(
        "--all", action="store_true", help="also run the slow tests that are not marked `always`"
    )
    group.addoption("--shard", metavar="N/COUNT", help="run a share of the tests, such as 2/5")


def deselect(config, items):
    """Remove the tests that this run leaves out."""
    left_out = set(items) - set(selected(config.option, config.args, items))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def selected(options, arguments, items):
    """Return the tests of this run.

    Args:
        options: parsed options of pytest.
        arguments: files, folders and tests on the command line; a test named there is not left out.
        items: collected tests.
    """
    takes_slow = options.all or any("::" in argument for argument in arguments)
    taken = items if takes_slow else [item for item in items if _is_default(item)]
    if options.shard is None:
        return taken
    number, count = _parse_shard(options.shard)
    return [item for item in taken if zlib.crc32(item.name.encode()) % count == number - 1]


def slow_after(count, cases):
    """Mark all but the first `count` cases of a large set as slow."""
    cases = list(cases)
    return cases[:count] + _marked(cases[count:], pytest.mark.slow)


def first_always(reason, cases, count=1):
    """Mark the first `count` cases of a slow test as `always`, with a reason."""
    cases = list(cases)
    return _marked(cases[:count], pytest.mark.always(reason)) + cases[count:]


def _is_default(item):
    is_slow = item.get_closest_marker("slow") is not None
    return not is_slow or item.get_closest_marker("always") is not None


def _parse_shard(text):
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--shard {text}: pass a number and a count, such as --shard 2/5")
    return int(number), int(count)


def _marked(cases, mark):
    """Return the cases with a mark; a tuple holds the values of several parameters."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark) for case in cases
    ]
