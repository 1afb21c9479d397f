"""Gestures by name, and texts as tokens: the words that a CLIP gesture classifier compares movements with."""

from __future__ import annotations

from collections.abc import Sequence

#: The gestures of IntelliRehabDS in the order of their labels (Miron et al., "IntelliRehabDS (IRDS)", table 1).
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
#: Text about a gesture, as CLIP's "a photo of a …".
PROMPT = "a person doing {}"
#: Tokens besides the 256 bytes: padding, beginning and end of a text.
PAD, BEGIN, END = 256, 257, 258
NUM_TOKENS = 259


def encode(text: str) -> list[int]:
    """The tokens of a text: its beginning, the bytes of its UTF-8, and its end."""
    return [BEGIN, *text.encode(), END]


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens; those that are not bytes are left out."""
    return bytes(token for token in tokens if token < PAD).decode(errors="replace")


def padded(texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Tokens of texts, each padded at its end to the longest one, and the position of the end of each text."""
    encoded = [encode(text) for text in texts]
    longest = max(map(len, encoded))
    rows = [tokens + [PAD] * (longest - len(tokens)) for tokens in encoded]
    return rows, [len(tokens) - 1 for tokens in encoded]
