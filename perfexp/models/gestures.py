"""Gesture names and text tokens for the CLIP gesture classifier.

A token is one byte of UTF-8, or a mark for padding, beginning or end.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Gestures in IntelliRehabDS, in label order.
#: Source: Miron et al., "IntelliRehabDS (IRDS)", table 1.
GESTURES = (
    "elbow flexion left",
    "elbow flexion right",
    "shoulder flexion left",
    "shoulder flexion right",
    "shoulder abduction left",
    "shoulder abduction right",
    "shoulder forward elevation",
    "side tap left",
    "side tap right",
)
#: Prompt for a gesture, like CLIP's "a photo of a …".
PROMPT = "a person doing {}"
#: Tokens after the 256 bytes: padding, and the beginning and end of a text.
PAD, BEGIN, END = 256, 257, 258
NUM_TOKENS = 259


def encode(text: str) -> list[int]:
    """Return a text's tokens: its beginning, its UTF-8 bytes and its end."""
    return [BEGIN, *text.encode(), END]


def padded(texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Return token rows, padded at the end to the longest text, and each text's end position."""
    encoded = [encode(text) for text in texts]
    longest = max(map(len, encoded))
    rows = [tokens + [PAD] * (longest - len(tokens)) for tokens in encoded]
    return rows, [len(tokens) - 1 for tokens in encoded]
