"""Parse overrides (`KEY=VALUE`) as Hydra does, to learn the axes of a sweep before it starts.

An axis is a key with several values, such as `batch_size=1,8`. Sweeps with too many runs, and words
that would keep Hydra's parser busy for hours, are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    Override,
    QuotedString,
    RangeSweep,
    Sweep,
)

from perfexp.errors import UserError
from perfexp.host import credentials, installation
from perfexp.plan.flags import MAX_JOBS
from perfexp.plan.override_keys import key_of

_PLAIN_PATH = re.compile(r"/[\w./-]+", re.ASCII)
#: Limits on one argument.
_MOST_CHARACTERS, _MOST_NESTED, _MOST_DIGITS = 10_000, 32, 400
#: Default limit on runs per sweep, and on an exactly counted range.
_MOST_JOBS, _ENDLESS = 1000, 10**15


def parsed(arguments: Sequence[str]) -> list[Override]:
    """Parse a command line's overrides, without its flags.

    Checks of the command line read them.

    Raises:
        UserError: an override is too long or too deeply nested to parse.
    """
    texts = [text for text in arguments if "=" in text and text[0] != "-"]
    refuse_unreadable(texts)
    hydra = GlobalHydra.instance()  # while Hydra runs, its loader expands globs
    loader: Any = hydra.config_loader() if hydra.is_initialized() else _ConfLoader()
    return OverridesParser.create(config_loader=loader).parse_overrides(texts)


class _ConfLoader:
    """Expands a glob, such as `model=glob(resnet*)`, to options of conf/ without Hydra."""

    def get_group_options(self, group_name: str, **_: Any) -> list[str]:
        return sorted(file.stem for file in installation.conf_dir().glob(f"{group_name}/*.yaml"))


def refuse_unreadable(arguments: Sequence[str]) -> None:
    """Raise `UserError` for an argument that takes Hydra's parser hours, or overflows its stack.

    It is checked before Hydra sees the words.
    """
    for text in arguments:
        beginning = f"'{text[:40]}…'"
        if len(text) > _MOST_CHARACTERS:
            raise UserError(
                f"{beginning} has {len(text):,} characters: at most {_MOST_CHARACTERS:,}."
            )
        if re.search(rf"\d{{{_MOST_DIGITS}}}", text):
            raise UserError(f"{beginning} has a number of {_MOST_DIGITS} digits or more.")
        depths = accumulate((character in "[{(") - (character in "]})") for character in text)
        if max(depths, default=0) > _MOST_NESTED:
            raise UserError(f"{beginning} is nested more than {_MOST_NESTED} deep.")


def axes_of(arguments: Sequence[str]) -> dict[str, int | None]:
    """Return the axes of a sweep, each with its number of values; None for an interval.

    If a key repeats, the last one counts. The sweep's name, its folders and its plots have them.
    """
    axes: dict[str, int | None] = {}
    for override in parsed(arguments):
        axis = override.key_or_group
        if not override.is_sweep_override() or override.is_hydra_override():
            axes.pop(axis, None)
        else:
            axes[axis] = _num_values(override) if override.is_discrete_sweep() else None
    return axes


def as_typed(axes: Mapping[str, str]) -> dict[str, str]:
    """Return axis values as users write them: Hydra turns `true` into `True`."""
    typed = {"True": "true", "False": "false"}
    return {axis: typed.get(value, value) for axis, value in axes.items()}


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return the override values of one run in a sweep as text, by key.

    Plain words lose the backslashes that Hydra adds. Run folders and names have them.
    """
    values = {}
    for text, override in zip(overrides, parsed(overrides), strict=True):
        value = override.value()
        values[override.key_or_group] = value if type(value) is str else text.partition("=")[2]
    return values


def alternatives(override: Override) -> list[Any]:
    """Return the values that an override has in the runs of a sweep, as plain data.

    A range or an interval becomes 0. A glob has no values: it only chooses among options. Checks of
    a command line look at each of them.
    """
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return list(map(_plain, value.list))
    if isinstance(value, Glob):
        return []
    return [0 if isinstance(value, Sweep) else _plain(value)]


def _plain(value: Any) -> Any:
    """Return a parsed value without Hydra's quotes, also inside lists and mappings."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    if isinstance(value, QuotedString):
        return value.text
    return value


def without_credentials(arguments: Sequence[str]) -> list[str]:
    """Mask credentials in command-line URLs, so that nothing written, printed or sent has them.

    `credentials.hide` remembers them for this process: only here the store gets its URL back.
    Different credentials get different masks.

    Raises:
        UserError: a credential cannot be separated from its context.
    """
    return [_without_credentials(text) if "://" in text else text for text in arguments]


def _without_credentials(argument: str) -> str:
    """Mask the credentials in one argument; see `without_credentials`."""
    try:
        [override] = parsed([argument])
        values = alternatives(override)
    except Exception:  # an option such as --config-dir, or a mistake, which Hydra reports
        return re.sub(r"(?s)(?<=://).*@", "***@", credentials.mask(argument))
    key = override.key_or_group
    if any(isinstance(value, str) and "@" in value and "://" not in value for value in values):
        raise UserError(f"{key}: quote a URL whose password has a comma: {key}='…'.")
    # interpolated values are masked in the plan
    masked = [value if "${" in str(value) else credentials.hide(value) for value in values]
    if masked == values:
        return argument
    if not all(isinstance(value, str) for value in values):
        raise UserError(f"{key}: a URL with a credential must be a value of its own.")
    return f"{argument.partition('=')[0]}={','.join(map(quoted, masked))}"


def quoted(text: str) -> str:
    """Quote any text as one value in Hydra's grammar, unless it is a plain path.

    Paths and credentials in repeated commands pass through it.
    """
    if _PLAIN_PATH.fullmatch(text):
        return text
    escaped = re.sub(r"(\\*)('|$)", r"\1\1\2", text).replace("'", "\\'")
    return f"'{escaped}'"


def max_jobs(arguments: Sequence[str]) -> int:
    """Return the limit on runs per sweep, `--max-jobs=N`, by default 1,000.

    Larger sweeps are refused by `refuse_many`.

    Raises:
        UserError: N is not an integer from 1 to 9,999,999.
    """
    value = str(_MOST_JOBS)
    for text in reversed(arguments):  # the first one counts
        name, _, typed = text.partition("=")
        if name == MAX_JOBS:
            value = typed
    if not re.fullmatch("[1-9][0-9]{0,6}", value):
        raise UserError(f"{MAX_JOBS} {value[:40]}: set an integer from 1 to 9,999,999.")
    return int(value)


def refuse_many(arguments: Sequence[str], most: int) -> None:
    """Raise `UserError` for a sweep without any run, or with more than `most` runs.

    `main` calls it before the first run is composed.
    """
    axes = axes_of(arguments)
    if empty := [text for text in arguments if axes.get(key_of(text)) == 0]:
        raise UserError(f"The sweep has no runs: '{empty[-1]}' matches no value.")
    counts = {key: count for key, count in axes.items() if count and count > 1}
    if (jobs := math.prod(counts.values())) > most:
        counted = " × ".join(f"{key}: {count:,}" for key, count in counts.items())
        raise UserError(
            f"The sweep has {jobs:,} runs ({counted}): at most {most:,}. "
            f"{MAX_JOBS} N raises the limit."
        )


def _num_values(override: Override) -> int:
    """Count an override's values without listing a range; very long ranges count 10¹⁵.

    Raises:
        UserError: the range is endless.
    """
    swept = override.value()
    if not isinstance(swept, RangeSweep):
        return sum(1 for _ in override.sweep_iterator())
    if (
        not all(map(math.isfinite, (swept.start or 0, swept.stop or 0, swept.step)))
        or not swept.step
    ):
        raise UserError(
            f"'{override.input_line}' is endless: set a finite start and stop, "
            "and a step other than 0."
        )
    start, stop, step = map(Fraction, (swept.start or 0, swept.stop or 0, swept.step))
    return min(max(0, math.ceil((stop - start) / step)), _ENDLESS)
