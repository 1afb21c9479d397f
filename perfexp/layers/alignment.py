"""Match the operations of two passes over a model, where either pass has some of its own."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Matching positions in two sequences of names: as many as possible, in order, with contiguous runs preferred.

    The longest common subsequence (Needleman and Wunsch, "A general method applicable to the search for similarities",
    1970); of several, the one with the most contiguous neighbours, and of those the latest.

    Args:
        left: names, shape (n,).
        right: names, shape (m,).

    Returns:
        Pairs of a position on the left and one on the right, both increasing. Takes O(n · m) time and memory.
    """
    match, rows, columns = len(left) + len(right) + 1, len(left), len(right)
    # the best score of the prefixes i and j; and the best one that matches their last names, or -2 without a match
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
