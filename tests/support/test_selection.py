"""Which tests a run takes, by its options."""

from itertools import chain
from types import SimpleNamespace

import pytest

from tests.support.selection import first_always, selected, slow_after


class Item:
    """A collected test with some marks."""

    def __init__(self, name, *marks):
        self.name, self._marks = name, marks

    def get_closest_marker(self, name):
        return name if name in self._marks else None


ITEMS = [Item(f"fast{number}") for number in range(40)]
ITEMS += [Item("slow", "slow"), Item("first", "slow", "always")]


def names(*arguments, everything=False, shard=None):
    options = SimpleNamespace(all=everything, shard=shard)
    return [item.name for item in selected(options, arguments, ITEMS)]


def test_default_run_takes_fast_tests_and_those_marked_always():
    assert names() == names("tests") == [item.name for item in ITEMS if item.name != "slow"]


def test_all_and_a_named_test_take_slow_tests():
    everything = [item.name for item in ITEMS]
    assert names(everything=True) == names("tests/end_to_end/test_faults.py::slow") == everything


def test_shards_hold_each_test_once():
    shards = [names(everything=True, shard=f"{number}/3") for number in (1, 2, 3)]
    assert sorted(chain(*shards)) == sorted(item.name for item in ITEMS)
    assert all(shards)


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "a/b", "-1/3", "1/0"])
def test_a_shard_that_does_not_exist_is_a_usage_error(text):
    with pytest.raises(pytest.UsageError, match="such as --shard 2/5"):
        names(shard=text)


def test_cases_of_a_set_get_their_marks():
    one, two = slow_after(1, [(1, 2), (3, 4)])
    assert (one, two.values, two.marks[0].name) == ((1, 2), (3, 4), "slow")
    one, two = first_always("reason", {"a": 1, "b": 2})
    assert (one.values, one.marks[0].args, two) == (("a",), ("reason",), "b")
