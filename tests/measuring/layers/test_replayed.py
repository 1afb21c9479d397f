"""The kernels of a graph against those of the call that was captured."""

import pytest

from perfexp.measuring.layers import Key, Pass
from perfexp.measuring.layers.attribution import Attributed, key_outside_modules
from perfexp.measuring.layers.events import ProfilerEvent
from perfexp.measuring.layers.profiling import Pattern


def kernel(name, start_ns=0):
    return ProfilerEvent(name, start_ns, 10, True, 7, 1, 0)


def row(path):
    return Key(path=path, call=0, operation=None, kind="Conv2d", which=Pass.forward)


def pattern(names):
    """Each kernel in a row of its own, named by its place; its data, which comes first, is not captured."""
    kernels = [Attributed(kernel(name), 0, row(str(place))) for place, name in enumerate(names)]
    return Pattern([Attributed(kernel("copy"), 0, key_outside_modules("data")), *kernels])


def replay(names, call=0):
    return [Attributed(kernel(name), call, key_outside_modules("graph")) for name in names]


def paths(rowed):
    return [each.key and each.key.path for each in rowed]


@pytest.mark.parametrize(
    ("captured", "replayed", "expected", "found"),
    [
        ("abcab", "abcab", ["0", "1", "2", "3", "4"], 1.0),
        ("abcab", "abxcab", ["0", "1", None, "2", "3", "4"], 1.0),
        ("abcab", "abab", ["0", "1", "3", "4"], 0.8),
        ("abc", "xyz", [None, None, None], 0.0),
        ("", "a", [None], 0.0),
    ],
)
def test_a_kernel_has_the_row_of_its_like_in_the_same_order(captured, replayed, expected, found):
    known = pattern(captured)
    assert paths(known.identify(replay(replayed))) == expected
    assert (known.replays, known.least_found) == (1, pytest.approx(found))


def test_each_replay_begins_anew_and_its_data_is_not_in_it():
    copies = [Attributed(kernel("copy"), call, key_outside_modules("data")) for call in (0, 1)]
    seen = [
        copies[0],
        *replay("ab", 0),
        copies[1],
        *replay("ab", 1),
        Attributed(kernel("spin"), None, None),
    ]
    known = pattern("ab")
    rowed = known.identify(seen)
    assert [each.kernel for each in rowed] == [each.kernel for each in seen]
    assert paths(rowed) == [None, "0", "1", None, "0", "1", None]
    assert [each.key.which for each in rowed[::3] if each.key] == [Pass.data, Pass.data]
    assert known.replays == 2


def test_foreign_kernel_inside_a_replay_does_not_split_it():
    stray = Attributed(kernel("stray"), None, None)
    rowed = pattern("abab").identify([*replay("ab"), stray, *replay("ab")])
    assert paths(rowed) == ["0", "1", None, "2", "3"]


def test_the_replay_that_lacks_most_counts():
    known = pattern("abcd")
    known.identify([*replay("abcd", 0), *replay("ab", 1), *replay("abc", 2)])
    assert (known.replays, known.least_found) == (3, 0.5)
