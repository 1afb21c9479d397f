"""Sweep limit: count the runs of a sweep before any is listed or composed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from unittest.mock import patch

from hydra.core.override_parser.types import Override, RangeSweep

from perfexp.cli.flags import MAX_JOBS
from perfexp.errors import UserError

_MOST_JOBS = 1000
#: Longer ranges are not counted exactly.
_ENDLESS = 10**15


def without_max_jobs(arguments: Sequence[str]) -> tuple[list[str], int]:
    """Remove `--max-jobs N` from a command line; returns the rest and N, by default 1,000."""
    others: list[str] = []
    most, words = _MOST_JOBS, iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != MAX_JOBS:
            others.append(word)
            continue
        value = value if equals else next(words, "")
        if not re.fullmatch("[1-9][0-9]{0,6}", value):
            raise UserError(f"{MAX_JOBS} {value[:40]}: set an integer from 1 to 9,999,999.")
        most = int(value)
    return others, most


@contextmanager
def limited_jobs(most: int) -> Iterator[None]:
    """Have Hydra count the runs of a sweep, axes of configuration files included, before it lists them."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    # discovering plugins reloads the module: an import may return another class than the one in use
    kinds: list[Any] = list(Plugins.instance().discover(Sweeper))
    [sweeper] = [kind for kind in kinds if kind.__name__ == "BasicSweeper"]
    split = sweeper.split_arguments

    def counted(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        refuse_many(overrides, most)
        batches: list[list[list[str]]] = split(overrides, max_batch_size)
        return batches

    with patch.object(sweeper, "split_arguments", staticmethod(counted)):
        yield


def refuse_many(overrides: Sequence[Override], most: int) -> None:
    """Raise UserError for a sweep without any run, or with more than `most` runs."""
    swept = [override for override in overrides if override.is_discrete_sweep()]
    counts = {override.get_key_element(): num_values(override) for override in swept}
    if empty := [override.input_line for override in swept if not counts[override.get_key_element()]]:
        raise UserError(f"The sweep has no runs: '{empty[0]}' matches no value.")
    if (jobs := math.prod(counts.values())) > most:
        counted = " × ".join(f"{key}: {count:,}" for key, count in counts.items() if count != 1)
        raise UserError(f"The sweep has {jobs:,} runs ({counted}): at most {most:,}. {MAX_JOBS} N raises the limit.")


def num_values(override: Override) -> int:
    """Count the values of an override without listing a range; raises UserError for an endless one."""
    swept = override.value()
    if not isinstance(swept, RangeSweep):
        return sum(1 for _ in override.sweep_iterator())
    if not all(math.isfinite(bound) for bound in (swept.start or 0, swept.stop or 0, swept.step)) or not swept.step:
        raise UserError(f"'{override.input_line}' is endless: set a finite start and stop, and a step other than 0.")
    start, stop, step = (Fraction(bound) for bound in (swept.start or 0, swept.stop or 0, swept.step))
    return min(max(0, math.ceil((stop - start) / step)), _ENDLESS)
