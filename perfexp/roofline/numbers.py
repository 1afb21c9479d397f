"""Convert ncu's numbers and units to SI.

A decimal comma, which ncu writes in some locales, is recognized and refused, never guessed.
"""

from __future__ import annotations

import re

#: A number with a decimal point, with or without commas between groups of three digits.
_NUMBER = re.compile(r"[+-]?(?=\.?\d)(?:[1-9]\d{0,2}(?:,\d{3})+|\d*)(?:\.\d*)?(?:[eE][+-]?\d+)?")
#: A number in another locale: `27,90`, `1.234,5`, `1 234`, `1'234`.
_OF_LOCALE = re.compile(r"[+-]?\d[\d\s.'\u2019]*(?:,\d+|[\s'\u2019]\d{3}(?:\.\d+)?)")
_UNIT = re.compile(
    r"(?P<seconds>[nuµμm]?)(?:seconds?|sec|s)|(?P<bytes>(?:[kmgtp]i?)?)(?:bytes?|b)"
    r"|(?P<count>[kmgtp]?)(?:hertz|hz|instructions|inst|flops?|ops?|cycles?)"
)
_SMALL = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3}
_LARGE = {"": 1.0}
for _power, _prefix in enumerate("kmgtp", start=1):
    _LARGE |= {_prefix: 1000.0**_power, f"{_prefix}i": 1024.0**_power}
#: Units without a prefix.
_PLAIN = {"": 1.0, "1": 1.0, "#": 1.0, "%": 0.01, "percent": 0.01}


def number(cell: str) -> float | None:
    """Return a number, with or without commas between digit groups; None for any other text.

    `listing` reads each value by it.
    """
    text = cell.strip()
    if not _NUMBER.fullmatch(text):
        return None
    return float(text.replace(",", ""))


def is_of_locale(cell: str) -> bool:
    """Return whether a text is a number in another locale, such as one with a decimal comma."""
    return number(cell) is None and _OF_LOCALE.fullmatch(cell.strip()) is not None


def factor(unit: str) -> float | None:
    """Return the factor from a unit to SI, for example `us`, `Mbyte` or `cycle/nsecond`.

    An unknown unit gives None. ncu's `Kbyte` has 1000 bytes (it shows 16384 bytes as 16.38 Kbyte),
    `KiB` has 1024. A percentage becomes a fraction. Counter units (`inst`, `cycle`) are 1.
    `listing` converts each value by it.
    """
    above, *below = [_single(part.strip().lower()) for part in unit.split("/")]
    for part in below:
        above = None if above is None or not part else above / part
    return above


def _single(word: str) -> float | None:
    """Return the factor of a unit without a slash; None if it is unknown."""
    if word in _PLAIN:
        return _PLAIN[word]
    match = _UNIT.fullmatch(word)
    if match is None:
        return None
    if match.lastgroup == "seconds":
        return _SMALL[match["seconds"]]
    return _LARGE[match[str(match.lastgroup)]]
