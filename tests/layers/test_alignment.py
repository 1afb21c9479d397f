"""Operations of two passes, found again where one of them has others between."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from perfexp.layers.table import aligned

NAMES = st.lists(st.sampled_from("abc"), max_size=12)


def longest(left, right):
    """Length of the longest common subsequence, by definition."""
    if not left or not right:
        return 0
    if left[-1] == right[-1]:
        return 1 + longest(left[:-1], right[:-1])
    return max(longest(left[:-1], right), longest(left, right[:-1]))


@given(
    left=st.lists(st.sampled_from("abc"), max_size=7),
    right=st.lists(st.sampled_from("abc"), max_size=7),
)
def test_as_many_as_there_are_belong_together_in_order_by_name(left, right):
    pairs = aligned(left, right)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in itertools.pairwise(pairs))
    assert len(pairs) == longest(left, right)


@given(names=NAMES)
def test_equal_sequences_are_aligned_place_by_place(names):
    assert aligned(names, names) == [(place, place) for place in range(len(names))]


@given(parts=st.lists(NAMES, max_size=4))
def test_what_is_inserted_between_parts_belongs_to_none(parts):
    """Names of its own: whatever it is, all others are found where they are."""
    left = [name for part in parts for name in (*part, "x", "y")]
    right = [name for part in parts for name in part]
    assert [left[i] for i, _ in aligned(left, right)] == right


def test_neighbors_stay_together_despite_an_equal_insertion():
    """A head resizes four times and joins; a loss between two heads resizes as well."""
    head, loss = ["interpolate"] * 4 + ["cat"], ["stack", "interpolate", "topk"]
    pairs = aligned([*head, *loss, *head], [*head, *head])
    assert [i for i, _ in pairs] == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
