"""Numbers as any locale writes them and units as ncu writes them, converted to SI."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Separators of groups of three digits besides point and comma: spaces of any width, apostrophes.
_GROUPING = re.compile("[\\s\u00a0\u2009\u202f'\u2019]")
_NUMBER = re.compile(r"[+-]?(?=.*\d)[\d.,]+(?:[eE][+-]?\d+)?")
_UNIT = re.compile(
    r"(?P<seconds>[nuµμm]?)(?:seconds?|sec|s)|(?P<bytes>(?:[kmgtp]i?)?)(?:bytes?|b)"
    r"|(?P<count>[kmgtp]?)(?:hertz|hz|instructions|inst|flops?|ops?|cycles?)"
)
_SMALL = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3}
_LARGE = {"": 1.0, **{prefix: 1000.0**power for power, prefix in enumerate("kmgtp", start=1)}}
_LARGE |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("kmgtp", start=1)}
_PLAIN = {"": 1.0, "1": 1.0, "#": 1.0, "%": 0.01, "percent": 0.01}


def decimal_mark(cells: Iterable[str], *, otherwise: str = ".") -> str | None:
    """Detect the decimal mark of the numbers among some texts; None where they contradict one another.

    `1.234,5` and `0,5` have a comma, `1,234.5` and `0.5` a point; `1,234` is ambiguous, `otherwise` if all are.
    """
    marks = {mark for cell in cells if (mark := _mark(_GROUPING.sub("", cell)))}
    return None if len(marks) > 1 else next(iter(marks), otherwise)


def _mark(text: str) -> str | None:
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
    whole, _, rest = text.lstrip("+-").partition(mark)
    is_group = (
        len(rest) == 3 and rest.isdigit() and 1 <= len(whole) <= 3 and not whole.startswith("0")
    )
    return None if is_group else mark


def number(cell: str, mark: str = ".") -> float | None:
    """Parse a number, with or without grouped digits; None for any other text."""
    text = _GROUPING.sub("", cell)
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return float(text.replace("," if mark == "." else ".", "").replace(",", "."))
    except ValueError:
        return None


def factor(unit: str) -> float | None:
    """The factor from a unit (`usecond`, `us`, `Mbyte`, `GB/s`, `cycle/nsecond`, …) to SI; None for an unknown one.

    ncu's `Kbyte` has 1000 bytes (a block's shared memory of 16384 bytes is shown as 16.38 Kbyte), `KiB` 1024. A
    percentage becomes a fraction. Units of counters (`inst`, `cycle`) are 1.
    """
    above, *below = [_single(part.strip().lower()) for part in unit.split("/")]
    for part in below:
        above = None if above is None or not part else above / part
    return above


def _single(word: str) -> float | None:
    if word in _PLAIN:
        return _PLAIN[word]
    match = _UNIT.fullmatch(word)
    if match is None:
        return None
    return (
        _SMALL[match["seconds"]]
        if match.lastgroup == "seconds"
        else _LARGE[match[str(match.lastgroup)]]
    )
