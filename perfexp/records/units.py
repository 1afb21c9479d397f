"""Units: format quantities for people. Only this module converts from stored SI units.

Records and computations use seconds, bytes, joules and hertz. Console, tables, plots and messages
call these functions last.
"""

from __future__ import annotations

import math

#: Unit at the end of a stored name, with the displayed unit and the factor to convert to it.
_PRETTY = {
    "seconds": ("ms", 1e3),
    "bytes": ("mib", 1 / 2**20),
    "hertz": ("mhz", 1e-6),
}
#: Symbols for units that records spell out.
SYMBOLS = {"joules": "J", "watts": "W"}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def prettify(name: str, value: float, unit: str) -> tuple[str, float]:
    """Convert a stored name and value for display: `epoch_seconds`, 0.5 becomes `epoch_ms`, 500.

    Names that do not end in seconds, bytes or hertz do not change. Result CSV files use it.
    """
    if unit not in _PRETTY or not name.endswith(unit):
        return name, value
    suffix, factor = _PRETTY[unit]
    return name.removesuffix(unit) + suffix, value * factor


def format_seconds(seconds: float, significant: int = 3) -> str:
    """Format a duration: `842 ns`, `12.3 µs`, `1.04 ms`, `2.50 s`, `3 min 20 s`.

    Infinity and NaN become `inf` and `nan`.
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds >= 100:
        hours, seconds_left = divmod(round(seconds), 3600)
        if hours:
            return f"{hours} h {seconds_left // 60:02d} min"
        return f"{seconds_left // 60} min {seconds_left % 60:02d} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor:
            return f"{digits(seconds / factor, significant)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def format_bytes(count: float) -> str:
    """Format a size in binary units: `812 MiB`, `1.25 GiB`."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= factor:
            return f"{digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun in singular or plural: `1 run`, `2 runs`.

    Messages and headers use it.
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def digits(value: float, significant: int = 3) -> str:
    """Format a number with `significant` digits, scientifically only below 0.001 and from 1e6."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if -4 < magnitude < 6:
        return f"{value:.{max(significant - 1 - magnitude, 0)}f}"
    return f"{value:.{significant - 1}e}"


def pretty(value: float, unit: str, *, stated: bool = False, significant: int = 3) -> str:
    """Return a quantity with a decimal prefix, for example `8.10 TFLOP/s`.

    Rooflines and work rates use it.

    Args:
        stated: whether this is a data sheet's figure, which keeps its own digits, up to four.
        significant: significant digits for other figures.
    """
    if not stated:
        value = float(f"{value:.{significant - 1}e}")
    # from 0.9995 a number with three digits rounds up to the next prefix: 1.00 k, not 1000
    scales = (scale for scale in _PREFIXES if abs(value) >= scale[0] * 0.9995)
    factor, prefix = next(scales, (1.0, ""))
    number = value / factor
    text = f"{number:.4g}" if stated else digits(number, significant)
    return f"{text} {prefix}{unit}"
