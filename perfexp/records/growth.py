"""Growth: how times scale with size and rates with batch, and which points break the trend."""

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
    from perfexp.records.summary import Row

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


def scalings(known: Sequence[Row]) -> list[Scaling]:
    """Return scaling models for groups of rows with at least four sizes."""
    found = []
    for group in _over_sizes(known):
        if len({each.key.pixels for each in group}) >= scaling.LEAST_SIZES:
            medians = [_median(each) for each in group]
            widths = [median.relative_half_width for median in medians]
            largest = group[-1].key.pixels
            fit = scaling.fit_scaling(
                [each.key.pixels / largest for each in group],
                [median.value for median in medians],
                [_ERROR_UNKNOWN if width is None else width for width in widths],
            )
            keys = tuple(each.key for each in group)
            kind, doubt = group[0].time_kind or "", _doubt(group, fit.scatter)
            found.append(Scaling(key=keys[-1], keys=keys, time_kind=kind, fit=fit, doubt=doubt))
    return found


def _doubt(group: Sequence[Row], scatter: float) -> str:
    """Return why the medians do not show how the time grows; empty if they do."""
    sizes, widths = (
        len({row.key.pixels for row in group}),
        [_median(row).relative_half_width for row in group],
    )
    wide, unknown = (
        sum(width > _SCATTER_MOST for width in widths if width is not None),
        widths.count(None),
    )
    of = f"of {len(group)} medians"
    parts = [f"{unknown} {of} have no interval"] * bool(unknown)
    parts += [f"{wide} {of} are uncertain by more than {_SCATTER_MOST:.0%}"] * bool(wide)
    few = [f"{sizes} sizes are too few ({_LEAST_SIZES} at least)"] * (sizes < _LEAST_SIZES)
    scattered = [f"the times scatter by {scatter:.0%}"] * (scatter > _SCATTER_MOST)
    return ", ".join([*few, *(parts if unknown + wide > len(group) / 2 else ()), *scattered])


def odd_sizes(known: Sequence[Row]) -> dict[Key, Odd]:
    """Return sizes that are far from the scaling model, or slower than a larger size.

    As few sizes as possible are flagged: the one slow size, not every larger size that is faster.
    """
    found: dict[Key, Odd] = {}
    for grown in scalings(known):
        for index in grown.fit.far:
            reference = (
                f"the fit over {len(grown.keys)} sizes (tolerated: ±{grown.fit.tolerance:.0%})"
            )
            found[grown.keys[index]] = Odd(
                ratio=1 + grown.fit.deviations[index], reference=reference
            )
    # a time far above the fit is suspect itself: other times are not compared with it
    for group in _over_sizes(known):
        found |= _falling([row for row in group if row.key not in found])
    return found


def kernels_of(record: Record) -> dict[Key, list[str]]:
    """Return each timed point's kernels in execution order, if its layers were profiled."""
    kernels: dict[Key, list[str]] = {}
    for point in (point for point in record.points if is_layers(point.key)):
        lines = point.facts.get("layers", {}).get("lines", ())
        names = dict.fromkeys(name for line in lines for name in line["kernels"])
        kernels[without_replicate(timed_key(point.key))] = list(names)
    return kernels


def judge(
    known: Sequence[Row], kernels: Mapping[Key, Sequence[str]]
) -> dict[Key, tuple[Diagnostic, ...]]:
    """Return diagnostics by point: odd sizes with evidence, and rates that fall as batches grow."""
    raised: dict[Key, tuple[Diagnostic, ...]] = {}
    odd = odd_sizes(known)
    for group in _over_sizes(known):
        usual = [row for row in group if row.key not in odd]
        pixels = [row.key.pixels for row in usual]
        for row in (row for row in group if row.key in odd):
            below, above = bisect_left(pixels, row.key.pixels), bisect_right(pixels, row.key.pixels)
            beside = [
                *usual[below - 1 : below],
                *usual[above : above + 1],
            ]  # the adjacent sizes, if they exist
            again = f"measured by {row.processes} processes" if row.processes > 1 else ""
            texts = (again, _memory_evidence(row, beside), _kernel_evidence(row, beside, kernels))
            seen = [text for text in texts if text]
            one, evidence = odd[row.key], f": {', '.join(seen)}" if seen else ""
            found = diagnostics.make(
                "scaling_unexpected", ratio=one.ratio, reference=one.reference, evidence=evidence
            )
            raised[row.key] = (found,)
    for key, diagnostic in _falling_rates(known):
        raised[key] = (*raised.get(key, ()), diagnostic)
    return raised


def is_clearly_below(rate: estimators.Interval, other: estimators.Interval) -> bool:
    """Return whether a rate is below another beyond both intervals.

    If an interval is missing, the difference must exceed 10 %.
    """
    if rate.high is not None and other.low is not None:
        return rate.high < other.low
    return rate.value < (1 - _FALL_TOLERANCE) * other.value


def _falling(group: Sequence[Row]) -> dict[Key, Odd]:
    """Return the fewest rows to remove so that no larger size takes less time.

    The row in most falls is removed first; if several tie, the slowest.
    """
    medians = np.array([_median(row).value for row in group])
    falls = _falls(group, medians)
    against = falls | falls.T
    counts = against.sum(axis=0)
    found: dict[Key, Odd] = {}
    while counts.any():
        most = np.flatnonzero(counts == counts.max())
        odd = int(most[medians[most].argmax()])
        others = np.flatnonzero(against[odd])
        against[odd] = against[:, odd] = False
        counts[others] -= 1
        counts[odd] = 0
        row, other = group[odd], group[others[np.abs(others - odd).argmin()]]
        which = "larger" if other.key.pixels > row.key.pixels else "smaller"
        reference = f"the {which} size {other.key.size_label}, beyond both intervals"
        found[row.key] = Odd(
            ratio=float(medians[odd]) / _median(other).value, reference=reference, other=other.key
        )
    return found


def _falls(group: Sequence[Row], medians: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each size (column) is clearly faster than a smaller size (row).

    The difference must exceed both intervals and the tolerance.
    """
    lows, highs = (
        np.array([getattr(_median(row), end) for row in group], dtype=float)
        for end in ("low", "high")
    )
    pixels = np.array([row.key.pixels for row in group])
    is_less = (highs < lows[:, None]) & (medians < ((1 - _FALL_TOLERANCE) * medians)[:, None])
    return is_less & (pixels > pixels[:, None])


def _memory_evidence(row: Row, neighbors: Sequence[Row]) -> str:
    """Describe a peak memory far above both neighbors, a sign of another cuDNN algorithm."""
    peaks = [peak for other in neighbors if (peak := other.value(PEAK_MEMORY))]
    own, most = row.value(PEAK_MEMORY), max(peaks, default=None)
    if not own or not most or own < max(_WORKSPACE_FACTOR * most, most + _WORKSPACE_BYTES):
        return ""
    return (
        f"its peak memory is {format_bytes(own)}, {format_bytes(most)} beside it, as if for "
        "another workspace"
    )


def _kernel_evidence(
    row: Row, neighbors: Sequence[Row], kernels: Mapping[Key, Sequence[str]]
) -> str:
    """Describe the first kernel that no neighbor launches; empty if there is none to report."""
    profiled = [kernels[other.key] for other in neighbors if other.key in kernels]
    own = kernels.get(row.key, ()) if profiled else ()
    foreign = [name for name in own if not any(name in other for other in profiled)]
    if not foreign:
        return ""
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    return f"it launches kernels that its neighbors do not: {foreign[0][:_LONGEST_NAME]}{more}"


def _falling_rates(known: Iterable[Row]) -> Iterator[tuple[Key, Diagnostic]]:
    """Yield batch sizes with clearly fewer samples per second than a smaller batch."""
    for group in _grouped(
        known, lambda row: (row.key.phase, row.key.input_size, row.key.precision)
    ):
        rated = [
            (row, rate)
            for row in group
            if (rate := row.own_interval("samples_per_second")) and rate.low is not None
        ]
        fastest = max(rated, key=lambda other: other[1].value)[0].key.batch_size if rated else 0
        for row, rate in rated:
            smaller = [other for other in rated if other[0].key.batch_size < row.key.batch_size]
            if not smaller:
                continue
            below, most = max(smaller, key=lambda other: other[1].value)
            if is_clearly_below(rate, most) and rate.value < (1 - _RATE_TOLERANCE) * most.value:
                ratio, batch = rate.value / most.value, below.key.batch_size
                yield (
                    row.key,
                    diagnostics.make("rate_falls", ratio=ratio, batch=batch, fastest=fastest),
                )


def _median(row: Row) -> estimators.Interval:
    found = row.own_interval(row.time_kind or "")
    assert found is not None
    return found


def _grouped(known: Iterable[Row], by: Callable[[Row], Hashable]) -> list[list[Row]]:
    """Group the successful rows with a time above zero by a function of the row."""
    groups: dict[Hashable, list[Row]] = {}
    for each in known:
        if each.status is Status.OK and each.time and each.time.median.value > 0:
            groups.setdefault(by(each), []).append(each)
    return list(groups.values())


def _over_sizes(known: Iterable[Row]) -> list[list[Row]]:
    """Return groups of rows that differ only in size, smallest first."""
    groups = _grouped(
        known, lambda row: (row.time_kind, row.key.phase, row.key.batch_size, row.key.precision)
    )
    return [sorted(group, key=lambda row: row.key.pixels) for group in groups]
