"""Sizes: input sizes and batch sizes as users write them, with their limits.

The configuration calls these functions with values of `input_size` and `batch_size` from the
command line, YAML files or the environment.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TypeVar

from perfexp.errors import UserError
from perfexp.records.record import LARGEST

Size = tuple[int, int]
_T = TypeVar("_T")
#: Maximum number of points in a plan, and of listed sizes and batch sizes.
MOST_POINTS = 100_000
#: Limits far beyond any device's memory that keep pixels and bytes within 64 bits.
MOST_PIXELS = 100_000
MOST_SAMPLES = 10_000_000
#: Configuration value for the largest batch that fits.
_MAX = "max"


def parse_sizes(value: object) -> list[Size]:
    """Return the sizes in an `input_size`: `224`, `512x1024` (height × width), a list, or None.

    Empty for None, which leaves the size to the model. Raises `UserError` for other values.
    """
    if value is None:
        return []
    return _unique(list(map(_parse_size, _items(value))), "input_size")


def parse_batch_sizes(value: object) -> list[int]:
    """Return the batches in a `batch_size`: a positive integer, `max` (`LARGEST`), a list, or None.

    Empty for None. Raises `UserError` for other values.
    """
    if value is None:
        return []
    return _unique(list(map(_parse_batch_size, _items(value))), "batch_size")


def seeks_batch(value: object) -> bool:
    """Return whether a configured `batch_size` includes the largest batch that fits."""
    return _MAX in (value if isinstance(value, list) else [value])


def refuse_many(*counts: int) -> None:
    """Raise `UserError` if the product of these counts exceeds the maximum number of points.

    It is checked before the points are listed. Plans and sweeps call it before they multiply sizes,
    batch sizes and processes.
    """
    if math.prod(counts) > MOST_POINTS:
        raise UserError(
            f"The plan has more than {MOST_POINTS:,} points (processes × sizes × batch sizes × "
            "phases). Lower processes, or list fewer sizes or batch sizes."
        )


def _items(value: object) -> list[object]:
    """Return a list as it is, and a single value as a list; `UserError` for too many items."""
    items = value if isinstance(value, list) else [value]
    refuse_many(len(items))
    return items


def _parse_batch_size(item: object) -> int:
    """Return a batch size; `LARGEST` for `max`. Raises `UserError` for other values."""
    if item == _MAX:
        return LARGEST
    # values from the environment are text
    if isinstance(item, str) and re.fullmatch(r"\s*[1-9]\d{0,17}\s*", item):
        item = int(item)
    if not isinstance(item, int) or isinstance(item, bool) or item < 1:
        raise UserError(
            f"batch_size={_short(item)} is not a batch size: set an integer from 1 up, a list "
            "[1,2,4], or max."
        )
    if item > MOST_SAMPLES:
        raise UserError(f"batch_size={_short(item)}: at most {MOST_SAMPLES:,} samples a call.")
    return item


def _parse_size(item: object) -> Size:
    """Return height and width in pixels. Raises `UserError` for other values."""
    is_size = isinstance(item, (int, str)) and not isinstance(item, bool)
    match = re.fullmatch(r"\s*(\d+)\s*(?:[x×]\s*(\d+)\s*)?", _short(item)) if is_size else None
    if match is None:
        raise UserError(
            f"input_size={_short(item)} is not a size: set 224, 512x1024 (height × width) or a "
            "list [224,256]."
        )
    size = int(match[1]), int(match[2] or match[1])
    if min(size) < 1:
        raise UserError(f"input_size={item} has no pixels: both sides have to be at least 1.")
    if max(size) > MOST_PIXELS:
        raise UserError(f"input_size={item}: at most {MOST_PIXELS:,} pixels a side.")
    return size


def _short(item: object) -> str:
    """Cut a value to 60 characters without converting numbers with thousands of digits."""
    if isinstance(item, int) and item.bit_length() > 200:
        return "a number of more than 60 digits"
    text = str(item)
    if len(text) <= 60:
        return text
    return f"{text[:60]}…"


def _unique(items: list[_T], name: str) -> list[_T]:
    """Return the items; `UserError` if the list is empty or has one twice."""
    if not items:
        raise UserError(f"{name}=[] leaves nothing to measure: set {name}=VALUE.")
    doubled = [item for item, count in Counter(items).items() if count > 1]
    if doubled:
        raise UserError(
            f"{name} has {doubled[0] or _MAX} twice; processes=2 measures everything twice."
        )
    return items
