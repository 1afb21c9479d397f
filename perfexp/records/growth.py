"""Growth: how times scale with size and rates with batch, and which points break the trend.

A sweep over input sizes gives a curve of seconds per call over pixels. `statistics.scaling` fits a
constant plus a power of the pixels. Reports show the fit. Sizes far from it, and batches with fewer
samples per second than smaller ones, get a diagnostic: they often ran a slower algorithm.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import PEAK_MEMORY
from perfexp.records.record import Key, Record, Status, is_layers, timed_key, without_replicate
from perfexp.records.units import format_bytes
from perfexp.statistics import estimators, scaling

if TYPE_CHECKING:
    from perfexp.records.rows import Row

#: Sizes needed to show how a time grows: with fewer, three parameters leave too few degrees of
#: freedom.
_LEAST_SIZES = 5
#: Relative half-width assumed for a median without an interval.
_ERROR_UNKNOWN = 0.05
#: Above this scatter, or if most medians are less certain than this, a scaling model describes
#: noise.
_SCATTER_MOST = 0.2
#: Tolerated relative drop in time from a smaller to a larger size; tiles fill better at some sizes.
_FALL_TOLERANCE = 0.1
#: Relative drop in samples per second from a smaller to a larger batch that deserves a warning.
_RATE_TOLERANCE = 0.05
#: A workspace exceeds the neighbors' peak memory by this factor and this many bytes.
_WORKSPACE_FACTOR, _WORKSPACE_BYTES = 1.5, 64 * 2**20
#: Character limit for a kernel name, which may have thousands.
_LONGEST_NAME = 72


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling model over input size, for one phase, batch size, precision and process.

    Attributes:
        key: key of the largest size.
        keys: keys of all sizes, smallest first.
        time_kind: name of the fitted time.
        fit: model for seconds per call; x is the number of pixels divided by the largest number.
        doubt: why the model does not show how the time grows, for example a large scatter; empty if
            it does.
    """

    key: Key
    keys: tuple[Key, ...]
    time_kind: str
    fit: scaling.ScalingFit
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Size whose time does not fit the other sizes.

    Attributes:
        ratio: measured time over expected time.
        reference: source of the expected time, in words.
        other: size that the expected time comes from; None if it comes from the scaling model.
    """

    ratio: float
    reference: str
    other: Key | None = None


def scalings(rows: Sequence[Row]) -> list[Scaling]:
    """Return scaling models for groups of rows that differ in size only, with at least four sizes.

    Reports show them, and `odd_sizes` compares the sizes with them.

    Args:
        rows: a record's rows.
    """
    models = []
    for group in _over_sizes(rows):
        keys = tuple(row.key for row in group)
        num_sizes = len({key.pixels for key in keys})
        if num_sizes < scaling.LEAST_SIZES:
            continue
        medians = list(map(_median, group))
        widths = [median.relative_half_width for median in medians]
        fit = scaling.fit_scaling(
            [key.pixels / keys[-1].pixels for key in keys],
            [median.value for median in medians],
            [_ERROR_UNKNOWN if width is None else width for width in widths],
        )
        doubts = _reasons_for_doubt(num_sizes, widths)
        if fit.scatter > _SCATTER_MOST:
            doubts.append(f"the times scatter by {fit.scatter:.0%}")
        models.append(
            Scaling(
                key=keys[-1],
                keys=keys,
                time_kind=group[0].time_kind or "",
                fit=fit,
                doubt=", ".join(doubts),
            )
        )
    return models


def _reasons_for_doubt(num_sizes: int, widths: Sequence[float | None]) -> list[str]:
    """Return why medians cannot show how a time grows: too few sizes, or uncertain medians.

    Args:
        widths: relative half-width of each median's interval; None without an interval.
    """
    doubts, subject = list[str](), f"of {len(widths)} medians"
    if num_sizes < _LEAST_SIZES:
        doubts.append(f"{num_sizes} sizes are too few ({_LEAST_SIZES} at least)")
    unknown = widths.count(None)
    wide = sum(width is not None and width > _SCATTER_MOST for width in widths)
    if unknown + wide > len(widths) / 2:
        if unknown:
            doubts.append(f"{unknown} {subject} have no interval")
        if wide:
            doubts.append(f"{wide} {subject} are uncertain by more than {_SCATTER_MOST:.0%}")
    return doubts


def odd_sizes(rows: Sequence[Row]) -> dict[Key, Odd]:
    """Return sizes that are far from the scaling model, or slower than a larger size, by key.

    As few sizes as possible are flagged: the one slow size, not every larger size that is faster.
    Plots mark them, and `judge` makes diagnostics of them.
    """
    odd: dict[Key, Odd] = {}
    for model in scalings(rows):
        fit = model.fit
        reference = f"the fit over {len(model.keys)} sizes (tolerated: ±{fit.tolerance:.0%})"
        for index in fit.far:
            odd[model.keys[index]] = Odd(ratio=1 + fit.deviations[index], reference=reference)
    # a time far above the fit is suspect itself: other times are not compared with it
    for group in _over_sizes(rows):
        odd |= _falling([row for row in group if row.key not in odd])
    return odd


def kernels_of(record: Record) -> dict[Key, list[str]]:
    """Return each timed point's kernel names in execution order, if its layers were profiled.

    `judge` compares an odd size's kernels with its neighbors' kernels.
    """
    kernels: dict[Key, list[str]] = {}
    for point in record.points:
        if is_layers(point.key):
            names: dict[str, None] = {}
            for line in point.facts.get("layers", {}).get("lines", ()):
                names |= dict.fromkeys(line["kernels"])
            kernels[without_replicate(timed_key(point.key))] = list(names)
    return kernels


def judge(
    rows: Sequence[Row], kernels: Mapping[Key, Sequence[str]]
) -> dict[Key, tuple[Diagnostic, ...]]:
    """Return diagnostics by point: odd sizes with evidence, and rates that fall as batches grow.

    `summary.rows` adds them to the rows.

    Args:
        rows: a record's rows.
        kernels: kernel names by point, from `kernels_of`.
    """
    raised: dict[Key, tuple[Diagnostic, ...]] = {}
    odd = odd_sizes(rows)
    for group in _over_sizes(rows):
        usual = [row for row in group if row.key not in odd]
        pixels = [row.key.pixels for row in usual]
        for row in group:
            odd_size = odd.get(row.key)
            if odd_size is None:
                continue
            below = bisect_left(pixels, row.key.pixels)
            above = bisect_right(pixels, row.key.pixels)
            # the next smaller and next larger size, if they exist
            neighbors = [*usual[below - 1 : below], *usual[above : above + 1]]
            texts = [_memory_evidence(row, neighbors), _kernel_evidence(row, neighbors, kernels)]
            if row.processes > 1:
                texts.insert(0, f"measured by {row.processes} processes")
            evidence = ", ".join(filter(None, texts))
            if evidence:
                evidence = f": {evidence}"
            unexpected = diagnostics.make(
                "scaling_unexpected",
                ratio=odd_size.ratio,
                reference=odd_size.reference,
                evidence=evidence,
            )
            raised[row.key] = (unexpected,)
    for key, diagnostic in _falling_rates(rows):
        raised[key] = (*raised.get(key, ()), diagnostic)
    return raised


def is_clearly_below(rate: estimators.Interval, other: estimators.Interval) -> bool:
    """Return whether a rate is below another beyond both intervals.

    If an interval is missing, the difference must exceed 10 %. Sweeps use it to find the best run
    and runs slower with more GPUs.
    """
    if rate.high is not None and other.low is not None:
        return rate.high < other.low
    return rate.value < (1 - _FALL_TOLERANCE) * other.value


def _falling(group: Sequence[Row]) -> dict[Key, Odd]:
    """Return the fewest rows to remove so that no larger size takes less time, by key.

    A fall is a pair of sizes of which the larger takes less time. The row in most falls is removed
    first; if several tie, the slowest.

    Args:
        group: rows that differ in size only, smallest first.
    """
    medians = np.array([_median(row).value for row in group])
    falls = _falls(group, medians)
    # symmetric: whether two rows are in a fall with each other
    conflicts = falls | falls.T
    counts = conflicts.sum(axis=0)
    removed: dict[Key, Odd] = {}
    while counts.any():
        most = np.flatnonzero(counts == counts.max())
        odd = int(most[medians[most].argmax()])
        others = np.flatnonzero(conflicts[odd])
        conflicts[odd] = conflicts[:, odd] = False
        counts[others] -= 1
        counts[odd] = 0
        row, other = group[odd], group[others[np.abs(others - odd).argmin()]]
        size_relation = "larger" if other.key.pixels > row.key.pixels else "smaller"
        reference = f"the {size_relation} size {other.key.size_label}, beyond both intervals"
        removed[row.key] = Odd(
            ratio=float(medians[odd]) / _median(other).value, reference=reference, other=other.key
        )
    return removed


def _falls(group: Sequence[Row], medians: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each size (column) is clearly faster than a smaller size (row), (N, N).

    The difference must exceed both intervals and the tolerance. A median without an interval is
    never clearly faster.
    """
    intervals = list(map(_median, group))
    # a missing end becomes NaN, and comparisons with NaN are false
    lows = np.array([median.low for median in intervals], dtype=float)
    highs = np.array([median.high for median in intervals], dtype=float)
    pixels = np.array([row.key.pixels for row in group])
    is_less = (highs < lows[:, None]) & (medians < ((1 - _FALL_TOLERANCE) * medians)[:, None])
    return is_less & (pixels > pixels[:, None])


def _memory_evidence(row: Row, neighbors: Sequence[Row]) -> str:
    """Describe a peak memory far above both neighbors; empty without one.

    It is a sign of another cuDNN algorithm, whose workspace is larger.
    """
    peak = row.value(PEAK_MEMORY)
    most = max((other.value(PEAK_MEMORY) or 0 for other in neighbors), default=0)
    if not peak or not most or peak < max(_WORKSPACE_FACTOR * most, most + _WORKSPACE_BYTES):
        return ""
    return (
        f"its peak memory is {format_bytes(peak)}, {format_bytes(most)} beside it, as if for "
        "another workspace"
    )


def _kernel_evidence(
    row: Row, neighbors: Sequence[Row], kernels: Mapping[Key, Sequence[str]]
) -> str:
    """Describe the first kernel that no neighbor launches; empty if there is none to report.

    Another kernel is a sign of another algorithm, which explains an odd time.
    """
    profiled = [kernels[other.key] for other in neighbors if other.key in kernels]
    if not profiled:
        return ""
    shared = set().union(*profiled)
    foreign = [name for name in kernels.get(row.key, ()) if name not in shared]
    if not foreign:
        return ""
    first = f"it launches kernels that its neighbors do not: {foreign[0][:_LONGEST_NAME]}"
    if len(foreign) > 1:
        return f"{first} and {len(foreign) - 1} more"
    return first


def _falling_rates(rows: Iterable[Row]) -> Iterator[tuple[Key, Diagnostic]]:
    """Yield `rate_falls` for batch sizes with clearly fewer samples/s than a smaller batch.

    A rate must fall beyond both intervals and by more than the tolerance.
    """
    for group in _grouped(rows, lambda row: (row.key.phase, row.key.input_size, row.key.precision)):
        rated = list[tuple[Key, estimators.Interval]]()
        for row in group:
            rate = row.own_interval("samples_per_second")
            if rate and rate.low is not None:
                rated.append((row.key, rate))
        for key, rate in rated:
            smaller = [other for other in rated if other[0].batch_size < key.batch_size]
            if not smaller:
                continue
            below, most = max(smaller, key=lambda other: other[1].value)
            if is_clearly_below(rate, most) and rate.value < (1 - _RATE_TOLERANCE) * most.value:
                fastest, _ = max(rated, key=lambda other: other[1].value)
                diagnostic = diagnostics.make(
                    "rate_falls",
                    ratio=rate.value / most.value,
                    batch=below.batch_size,
                    fastest=fastest.batch_size,
                )
                yield key, diagnostic


def _median(row: Row) -> estimators.Interval:
    """Return a row's median seconds per call, with its interval within the record."""
    median = row.own_interval(row.time_kind or "")
    assert median is not None
    return median


def _grouped(rows: Iterable[Row], key_of: Callable[[Row], Hashable]) -> list[list[Row]]:
    """Return the successful rows with a time above zero, grouped by a function of the row."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        if row.status is Status.OK and row.time and row.time.median.value > 0:
            groups.setdefault(key_of(row), []).append(row)
    return list(groups.values())


def _over_sizes(rows: Iterable[Row]) -> list[list[Row]]:
    """Return groups of rows that differ only in size, smallest first."""
    groups = _grouped(
        rows, lambda row: (row.time_kind, row.key.phase, row.key.batch_size, row.key.precision)
    )
    return [sorted(group, key=lambda row: row.key.pixels) for group in groups]
