"""Figures: numbers as any locale writes them and units as ncu writes them, in SI."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: What stands between groups of three digits beside point and comma: spaces of any width, apostrophes.
_GROUPING = re.compile("[\\s\u00a0\u2009\u202f'\u2019]")
_NUMBER = re.compile(r"[+-]?(?=.*\d)[\d.,]+(?:[eE][+-]?\d+)?")

_DECIMAL = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("kmgtp", start=1)}
_SMALL = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3}
_SECONDS = ("seconds", "second", "sec", "s")
_BYTES = ("bytes", "byte", "b")
_HERTZ = ("hertz", "hz")
_COUNTED = ("instructions", "inst", "flops", "flop", "ops", "op", "cycles", "cycle")
_PLAIN = {"": 1.0, "1": 1.0, "#": 1.0, "%": 0.01, "percent": 0.01}


def decimal_mark(cells: Iterable[str], *, otherwise: str = ".") -> str | None:
    """The sign before the decimals in all of these numbers; None where they contradict one another.

    `1.234,5` and `0,5` have a comma, `1,234.5` and `0.5` a point; `1,234` alone says nothing.

    Args:
        cells: texts; those that are no numbers say nothing.
        otherwise: the sign where no number says anything.
    """
    marks = {mark for cell in cells if (mark := _mark(_GROUPING.sub("", cell)))}
    return None if len(marks) > 1 else next(iter(marks), otherwise)


def number(cell: str, mark: str = ".") -> float | None:
    """A number; None for a text that is none.

    Args:
        cell: as it is written, with groups of digits or without.
        mark: sign before the decimals.
    """
    text = _GROUPING.sub("", cell)
    if not _NUMBER.fullmatch(text):
        return None
    text = text.replace("," if mark == "." else ".", "").replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


def factor(unit: str) -> float | None:
    """What a value in a unit is multiplied by to be in SI; None for a unit that is not known.

    ncu's `Kbyte` has 1000 bytes (a block's shared memory of 16384 bytes is shown as 16.38 Kbyte), `KiB` 1024. A
    percentage becomes a fraction. Units of counters (`inst`, `cycle`) are 1.

    Args:
        unit: `usecond`, `us`, `Mbyte`, `GB/s`, `cycle/nsecond`, `%`, …
    """
    above, *below = unit.strip().split("/")
    found = _single(above)
    for each in below:
        part = _single(each)
        found = None if found is None or not part else found / part
    return found


def _mark(text: str) -> str | None:
    """The sign before the decimals of one number, if it tells."""
    if not _NUMBER.fullmatch(text):
        return None
    points, commas = text.count("."), text.count(",")
    if points and commas:
        return max(".,", key=text.rfind)
    if points > 1 or commas > 1:
        return "," if points else "."
    if not (points or commas):
        return None
    mark = "." if points else ","
    whole, _, rest = text.partition(mark)
    whole = whole.lstrip("+-")
    grouped = len(rest) == 3 and rest.isdigit() and 1 <= len(whole) <= 3 and not whole.startswith("0")
    return None if grouped else mark


def _single(text: str) -> float | None:
    word = text.strip()
    if word.lower() in _PLAIN:
        return _PLAIN[word.lower()]
    lower = word.lower()
    for names, prefixes in ((_SECONDS, _SMALL), (_HERTZ, _DECIMAL), (_BYTES, _DECIMAL | _BINARY), (_COUNTED, _DECIMAL)):
        name = next((name for name in names if lower.endswith(name)), None)
        prefix = lower[: -len(name)] if name else ""
        if name and (not prefix or prefix in prefixes):
            return prefixes[prefix] if prefix else 1.0
    return None
