"""Baselines: the plan's algorithm and torch's own choices compared on the whole call, in turns.

A contestant is one way to compute the call: the applied algorithm, or a baseline, such as torch's
default. All contestants take turns in one process, so that each round's ratio is free of drifts.
`procedure` compares after the timing; `perfexp.gain` does the same in a user's program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from perfexp.convolution import AppliedAlgorithm, T
from perfexp.devices import Device
from perfexp.errors import Unsupported
from perfexp.records import diagnostics, races
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import CAPTURED_SPEEDUP, PROMISED_SPEEDUP, SPEEDUP, member
from perfexp.records.record import Metric, Point, Series
from perfexp.statistics import estimators
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import geometric_mean
from perfexp.timing import collecting, depth, queue, turns

if TYPE_CHECKING:
    from perfexp.convolution.applying import Applied

#: Runs some work while a contestant computes the convolutions.
_Runner = Callable[[Callable[[], Any]], Any]

#: Turns per contestant, interleaved so that all run at the same clock; an even number is balanced.
_ROUNDS = 6
#: Target length of a turn in seconds, and its minimum number of samples.
_TURN_SECONDS, _SAMPLES = 0.15, 5
#: First calls, not timed: a library chooses its kernels and caches fill.
_COLD_CALLS = 3


class Method(StrEnum):
    """How calls were timed: in a pre-filled queue, as CUDA graphs in it, or by the host's clock."""

    queue = "queue"
    graph = "graph"
    clock = "clock"


#: Description of each method in a diagnostic.
_HOW = {
    Method.queue: "launched kernel by kernel",
    Method.graph: "captured as CUDA graphs",
    Method.clock: "by the host's clock",
}


class BaselineComparison(NamedTuple):
    """Result of a comparison with all contestants launched the same way.

    Attributes:
        series: seconds per call of each contestant.
        speedups: the algorithm's speedup over each baseline, by name; empty if the host kept the
            device waiting.
    """

    method: Method
    series: list[Series]
    speedups: dict[str, Interval]


def judge(
    point: Point,
    algorithm: AppliedAlgorithm,
    call: collecting.Call,
    device: Device,
    capture: collecting.Capture,
) -> None:
    """Compare the algorithm with its baselines, and add series, speedups and diagnostics.

    Cached choices of algorithms that turn out slower end to end are discarded. The first comparison
    launches calls kernel by kernel, if they fit the launch queue. On an asynchronous device a
    second comparison uses captured calls only.

    Args:
        call: call of the whole model.
        capture: captures the call as it is computed at that moment.

    Raises:
        Unsupported: the call neither fits the launch queue nor can be captured.
    """
    plain = compare(algorithm, call, device)
    is_slower = plain is not None and _add(point, algorithm, plain, SPEEDUP)
    if device.asynchronous:
        try:  # last: a capture may change how an optimizer counts
            captured = compare(algorithm, call, device, capture)
        except Exception as error:
            is_expected = isinstance(error, Unsupported) or device.is_out_of_memory(error)
            if plain is None or not is_expected:
                raise
            for baseline in algorithm.baselines():
                point.metrics.append(_metric(member(CAPTURED_SPEEDUP, baseline), None, str(error)))
        else:
            assert captured is not None
            # if calls do not fit the queue one by one, the captured calls give both speedups
            families = [CAPTURED_SPEEDUP] if plain else [SPEEDUP, CAPTURED_SPEEDUP]
            is_slower |= _add(point, algorithm, captured, *families)
    if plain is None and point.facts.get("device_method") == "queue":
        point.doubts.append(
            diagnostics.make("device_of_graph", what="the baselines were compared as calls")
        )
    for baseline, ratio in races.promised(races.timed_passes(point, algorithm.group)).items():
        point.metrics.append(_metric(member(PROMISED_SPEEDUP, baseline), ratio))
    if is_slower:
        algorithm.discard_choices()


def _add(
    point: Point, algorithm: AppliedAlgorithm, compared: BaselineComparison, *families: str
) -> bool:
    """Add a comparison's series and speedups to a point; return whether a baseline is faster.

    Args:
        families: metric families, such as `speedup`; each gets a metric for each baseline.
    """
    point.series += compared.series
    point.doubts += _slower_diagnostics(compared, algorithm.name)
    point.facts.setdefault("rivals_method", compared.method.value)
    starved = "the host kept the device waiting"
    point.metrics += [
        _metric(member(family, baseline), compared.speedups.get(baseline), starved)
        for family in families
        for baseline in algorithm.baselines()
    ]
    return any(
        speedup.high is not None and speedup.high < 1 for speedup in compared.speedups.values()
    )


def _slower_diagnostics(compared: BaselineComparison, algorithm: str) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each baseline that the algorithm does not clearly beat."""
    for baseline, speedup in compared.speedups.items():
        assert speedup.low is not None and speedup.high is not None  # every round has a ratio
        ratio, how = speedup.value, _HOW[compared.method]
        if speedup.low <= 1:
            yield diagnostics.make(
                "not_faster",
                algorithm=algorithm,
                baseline=baseline,
                how=how,
                ratio=1 / ratio,
                low=1 / speedup.high,
                high=1 / speedup.low,
            )


def _metric(name: str, ratio: Interval | None, reason: str | None = None) -> Metric:
    """Return the metric of a speedup; without a ratio it is missing, with the reason."""
    if ratio is None:
        return Metric.of(name, None, reason=reason)
    return Metric.of(name, ratio.value, low=ratio.low, high=ratio.high)


class Contestant(Protocol):
    """An algorithm that runs work in its own way and in its baselines' ways.

    See `AppliedAlgorithm`, which an applied plan of the user's program imitates.
    """

    name: str

    def baselines(self) -> tuple[str, ...]: ...

    def run_baseline(self, baseline: str, work: Callable[[], T]) -> T: ...

    def run_eager(self, work: Callable[[], T]) -> T: ...


def compare(
    algorithm: Contestant,
    call: collecting.Call,
    device: Device,
    capture: collecting.Capture | None = None,
) -> BaselineComparison | None:
    """Time the algorithm and its baselines in turns, all launched the same way.

    Each round has another order. Times are device times if the device has a clock of its own. A
    speedup is the geometric mean of the rounds' median ratios, with its 95 % interval.

    Args:
        call: call of the whole model.
        capture: captures the call as it is computed at that moment; None to time it uncaptured.

    Returns:
        None if a contestant's call does not fit the launch queue.

    Raises:
        Unsupported: the captured call does not fit the launch queue either, or cannot be captured.
    """
    own_name = algorithm.name
    if own_name in algorithm.baselines():  # an algorithm per layer, compared with it everywhere
        own_name += "+layers"
    contestants = {own_name: _Turn(algorithm.run_eager, call, device, capture)}
    for name in algorithm.baselines():
        runner = partial(algorithm.run_baseline, name)
        contestants[name] = _Turn(runner, call, device, capture)
    if not all(turn.possible for turn in contestants.values()):
        return None
    rounds_of: dict[str, list[collecting.Samples]] = {name: [] for name in contestants}
    with collecting.undisturbed():
        for order in islice(turns.balanced(list(contestants)), _ROUNDS):
            for name in order:
                rounds_of[name].append(contestants[name]())
    suffix = "" if capture is None else "/captured"
    series, medians = [], {}
    for name, rounds in rounds_of.items():
        series.append(
            Series(
                name=f"rival/{name}{suffix}",
                samples=np.concatenate(rounds).tolist(),
                calls_per_sample=contestants[name].k,
            )
        )
        medians[name] = np.array(list(map(np.median, rounds)))
    speedups = {}
    if not any(turn.starved for turn in contestants.values()):
        for name in algorithm.baselines():
            speedups[name] = geometric_mean((medians[name] / medians[own_name]).tolist())
    method = Method.queue if capture is None else Method.graph
    if not device.asynchronous:
        method = Method.clock
    return BaselineComparison(method, series, speedups)


def gain(applied: Applied, call: collecting.Call) -> Interval:
    """Return how much faster a call is with an applied plan, with its 95 % interval.

    >>> import perfexp, torch
    >>> module, images = torch.nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)
    >>> settings = {"gpu": "cpu", "tracking": "none", "stopping": "fixed", "input_size": 8}
    >>> record = perfexp.measure(module, algorithm="gemm", output_dir="run", **settings)
    >>> with perfexp.apply(module, "run") as applied:
    ...     interval = gain(applied, lambda: module(images))
    >>> interval.value > 0
    True

    Args:
        applied: what `perfexp.apply` yields.
        call: function without arguments that calls the module, for example a training step.

    Raises:
        Unsupported: the host keeps the device waiting, so there is no gain to measure.
    """
    applied.device.start()
    compared = compare(applied, call, applied.device)
    if compared is None or not compared.speedups:
        raise Unsupported(
            "the host keeps the device waiting, so a plan gains nothing: use a larger batch"
        )
    return compared.speedups["default"]


class _Turn:
    """Timer for a single contestant: `turn()` times a few samples of the model's call.

    Making it runs the model: to warm up, to capture the call if wanted, and to choose the length of
    a turn.

    Attributes:
        k: model calls per sample.
        possible: whether the model call fits the launch queue.

    Args:
        runner: runs work while the contestant computes the convolutions.
        call: call of the whole model.
        capture: captures the call; None to time it uncaptured.

    Raises:
        Unsupported: the captured call does not fit the launch queue either.
    """

    def __init__(
        self,
        runner: _Runner,
        call: collecting.Call,
        device: Device,
        capture: collecting.Capture | None = None,
    ) -> None:
        self._runner, self._call, self._device, self._capture = runner, call, device, capture
        self.k, self.possible = 1, True
        self._block: Callable[[int], collecting.Samples] = collecting.HostChain(call, device)
        runner(self._prepare)

    def _prepare(self) -> None:
        """Make the first calls, capture the call if wanted, and choose the length of a turn."""
        for _ in range(_COLD_CALLS):
            self._call()
        self._device.synchronize()
        if self._capture is not None:
            self._call = self._capture()
        if self._device.asynchronous:
            self.k, chunk, seconds = depth.group_calls(self._call, self._device)
            self.possible = bool(chunk)
            if self._capture is not None and not chunk:
                raise Unsupported("the call does not fit the launch queue even as a CUDA graph")
            self._block = queue.Chain(self._call, self._device, max(1, chunk), self.k)
        else:
            seconds = estimators.median_interval(self._block(_COLD_CALLS)).value
        self._samples = max(_SAMPLES, round(_TURN_SECONDS / max(seconds * self.k, 1e-9)))

    def __call__(self) -> collecting.Samples:
        """Take one turn and return its samples, in seconds per call."""
        samples: collecting.Samples = self._runner(partial(self._block, self._samples))
        return samples

    @property
    def starved(self) -> int:
        """Return in how many fills of the queue the device had to wait for the host, so far."""
        return self._block.held.starved if isinstance(self._block, queue.Chain) else 0
