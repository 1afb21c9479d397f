"""Growth: how times grow with the size and rates with the batch, and the points that do not grow as the others do."""

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

#: Least number of sizes that show how a time grows: of fewer, three parameters leave one degree of freedom at most.
_LEAST_SIZES = 5
#: Relative half-width that a scaling model assumes for a median without an interval.
_ERROR_UNKNOWN = 0.05
#: Scatter around a scaling model, and half-width of most medians, above which it describes noise.
_SCATTER_MOST = 0.2
#: Tolerated relative drop of the time from a smaller to a larger size; tiles fill better at some sizes.
_FALL_TOLERANCE = 0.1
#: Relative drop of the samples per second from a smaller to a larger batch that is worth a warning.
_RATE_TOLERANCE = 0.05
#: A workspace: factor and bytes by which the peak memory of a size exceeds that of its neighbors.
_WORKSPACE_FACTOR, _WORKSPACE_BYTES = 1.5, 64 * 2**20
#: Limit on characters of a kernel's name, which may have thousands.
_LONGEST_NAME = 72


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Scaling model of one phase, batch size, precision and process over the input size.

    Attributes:
        key: key of the largest size.
        keys: keys of all sizes, smallest first.
        time_kind: name of the fitted time.
        fit: model of the seconds per call over the pixels as a fraction of those of the largest size.
        doubt: why the model does not show how the time grows, such as a large scatter; empty if it does.
    """

    key: Key
    keys: tuple[Key, ...]
    time_kind: str
    fit: scaling.ScalingFit
    doubt: str = ""


@dataclass(frozen=True, kw_only=True)
class Odd:
    """A size whose time does not fit those of the other sizes.

    Attributes:
        ratio: its time over the expected one.
        reference: source of the expected time, in words.
        other: the size with the expected time; None for that of the scaling model.
    """

    ratio: float
    reference: str
    other: Key | None = None


def scalings(known: Sequence[Row]) -> list[Scaling]:
    """Scaling models of the rows of a record, for groups with at least four sizes."""
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
    """Why the medians of some sizes do not show how the time grows; empty if they do."""
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
    """The sizes whose times are far from the scaling model, or that break the growth from smaller to larger sizes.

    Of sizes that disagree the fewest are odd: one slow size is, and not the larger ones that take less time.
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
    # a time far above the fit is suspect itself: compared with it, no other time counts as a fall
    for group in _over_sizes(known):
        found |= _falling([row for row in group if row.key not in found])
    return found


def kernels_of(record: Record) -> dict[Key, list[str]]:
    """The kernels of a call, in the order of execution, by the timed point whose layers were profiled."""
    kernels: dict[Key, list[str]] = {}
    for point in (point for point in record.points if is_layers(point.key)):
        lines = point.facts.get("layers", {}).get("lines", ())
        names = dict.fromkeys(name for line in lines for name in line["kernels"])
        kernels[without_replicate(timed_key(point.key))] = list(names)
    return kernels


def judge(
    known: Sequence[Row], kernels: Mapping[Key, Sequence[str]]
) -> dict[Key, tuple[Diagnostic, ...]]:
    """Diagnostics by point: odd sizes with the evidence that exists, and rates that fall as the batch grows."""
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
            ]  # the next sizes, as far as they exist
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
    """Whether a rate is below another by more than their intervals, or by more than 10 % if an interval is missing."""
    if rate.high is not None and other.low is not None:
        return rate.high < other.low
    return rate.value < (1 - _FALL_TOLERANCE) * other.value


def _falling(group: Sequence[Row]) -> dict[Key, Odd]:
    """The fewest rows without which no larger size takes less time: the one in most falls first, then the slower."""
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
    """Whether each size (column) takes less time than a smaller one (row), beyond both intervals and the tolerance."""
    lows, highs = (
        np.array([getattr(_median(row), end) for row in group], dtype=float)
        for end in ("low", "high")
    )
    pixels = np.array([row.key.pixels for row in group])
    is_less = (highs < lows[:, None]) & (medians < ((1 - _FALL_TOLERANCE) * medians)[:, None])
    return is_less & (pixels > pixels[:, None])


def _memory_evidence(row: Row, neighbors: Sequence[Row]) -> str:
    """A peak memory far above that of both neighbors: a workspace, so another algorithm of cuDNN."""
    peaks = [peak for other in neighbors if (peak := other.value(PEAK_MEMORY))]
    own, most = row.value(PEAK_MEMORY), max(peaks, default=None)
    if not own or not most or own < max(_WORKSPACE_FACTOR * most, most + _WORKSPACE_BYTES):
        return ""
    return f"its peak memory is {format_bytes(own)}, {format_bytes(most)} beside it, as if for another workspace"


def _kernel_evidence(
    row: Row, neighbors: Sequence[Row], kernels: Mapping[Key, Sequence[str]]
) -> str:
    """The first kernel of those that no neighbor launches; empty if there is none, or nothing was profiled."""
    profiled = [kernels[other.key] for other in neighbors if other.key in kernels]
    own = kernels.get(row.key, ()) if profiled else ()
    foreign = [name for name in own if not any(name in other for other in profiled)]
    if not foreign:
        return ""
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    return f"it launches kernels that its neighbors do not: {foreign[0][:_LONGEST_NAME]}{more}"


def _falling_rates(known: Iterable[Row]) -> Iterator[tuple[Key, Diagnostic]]:
    """Batch sizes with fewer samples per second than a smaller batch, of those whose rates have intervals."""
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
    """Group the successful rows that have a time above zero by a function of the row."""
    groups: dict[Hashable, list[Row]] = {}
    for each in known:
        if each.status is Status.OK and each.time and each.time.median.value > 0:
            groups.setdefault(by(each), []).append(each)
    return list(groups.values())


def _over_sizes(known: Iterable[Row]) -> list[list[Row]]:
    """Groups of rows that differ only in size, smallest first."""
    groups = _grouped(
        known, lambda row: (row.time_kind, row.key.phase, row.key.batch_size, row.key.precision)
    )
    return [sorted(group, key=lambda row: row.key.pixels) for group in groups]
