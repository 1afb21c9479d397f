"""Rivals: the whole call by the algorithm that was asked for and by what torch would take, in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfexp.algorithms import Algorithm
from perfexp.devices import Device
from perfexp.errors import Unsupported
from perfexp.probes import depth, queue, timing
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric, Point, Series
from perfexp.statistics import estimators

#: How a rival's metric is called, before its name.
_SPEEDUP = "algorithm/speedup_over_"

_Computing = Callable[[Callable[[], Any]], Any]

#: A choice layer by layer that is so much slower as a whole has to be told.
_SLOWER = 0.98
#: So often each one has its turn, all of them see the same clock then.
_ROUNDS = 5
#: A turn lasts so long, and has so many samples at least.
_TURN_SECONDS, _SAMPLES = 0.15, 5
#: First calls of a turn that count for nothing: a library chooses anew, caches fill.
_COLD_CALLS = 3


class Compared(NamedTuple):
    """What comes of a comparison.

    Attributes:
        series: `rival/NAME`, of each one's time per call.
        metrics: how many times faster the algorithm is than each rival.
        doubts: about these.
        method: as what calls were timed: `queue`, one launch after the other behind a held queue; `graph`, captured as
            one; `clock`, by the host's.
    """

    series: list[Series]
    metrics: list[Metric]
    doubts: list[Diagnostic]
    method: str


def judge(point: Point, algorithm: Algorithm, call: timing.Call, device: Device, capture: timing.Capture) -> None:
    """Add what comes of `compare` to a point; a choice that is slower as a whole is doubted, and not kept.

    Args:
        point: under way.
        algorithm: applied to the model.
        call: of the whole model.
        device: that computes.
        capture: makes one launch of the call as it is computed now.
    """
    compared = compare(algorithm, call, device, capture)
    point.series += compared.series
    point.metrics += compared.metrics
    point.doubts += compared.doubts
    point.facts["rivals_method"] = compared.method
    if compared.method == "graph" and point.facts.get("device_method") == "queue":
        point.doubts.append(diagnostics.make("rivals_by_graph"))
    slower = {each.name: each.value for each in compared.metrics if each.value is not None and each.value < _SLOWER}
    point.doubts += [
        diagnostics.make("choice_slower", baseline=name.removeprefix(_SPEEDUP), ratio=1 / speedup)
        for name, speedup in slower.items()
    ]
    if slower:
        algorithm.regret()


def compare(algorithm: Algorithm, call: timing.Call, device: Device, capture: timing.Capture) -> Compared:
    """The algorithm and each of its rivals, in turns.

    The time is the device's own where it has one; where its queue does not take the call of each, all are captured. The
    ratio is the median over the rounds of the ratio of medians; where the rounds differ so much that the algorithm may
    as well be slower, that is a doubt.

    Args:
        algorithm: applied to the model.
        call: of the whole model.
        device: that computes.
        capture: makes one launch of the call as it is computed now.

    Raises:
        Unsupported: the queue does not take the call, and it can't be captured.
    """
    ours = algorithm.name if algorithm.name not in algorithm.rivals() else f"{algorithm.name}+layers"
    computing: dict[str, _Computing] = {ours: _now}
    computing |= {rival: partial(algorithm.instead, rival) for rival in algorithm.rivals()}
    turns = {name: _Turn(each, call, device) for name, each in computing.items()}
    method = "queue" if device.asynchronous else "clock"
    if not all(turn.possible for turn in turns.values()):
        method = "graph"
        turns = {name: _Turn(each, call, device, capture) for name, each in computing.items()}
    taken: dict[str, list[timing.Samples]] = {name: [] for name in turns}
    with timing.undisturbed():
        for _ in range(_ROUNDS):
            for name, turn in turns.items():
                taken[name].append(turn())
    series = [
        Series(name=f"rival/{name}", samples=np.concatenate(rounds).tolist(), calls_per_sample=turns[name].k)
        for name, rounds in taken.items()
    ]
    starved = sum(turn.starved for turn in turns.values())
    if starved:
        reason = f"the host kept the device waiting in {starved} fills of the queue"
        unknown = [Metric(name=_ratio(rival), value=None, unit="1", reason=reason) for rival in algorithm.rivals()]
        return Compared(series, unknown, [], method)
    own = [float(np.median(samples)) for samples in taken[ours]]
    metrics, unsure = [], []
    for rival in algorithm.rivals():
        ratios = [float(np.median(samples)) / mine for samples, mine in zip(taken[rival], own, strict=True)]
        ratio, (across, _) = float(np.median(ratios)), estimators.across_interval(ratios)
        metrics.append(Metric(name=_ratio(rival), value=ratio, unit="1"))
        assert across.low is not None and across.high is not None  # of as many as there are rounds
        if across.low < 1 < across.high and not _SLOWER <= ratio <= 1 / _SLOWER:
            unsure.append(
                diagnostics.make("speedup_unsure", baseline=rival, ratio=ratio, low=across.low, high=across.high)
            )
    return Compared(series, metrics, unsure, method)


def _now(work: Callable[[], Any]) -> Any:
    return work()


def _ratio(rival: str) -> str:
    return f"{_SPEEDUP}{rival}"


class _Turn:
    """One that computes, and how its calls are grouped.

    Args:
        computing: runs what it is given while it computes.
        call: of the whole model.
        device: that works.
        capture: makes one launch of the call; None to take the call as it is.

    Raises:
        Unsupported: the launch does not fit either.
    """

    def __init__(
        self, computing: _Computing, call: timing.Call, device: Device, capture: timing.Capture | None = None
    ) -> None:
        self._computing, self._call, self._device, self._capture = computing, call, device, capture
        self.k, self.possible = 1, True
        self._block: Callable[[int], timing.Samples] = timing.HostChain(call, device)
        computing(self._prepare)

    def _prepare(self) -> None:
        for _ in range(_COLD_CALLS):
            self._call()
        self._device.synchronize()
        if self._capture is not None:
            self._call = self._capture()
        if self._device.asynchronous:
            self.k, chunk, seconds = depth.fit(self._call, self._device)
            self.possible = bool(chunk)
            if self._capture is not None and not chunk:
                raise Unsupported("the device's queue does not even take the call as a graph")
            self._block = queue.Chain(self._call, self._device, max(1, chunk), self.k)
        else:
            seconds = estimators.median_interval(self._block(_COLD_CALLS)).value
        self._samples = max(_SAMPLES, round(_TURN_SECONDS / max(seconds * self.k, 1e-9)))

    def __call__(self) -> timing.Samples:
        """Samples of a turn, seconds per call."""
        taken: timing.Samples = self._computing(partial(self._block, self._samples))
        return taken

    @property
    def starved(self) -> int:
        """Fills of the queue that were taken although the device did not wait long enough."""
        return self._block.held.starved if isinstance(self._block, queue.Chain) else 0
