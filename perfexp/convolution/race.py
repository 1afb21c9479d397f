"""Races between engines that compute the same: the rules, their threads, and a cache of winners.

A first race nominates, a second on fresh data decides. Calls take turns, so that all meet the same
conditions. A turn times a call on the device, in seconds; a round is one turn of each call.
`algorithm=fastest` and `execution.attention=fastest` hold races.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any

import torch

from perfexp.convolution import T, replays
from perfexp.convolution.backends import PassChoice
from perfexp.convolution.coverage import Pass
from perfexp.convolution.cudnn import CudnnError
from perfexp.convolution.operators import BENCHMARK, DEFAULT
from perfexp.cost.tensors import tensors_in
from perfexp.devices import Device
from perfexp.devices.cpu import processor_name
from perfexp.errors import Unsupported
from perfexp.host.cache import JsonCache
from perfexp.models import cuda_graphs
from perfexp.records import point_diagnostics
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import geometric_mean
from perfexp.timing import collecting, turns
from perfexp.timing.conditions import Observer
from perfexp.version import __version__

#: Number of rounds of the first race.
_FIRST_ROUNDS = 4
#: A call that is slower than the best by this factor in both of the first two rounds is dropped.
_HOPELESS = 1.5
#: Rounds after which the second race checks its result; it ends with the last of them.
_CHECKED_ROUNDS = (8, 16)
#: Distance of the ratio from 1, in half-widths of its interval, at which the second race ends
#: early. With a single half-width, an early end would be a second chance to find a difference that
#: does not exist.
_CLEAR_HALF_WIDTHS = 2.0
#: Calls that are slower than the nominee by less than this factor are timed again, up to this
#: number.
_CLOSE, _MOST_CLOSE = 1.05, 2

#: Default limits of the relative L2 error against float64: a multiple of the data type's rounding
#: error.
MAX_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}

Run = Callable[[], Any]
Runner = Callable[[str, Sequence[torch.Tensor]], Run]
Winners = dict[Pass, PassChoice]
Calls = Mapping[str, collecting.Call]
#: Maps a call's name to the function that runs its work, in this thread or in an isolated thread.
Where = Callable[[str], Callable[[Callable[[], Any]], Any]]


class Launching(StrEnum):
    """How a race launched all calls: as CUDA graphs, kernel by kernel, or synchronously."""

    captured = "captured"
    eager = "eager"
    clock = "clock"


@dataclass(frozen=True, kw_only=True)
class RaceOutcome:
    """Result of a second race.

    Attributes:
        chosen: the fastest call, or the default if the second race shows no difference.
        launching: how the deciding race launched the calls.
        seconds: call times with 95 % intervals, by launching and name.
        speedups: default time divided by call time, by launching and name.
        not_captured: why the calls were not captured; None if they were.
        unsteady: why the result must not be cached for other processes; None if it may be.
    """

    chosen: str
    launching: Launching
    seconds: Mapping[Launching, Mapping[str, Interval]]
    speedups: Mapping[Launching, Mapping[str, Interval]]
    not_captured: str | None = None
    unsteady: str | None = None

    def facts(self) -> dict[str, Any]:
        """Return the result as fields for `EngineFacts`; times are in seconds."""
        races: dict[str, dict[str, Any]] = {}
        for launching, seconds in self.seconds.items():
            speedups = self.speedups[launching]
            races[launching.value] = {
                name: {**_ends("seconds", interval), **_ends("speedup", speedups[name])}
                for name, interval in seconds.items()
            }
        deciding = self.seconds[self.launching]
        return {
            "seconds": {name: interval.value for name, interval in deciding.items()},
            "launching": self.launching.value,
            "races": races,
            "not_captured": self.not_captured,
            "not_cached": self.unsteady,
        }


@dataclass(kw_only=True)
class Race:
    """Holds the two races on a device. All calls must have run before.

    Attributes:
        default: name of the call that others have to beat.
        where: runs a call's work in the right thread, by name.
        captures: returns a function that captures each call of a race as a single launch. That
            function raises `Unsupported` if the capture is impossible; then no call is captured.
            None for a device without graphs.
    """

    device: Device
    default: str
    where: Where = lambda _: lambda work: work()
    captures: Callable[[], Callable[[collecting.Call], collecting.Call]] | None = None
    _not_captured: str | None = None

    def nominate(self, calls: Calls) -> list[str]:
        """Return the fastest call and up to two that are nearly as fast, ordered by time.

        The first race has four rounds; hopeless calls leave after two.
        """
        contestants = self._captured(calls) or self._plain(calls)
        turn_seconds: dict[str, list[float]] = {name: [] for name in calls}
        running, orders = set(calls), turns.balanced(list(calls))
        with collecting.undisturbed():
            for number in range(_FIRST_ROUNDS):
                order = [name for name in next(orders) if name in running]
                self._round({name: contestants[name] for name in order}, turn_seconds)
                if number == 1:
                    best = min(min(seconds) for seconds in turn_seconds.values())
                    running = {
                        name for name in running if min(turn_seconds[name]) <= _HOPELESS * best
                    }
        means = {name: geometric_mean(turn_seconds[name]).value for name in running}
        ranked = sorted(means, key=lambda name: means[name])
        close = [name for name in ranked if means[name] < _CLOSE * means[ranked[0]]]
        return close[: 1 + _MOST_CLOSE]

    def decide(self, calls: Calls, nominee: str) -> RaceOutcome:
        """Time calls on fresh data, and choose between the default and the first race's nominee.

        Both must be among the calls. Only the nominee can win: the fastest of several calls in a
        single race is also the luckiest. It wins if its speedup's 95 % interval lies above 1.
        """
        plain = Launching.eager if self.device.asynchronous else Launching.clock
        by_launching: dict[Launching, dict[str, turns.Turn]] = {}
        if captured := self._captured(calls):
            by_launching[Launching.captured] = captured
        by_launching[plain] = self._plain(calls)
        entries = {
            (launching, name): turn
            for launching, named in by_launching.items()
            for name, turn in named.items()
        }
        # captured calls decide if there are any
        decisive = next(iter(by_launching))
        turn_seconds: dict[tuple[Launching, str], list[float]] = {key: [] for key in entries}
        orders, observer = turns.balanced(list(entries)), Observer(self.device)
        with collecting.undisturbed():
            for number in range(1, _CHECKED_ROUNDS[-1] + 1):
                begun_ns = self.device.now_ns()
                self._round({key: entries[key] for key in next(orders)}, turn_seconds)
                observer.block_ended("device", (self.device.now_ns() - begun_ns) * 1e-9)
                if number in _CHECKED_ROUNDS and _is_clear(
                    self._speedup(turn_seconds, decisive, nominee)
                ):
                    break
        starved = {launching for (launching, _), turn in entries.items() if turn.starved}
        seconds: dict[Launching, dict[str, Interval]] = {}
        speedups: dict[Launching, dict[str, Interval]] = {}
        for launching in by_launching:
            if launching is decisive or launching not in starved:
                seconds[launching] = {
                    name: geometric_mean(turn_seconds[launching, name]) for name in calls
                }
                speedups[launching] = {
                    name: self._speedup(turn_seconds, launching, name) for name in calls
                }
        low = speedups[decisive][nominee].low
        return RaceOutcome(
            chosen=nominee if low is not None and low > 1 else self.default,
            launching=decisive,
            seconds=seconds,
            speedups=speedups,
            not_captured=self._not_captured,
            unsteady=_why_unsteady(observer, is_starved=decisive in starved),
        )

    def _captured(self, calls: Calls) -> dict[str, turns.Turn] | None:
        """Return turns of the captured calls; None if some cannot be captured or have no memory."""
        if self.captures is None or self._not_captured is not None:
            return None
        capture = self.captures()
        try:
            captured = {
                name: self.where(name)(partial(capture, call)) for name, call in calls.items()
            }
        except Exception as error:
            if not (isinstance(error, Unsupported) or self.device.is_out_of_memory(error)):
                raise
            self._not_captured = next(iter(str(error).splitlines()), type(error).__name__)
            return None
        return self._plain(captured, is_short=True)

    def _plain(self, calls: Calls, *, is_short: bool = False) -> dict[str, turns.Turn]:
        """Return a turn for each call, made in the call's own thread.

        Args:
            is_short: whether a call is at most a few launches, so that a turn fits any launch
                queue.
        """
        make = partial(turns.Turn, device=self.device, is_short=is_short)
        return {name: self.where(name)(partial(make, call)) for name, call in calls.items()}

    def _round(
        self, contestants: Mapping[Any, turns.Turn], turn_seconds: Mapping[Any, list[float]]
    ) -> None:
        """Run one turn of each contestant and append its seconds to `turn_seconds`.

        A contestant's key is its name, or a tuple that ends with it.
        """
        for key, turn in contestants.items():
            name = key if isinstance(key, str) else key[1]
            turn_seconds[key].append(self.where(name)(turn))

    def _speedup(
        self, turn_seconds: Mapping[Any, Sequence[float]], launching: Launching, name: str
    ) -> Interval:
        """Return the default's time divided by a call's, paired by round, with a 95 % interval."""
        pairs = zip(
            turn_seconds[launching, self.default], turn_seconds[launching, name], strict=True
        )
        return geometric_mean([default / chosen for default, chosen in pairs])


def _why_unsteady(observer: Observer, *, is_starved: bool) -> str | None:
    """Return why the race's times are unreliable, such as a changing clock.

    None if they are not.
    """
    reasons = [doubt.message for doubt in point_diagnostics.judge({}, {}, observer.facts())]
    reasons += ["the host kept the device waiting"] if is_starved else []
    return "; ".join(reasons) or None


def _is_clear(speedup: Interval) -> bool:
    """Return whether the ratio is far enough from 1 for an early end.

    The ratio of the default to itself is exactly 1 and counts as clear.
    """
    assert speedup.high is not None
    half_width = math.log(speedup.high / speedup.value)
    return abs(math.log(speedup.value)) >= _CLEAR_HALF_WIDTHS * half_width


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    """Return an interval as three facts, its ends with the suffixes `_low` and `_high`."""
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


class Threads:
    """Isolated threads by name, with the caller's grad mode and device; `end` ends them.

    torch caches cuDNN's chosen algorithms per thread. It consults that cache before it searches
    (`benchmark`) or calls the heuristic. So for the same shape, whichever runs first in a thread
    decides for both (ATen's Conv_v8.cpp).
    """

    def __init__(self) -> None:
        self._threads: defaultdict[str, ThreadPoolExecutor] = defaultdict(
            partial(ThreadPoolExecutor, 1)
        )

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run `work`, backward passes included, in a thread and return its result.

        Errors in `work` are raised here.
        """
        is_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def run() -> T:
            """Set up this thread like the caller's, and run the work."""
            if device is not None:
                torch.cuda.set_device(device)
            with (
                torch.inference_mode(is_inference),
                torch.set_grad_enabled(has_gradients),
                torch.autograd.set_multithreading_enabled(False),
            ):
                return work()

        return self._threads[name].submit(run).result()

    def end(self) -> None:
        """Shut all threads down."""
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()


@dataclass(frozen=True, kw_only=True, eq=False)
class Races:
    """Races engines that compute the same, and remembers the winners.

    Winners of earlier processes may be reused.

    Attributes:
        max_error: limit of the relative L2 error against float64; None for the data type's default.
        choices: cache of winners for other processes.
        reuse: whether to use winners from that cache.
    """

    device: Device
    threads: Threads
    max_error: float | None = None
    choices: JsonCache
    reuse: bool = True
    _winners: dict[str, Winners] = field(default_factory=dict)
    _used_keys: list[str] = field(default_factory=list)

    def remembered(
        self,
        key: str,
        passes: tuple[Pass, ...],
        hold_race: Callable[[], Winners],
        check: Callable[[Pass, str], None],
    ) -> Winners:
        """Return the winner of each pass: from this process, an earlier one, or a new race.

        Convolutions (`Fastest`) and attention (`FastestBackend`) use it.

        Args:
            key: identifies the problem and its passes in the cache.
            hold_race: races the engines and returns the winners.
            check: raises ValueError or CudnnError if an engine cannot compute a pass.
        """
        winners = self._winners.get(key) or self._read(key, passes, check)
        if winners is None:
            # like torch's passes, all passes in a race are launched kernel by kernel
            with torch.no_grad(), replays.eager():
                winners = self.threads.run("race", hold_race)
            # `not_cached` is a reason, for example unsteady times
            if not any(winner.not_cached for winner in winners.values()):
                now = datetime.now(UTC).isoformat(timespec="seconds")
                entry = {
                    pass_type.value: {**asdict(winner), "kept_since": now}
                    for pass_type, winner in winners.items()
                }
                self.choices.add(key, entry)
        self._winners[key] = winners
        self._used_keys.append(key)
        return winners

    def discard_choices(self) -> None:
        """Remove all choices from the cache for other processes; this process keeps using them."""
        self.choices.remove(self._used_keys)

    def _read(
        self, key: str, passes: tuple[Pass, ...], check: Callable[[Pass, str], None]
    ) -> Winners | None:
        """Return an earlier process's choice.

        None if there is none, or it is no longer possible.
        """
        entry = self.choices.find(key) if self.reuse else None
        if not entry:
            return None
        try:
            winners = {pass_type: PassChoice(**entry[pass_type.value]) for pass_type in passes}
            for pass_type, choice in winners.items():
                if choice.kept_since is None:
                    raise ValueError("cached by an earlier version, without a date")
                check(pass_type, choice.engine)
        except (KeyError, TypeError, ValueError, CudnnError):
            return None
        return winners

    def winner(
        self,
        names: Sequence[str],
        runner: Runner,
        draw: Callable[[], list[torch.Tensor]],
        limit: float,
        *,
        default: str = DEFAULT,
        reference: str = DEFAULT,
        exactly: Runner | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Return the winner among the sufficiently exact engines, and facts about all engines.

        The facts are fields for `EngineFacts`, such as errors and times in seconds.

        Args:
            names: engines to race.
            runner: returns a function that runs a named engine on some tensors.
            draw: returns random tensors; the deciding race gets fresh ones.
            limit: usual limit of the error, unless `max_error` is set.
            default: the engine to beat, which may exceed the limit.
            reference: the engine that computes in float64.
            exactly: runner for the errors, if a race's results are random.
        """
        captures = partial(cuda_graphs.captures, self.device) if self.device.asynchronous else None
        race = Race(device=self.device, default=default, where=self._caller, captures=captures)
        tensors = draw()
        exactly = exactly or runner
        expected = exactly(reference, [tensor.double() for tensor in tensors])()
        trials = {name: exactly(name, tensors) for name in names}
        errors = self._errors(trials, expected, default)
        del expected, trials  # their memory is needed for the race
        limit = limit if self.max_error is None else self.max_error
        exact = [name for name in names if name == default or errors.get(name, math.inf) <= limit]
        nominees = race.nominate({name: runner(name, tensors) for name in exact})
        finalists = [*nominees, *(name for name in (default, BENCHMARK) if name in exact)]
        tensors = draw()
        calls = {name: runner(name, tensors) for name in dict.fromkeys(finalists)}
        outcome = race.decide(calls, nominees[0])
        return outcome.chosen, {"errors": errors, **outcome.facts()}

    def _errors(self, runs: dict[str, Run], expected: Any, default: str) -> dict[str, float]:
        """Return the relative L2 errors of the engines that fit into memory.

        Args:
            runs: calls by engine.
            expected: the reference's result in float64.
            default: engine for which too little memory is an error.
        """
        errors: dict[str, float] = {}
        for name, run in runs.items():
            try:
                errors[name] = self._caller(name)(partial(_error, run, expected))
            except torch.OutOfMemoryError:
                if name == default:
                    raise
        return errors

    def _caller(self, name: str) -> Callable[[Callable[[], Any]], Any]:
        """Return a function that makes an engine's calls in the right thread.

        cuDNN's search (`BENCHMARK`) gets its own thread. In the common one, torch may have cached
        a choice of the heuristic for the same shape, which it would take instead of searching.
        """
        if name == BENCHMARK:
            return partial(self.threads.run, "search")
        return lambda work: work()


def _error(run: Run, reference: Any) -> float:
    """Return a run's relative L2 error, the largest over its tensors.

    The error is infinite if a number is not finite.
    """
    errors = []
    for output, exact in zip(tensors_in(run()), tensors_in(reference), strict=True):
        errors.append(float((output.double() - exact).norm() / exact.norm().clamp_min(1e-300)))
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def context_of(device: Device) -> dict[str, Any]:
    """Return what all races on a device depend on; another context has its own cached winners."""
    return {**software_of(device), "perfexp": __version__, **device.limits()}


def software_of(device: Device) -> dict[str, Any]:
    """Return the device and the libraries that a choice of engines is for.

    A plan from `perfexp export --plan` fits only if device, torch and cuDNN are equal.
    """
    is_cuda = device.kind == "cuda"
    return {
        "device": torch.cuda.get_device_name(device.identifier) if is_cuda else processor_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "threads": None if is_cuda else torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
