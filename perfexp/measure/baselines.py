"""Baselines: the whole call by the algorithm of the plan and by torch's own choices, in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfexp.algorithms import AppliedAlgorithm
from perfexp.devices import Device
from perfexp.errors import Unsupported
from perfexp.probes import depth, queue, timing
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric, Point, Series
from perfexp.statistics import estimators, variance

#: Name of a baseline's metric, before the name of the baseline.
_SPEEDUP = "algorithm/speedup_over_"

_Runner = Callable[[Callable[[], Any]], Any]

#: Speedup below which a layer-by-layer choice counts as slower end to end.
_SLOWER = 0.98
#: Turns of each contestant, interleaved so that all of them run at the same clock.
_ROUNDS = 5
#: Target length of a turn, and its least number of samples.
_TURN_SECONDS, _SAMPLES = 0.15, 5
#: First calls, not timed: a library chooses its kernels and caches fill.
_COLD_CALLS = 3


class Comparison(NamedTuple):
    """Result of a comparison.

    Attributes:
        series: `rival/NAME`, the time per call of each contestant.
        metrics: speedup of the algorithm over each baseline.
        doubts: diagnostics of the speedups.
        method: how calls were timed: `queue`, back to back behind a pre-filled queue; `graph`, as CUDA graphs; `clock`,
            by the host's clock.
    """

    series: list[Series]
    metrics: list[Metric]
    doubts: list[Diagnostic]
    method: str


def judge(
    point: Point, algorithm: AppliedAlgorithm, call: timing.Call, device: Device, capture: timing.Capture
) -> None:
    """Add a comparison to a point, and discard cached choices that are slower end to end.

    Args:
        call: call of the whole model.
        capture: captures the call as it is computed at that moment.
    """
    compared = compare(algorithm, call, device, capture)
    point.series += compared.series
    point.metrics += compared.metrics
    point.doubts += compared.doubts
    point.facts["rivals_method"] = compared.method
    if compared.method == "graph" and point.facts.get("device_method") == "queue":
        point.doubts.append(diagnostics.make("rivals_by_graph"))
    slower = {
        metric.name.removeprefix(_SPEEDUP): metric.value
        for metric in compared.metrics
        if metric.value is not None and metric.value < _SLOWER
    }
    point.doubts += [
        diagnostics.make("choice_slower", baseline=baseline, ratio=1 / speedup) for baseline, speedup in slower.items()
    ]
    if slower:
        algorithm.discard_choices()


def compare(algorithm: AppliedAlgorithm, call: timing.Call, device: Device, capture: timing.Capture) -> Comparison:
    """Time the algorithm and each of its baselines in turns.

    The time is the device's own where it has one; if one contestant's call does not fit the launch queue, all are
    captured. A speedup is the median over the rounds of the ratio of medians. It is qualified if the rounds differ so
    much that the algorithm may just as well be slower.

    Args:
        call: call of the whole model.
        capture: captures the call as it is computed at that moment.

    Raises:
        Unsupported: the call neither fits the launch queue nor can be captured.
    """
    own_name = algorithm.name if algorithm.name not in algorithm.baselines() else f"{algorithm.name}+layers"
    runners: dict[str, _Runner] = {own_name: lambda work: work()}
    runners |= {baseline: partial(algorithm.run_baseline, baseline) for baseline in algorithm.baselines()}
    turns = {name: _Turn(runner, call, device) for name, runner in runners.items()}
    method = "queue" if device.asynchronous else "clock"
    if not all(turn.possible for turn in turns.values()):
        method = "graph"
        turns = {name: _Turn(runner, call, device, capture) for name, runner in runners.items()}
    rounds_of: dict[str, list[timing.Samples]] = {name: [] for name in turns}
    with timing.undisturbed():
        for _ in range(_ROUNDS):
            for name, turn in turns.items():
                rounds_of[name].append(turn())
    series = [
        Series(name=f"rival/{name}", samples=np.concatenate(rounds).tolist(), calls_per_sample=turns[name].k)
        for name, rounds in rounds_of.items()
    ]
    starved = sum(turn.starved for turn in turns.values())
    if starved:
        reason = f"the host kept the device waiting in {starved} fills of the queue"
        missing = [
            Metric(name=f"{_SPEEDUP}{baseline}", value=None, unit="1", reason=reason)
            for baseline in algorithm.baselines()
        ]
        return Comparison(series, missing, [], method)
    own = [float(np.median(samples)) for samples in rounds_of[own_name]]
    metrics, unsure = [], []
    for baseline in algorithm.baselines():
        ratios = [float(np.median(samples)) / mine for samples, mine in zip(rounds_of[baseline], own, strict=True)]
        ratio, across = float(np.median(ratios)), variance.geometric_mean(ratios)
        metrics.append(Metric(name=f"{_SPEEDUP}{baseline}", value=ratio, unit="1"))
        assert across.low is not None and across.high is not None  # every round has a ratio
        if across.low < 1 < across.high and not _SLOWER <= ratio <= 1 / _SLOWER:
            unsure.append(
                diagnostics.make("speedup_unsure", baseline=baseline, ratio=ratio, low=across.low, high=across.high)
            )
    return Comparison(series, metrics, unsure, method)


class _Turn:
    """The turns of one contestant.

    Args:
        runner: runs some work while the contestant computes the convolutions.
        call: call of the whole model.
        capture: captures the call; None to time it as it is.

    Raises:
        Unsupported: the captured call does not fit the launch queue either.
    """

    def __init__(
        self, runner: _Runner, call: timing.Call, device: Device, capture: timing.Capture | None = None
    ) -> None:
        self._runner, self._call, self._device, self._capture = runner, call, device, capture
        self.k, self.possible = 1, True
        self._block: Callable[[int], timing.Samples] = timing.HostChain(call, device)
        runner(self._prepare)

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
                raise Unsupported("the call does not fit the launch queue even as a CUDA graph")
            self._block = queue.Chain(self._call, self._device, max(1, chunk), self.k)
        else:
            seconds = estimators.median_interval(self._block(_COLD_CALLS)).value
        self._samples = max(_SAMPLES, round(_TURN_SECONDS / max(seconds * self.k, 1e-9)))

    def __call__(self) -> timing.Samples:
        """Return the samples of one turn, seconds per call."""
        samples: timing.Samples = self._runner(partial(self._block, self._samples))
        return samples

    @property
    def starved(self) -> int:
        """Fills of the queue that the host did not finish before the device began."""
        return self._block.held.starved if isinstance(self._block, queue.Chain) else 0
