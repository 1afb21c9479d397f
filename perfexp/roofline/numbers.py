"""Numbers and units as ncu writes them, converted to SI; a decimal comma is recognized, never guessed."""

from __future__ import annotations

import re

#: A number with a decimal point, with or without commas between groups of three digits.
_NUMBER = re.compile(r"[+-]?(?=\.?\d)(?:[1-9]\d{0,2}(?:,\d{3})+|\d*)(?:\.\d*)?(?:[eE][+-]?\d+)?")
#: A number of another locale: `27,90`, `1.234,5`, `1 234`, `1'234`.
_OF_LOCALE = re.compile(r"[+-]?\d[\d\s.'\u2019]*(?:,\d+|[\s'\u2019]\d{3}(?:\.\d+)?)")
_UNIT = re.compile(
    r"(?P<seconds>[nuµμm]?)(?:seconds?|sec|s)|(?P<bytes>(?:[kmgtp]i?)?)(?:bytes?|b)"
    r"|(?P<count>[kmgtp]?)(?:hertz|hz|instructions|inst|flops?|ops?|cycles?)"
)
_SMALL = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3}
_LARGE = {"": 1.0, **{prefix: 1000.0**power for power, prefix in enumerate("kmgtp", start=1)}}
_LARGE |= {f"{prefix}i": 1024.0**power for power, prefix in enumerate("kmgtp", start=1)}
_PLAIN = {"": 1.0, "1": 1.0, "#": 1.0, "%": 0.01, "percent": 0.01}


def number(cell: str) -> float | None:
    """Parse a number, with or without commas between its groups of digits; None for any other text."""
    text = cell.strip()
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def is_of_locale(cell: str) -> bool:
    """Whether a text is a number with a decimal comma, or with other signs between its groups of digits."""
    return number(cell) is None and _OF_LOCALE.fullmatch(cell.strip()) is not None


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
