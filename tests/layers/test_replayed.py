"""The kernels of a graph against those of the call that was captured."""

import pytest

from perfexp.layers import Key, Pass
from perfexp.layers.attribution import Attributed, in_no_module
from perfexp.layers.events import Event
from perfexp.layers.replayed import with_rows, without_data


def kernel(name, start_ns=0):
    return Event(name, start_ns, 10, True, 7, 1, 0)


def row(path):
    return Key(path=path, call=0, operation=None, kind="Conv2d", which=Pass.forward)


def pattern(names):
    """Each kernel in a row of its own, named by its place."""
    return [Attributed(kernel(name), 0, row(str(place))) for place, name in enumerate(names)]


def replay(names, call=0):
    return [Attributed(kernel(name), call, in_no_module("graph")) for name in names]


def paths(rowed):
    return [each.key and each.key.path for each in rowed]


@pytest.mark.parametrize(
    ("captured", "replayed", "expected"),
    [
        ("abcab", "abcab", ["0", "1", "2", "3", "4"]),
        ("abcab", "abxcab", ["0", "1", None, "2", "3", "4"]),
        ("abcab", "abab", ["0", "1", "3", "4"]),
        ("abc", "xyz", [None, None, None]),
        ("", "a", [None]),
    ],
)
def test_a_kernel_has_the_row_of_its_like_in_the_same_order(captured, replayed, expected):
    assert paths(with_rows(replay(replayed), pattern(captured))) == expected


def test_each_replay_begins_anew_and_its_data_is_not_in_it():
    copies = [Attributed(kernel("copy"), call, in_no_module("data")) for call in (0, 1)]
    seen = [copies[0], *replay("ab", 0), copies[1], *replay("ab", 1), Attributed(kernel("spin"), None, None)]
    rowed = with_rows(seen, pattern("ab"))
    assert [each.kernel for each in rowed] == [each.kernel for each in seen]
    assert paths(rowed) == [None, "0", "1", None, "0", "1", None]
    assert [each.key.which for each in rowed[::3] if each.key] == [Pass.data, Pass.data]


def test_the_data_of_a_call_that_is_made_kernel_by_kernel_is_not_captured():
    kernels = [Attributed(kernel("copy"), 0, in_no_module("data")), *pattern("a"), Attributed(kernel("lost"), 0, None)]
    assert without_data(kernels) == kernels[1:]
