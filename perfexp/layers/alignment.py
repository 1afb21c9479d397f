"""Alignment: which operations of two passes over a model are the same ones, where one pass has some of its own."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Places in two sequences of names that belong together: as many as possible, in order, runs before single ones.

    The longest common subsequence (Needleman and Wunsch, "A general method applicable to the search for similarities",
    1970); of several that are as long, the one in which the most neighbours stay neighbours, and of those the latest.

    Args:
        left: names, shape (n,).
        right: names, shape (m,).

    Returns:
        Pairs of a place on the left and one on the right, both increasing. Takes time and memory as n · m.
    """
    match, rows, columns = len(left) + len(right) + 1, len(left), len(right)
    # the best score of what comes before places i and j; and that with the last two together, or -2 if they can't be
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    ending = [[-2] * (columns + 1) for _ in range(rows + 1)]
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            if left[i - 1] == right[j - 1]:
                ending[i][j] = match + max(best[i - 1][j - 1], ending[i - 1][j - 1] + 1)
            best[i][j] = max(ending[i][j], best[i - 1][j], best[i][j - 1])
    pairs: list[tuple[int, int]] = []
    i, j, together = rows, columns, False
    while i and j:
        if together or best[i][j] == ending[i][j]:
            pairs.append((i - 1, j - 1))
            together = ending[i][j] == match + ending[i - 1][j - 1] + 1
            i, j = i - 1, j - 1
        elif best[i][j] == best[i - 1][j]:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]
