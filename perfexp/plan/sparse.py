"""Sparse sweep: measure a few of many sizes and batch sizes, and predict the others.

Each next point is chosen by the results so far: a Gaussian process over size and batch
(`statistics.gaussian_process`) predicts the times, and the least certain point is measured next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from perfexp.errors import UserError
from perfexp.plan.sweep import ANCHORS, Point, Sizes, Sweep, spread
from perfexp.records.point_times import DEVICE_TIMES, first_median_interval
from perfexp.records.quantities import COVERAGE
from perfexp.records.record import Point as Measured
from perfexp.records.record import Status
from perfexp.records.sizes import Size
from perfexp.statistics import selection
from perfexp.statistics.estimators import Interval, Samples
from perfexp.statistics.gaussian_process import Curve

Pair = tuple[Size, int]

#: Fewest and most points that a curve is predicted from.
LEAST_MEASURED, MOST_MEASURED = 4, 100
#: Standard error of a log median without an interval, and half-widths of a 95 % interval per
#: standard error.
_UNKNOWN_ERROR, _HALF_WIDTHS = 0.02, 1.96
#: Fewest points with an energy, which is predicted from the times, too, or with layers.
LEAST_ANCHORS = LEAST_MEASURED - 1
#: Number of points where the algorithm computes nothing that end a sweep.
_WITHOUT_EFFECT = 2
#: Times that are predicted, best first.
_KINDS = (*DEVICE_TIMES, "latency", "throughput")


class Sparse:
    """Sweep that measures some sizes and batch sizes and predicts the others.

    Without given sizes, evenly spaced square sizes are used. Six points are measured first, then
    always the point with the least certain prediction. The sweep ends when nine in ten of the
    others are predicted within the target, or when `measured` points have been tried. It also ends
    after two points if no convolution ran the algorithm at either.
    """

    def __init__(
        self,
        *,
        measured: int = 12,
        target: float = 0.03,
        anchors: int | None = ANCHORS,
        layers_every: int = 4,
        num_sizes: int = 100,
        min_size: int = 224,
        max_size: int = 512,
        skip_larger: bool = False,
        skip_oom: bool = False,
    ) -> None:
        if not LEAST_MEASURED <= measured <= MOST_MEASURED:
            raise UserError(
                f"sweep.measured={measured}: set a number from {LEAST_MEASURED} to {MOST_MEASURED}."
            )
        if not 0 < target < 1:
            raise UserError(
                f"sweep.target={target:g}: set a relative half-width between 0 and 1, such as 0.03."
            )
        if anchors is not None and anchors < LEAST_ANCHORS:
            raise UserError(
                f"sweep.anchors={anchors}: set a number from {LEAST_ANCHORS}, or null for all of "
                "the first points."
            )
        if layers_every < 1:
            raise UserError(f"sweep.layers_every={layers_every}: set a number from 1.")
        self._anchors, self._layers_every = anchors, layers_every
        self.skip_larger, self.skip_oom = skip_larger, skip_oom
        self.measured, self.target = measured, target
        self._every = Sizes(num_sizes=num_sizes, min_size=min_size, max_size=max_size)

    def candidates(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[Pair]:
        """List all sizes and batch sizes, whether they will be measured or predicted.

        Raises:
            UserError: there are none.
        """
        every: Sweep = Point() if sizes else self._every
        return every.points(sizes, batch_sizes)

    def points(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[Pair]:
        """List the sizes and batch sizes that are measured first, in any case."""
        pairs = self.candidates(sizes, batch_sizes)
        x, number = selection.coordinates(pairs), min(selection.INITIAL, self.measured)
        return [pairs[index] for index in selection.initial(selection.scaled(x, x), number)]

    def chosen(
        self, sizes: Sequence[Size], batch_sizes: Sequence[int], results: Iterable[Measured]
    ) -> list[Pair]:
        """List the sizes and batch sizes to measure, given the results so far.

        These are all points that were tried, plus the next point once the first points have a
        result. If the algorithm falls back everywhere, they are those that were tried. The plan
        asks for them after each measured point.
        """
        pairs = self.candidates(sizes, batch_sizes)
        places = {pair: index for index, pair in enumerate(pairs)}
        wanted = set(map(places.__getitem__, self.points(sizes, batch_sizes)))
        results, timed, tried = list(results), [], set[int]()
        if falls_back(results):
            return [pair for pair in pairs if pair in set(map(pair_of, results))]
        for result in results:
            if result.key.is_timed and not result.key.replicate and pair_of(result) in places:
                timed.append(result)
                tried.add(places[pair_of(result)])
        if wanted <= tried:
            following = self._following(pairs, places, timed, tried)
            wanted |= {following} if following is not None else set()
        return [pairs[index] for index in sorted(wanted | tried)]

    def anchors(self, sizes: Sequence[Size], batch_sizes: Sequence[int]) -> list[Pair]:
        """List the points that get an energy and are measured in further processes, too.

        They are all first points if both sizes and batch sizes vary: three do not show both.
        """
        pairs = self.points(sizes, batch_sizes)
        varying = [len(set(values)) > 1 for values in zip(*pairs, strict=True)]
        if self._anchors is None or all(varying):
            return pairs
        return spread(pairs, self._anchors)

    def with_layers(self, pairs: Collection[Pair]) -> list[Pair]:
        """Return the measured points that get layers."""
        return spread(pairs, max(LEAST_ANCHORS, -(-len(pairs) // self._layers_every)))

    def _following(
        self,
        pairs: Sequence[Pair],
        places: Mapping[Pair, int],
        timed: Sequence[Measured],
        tried: set[int],
    ) -> int | None:
        """Return the index of the next pair to measure; None if the sweep is over.

        Args:
            pairs: all sizes and batch sizes.
            places: index of each pair.
            timed: results so far.
            tried: indices of their pairs.
        """
        if len(tried) >= self.measured:
            return None
        at = selection.coordinates(pairs)
        x, spans = selection.scaled(at, at), np.ptp(at, axis=0)
        phases: dict[str, list[Measured]] = {}
        for result in timed:
            phases.setdefault(result.key.phase, []).append(result)
        curves = []
        for measured in phases.values():
            medians = medians_of(measured)
            indices = list(map(places.__getitem__, medians))
            curves.append(curve_of(x[indices], spans, list(medians.values())))
        too_large = out_of_memory(timed)
        impossible = {index for index, pair in enumerate(pairs) if exceeds_memory(pair, too_large)}
        return selection.following(x, curves, tried, target=self.target, impossible=impossible)


def falls_back(points: Iterable[Measured]) -> bool:
    """Return whether two points are known to have run nothing by the algorithm."""
    shares = dict[Pair, float]()
    for point in points:
        share = point.metric(COVERAGE)
        if point.key.is_timed and share is not None and share.value is not None:
            shares[pair_of(point)] = max(share.value, shares.get(pair_of(point), 0.0))
    return len(shares) >= _WITHOUT_EFFECT and not any(shares.values())


def pair_of(point: Measured) -> Pair:
    """Return a point's input size and batch size.

    Results are matched with the sweep's pairs by it.
    """
    return point.key.input_size, point.key.batch_size


def medians_of(points: Sequence[Measured]) -> dict[Pair, Interval]:
    """Return the median seconds per call for a phase's successful points.

    All medians are of the same kind of time; empty if the points have no kind in common.
    """
    successful = [result for result in points if result.status is Status.OK]
    for kind in _KINDS:
        medians = {}
        for point in successful:
            median = first_median_interval(point, kind)
            if median is None:
                break
            if median.value > 0:
                medians[pair_of(point)] = median
        else:
            if successful:
                return medians
    return {}


def curve_of(x: Samples, spans: Samples, values: Sequence[Interval]) -> Curve:
    """Return a curve that predicts times, from measured values with their intervals.

    The sweep chooses the next pair with it, and `prediction` answers from it.

    Args:
        x: scaled coordinates of the measured points, shape (n, 2).
        spans: ranges of the unscaled coordinates over all points, shape (2,).
        values: seconds per call.
    """
    errors = np.array([*map(standard_error, values)])
    return Curve(x=x, spans=spans, y=np.log([value.value for value in values]), errors=errors)


def standard_error(value: Interval) -> float:
    """Return the standard error of a measured value's logarithm, from its 95 % interval.

    The Gaussian process weighs a point by it.
    """
    width = value.log_half_width
    if width is None:
        return _UNKNOWN_ERROR
    return width / _HALF_WIDTHS


def out_of_memory(points: Iterable[Measured]) -> frozenset[Pair]:
    """Return the sizes and batch sizes that ran out of memory, or were predicted to.

    Larger points are not tried, and are not predicted.
    """
    failures = (Status.OOM, Status.OOM_PREDICTED)
    return frozenset(pair_of(point) for point in points if point.status in failures)


def exceeds_memory(pair: Pair, too_large: Iterable[Pair]) -> bool:
    """Return whether a point is nowhere smaller than some point that ran out of memory.

    For example, 256 · batch 8 exceeds memory if 224 · batch 8 did. Such points are neither measured
    nor predicted.
    """
    (height, width), batch = pair
    return any(height >= h and width >= w and batch >= b for (h, w), b in too_large)
