"""Races between calls that compute the same: a first nominates, a second on fresh data decides.

Calls take turns, so that all meet the same conditions. A turn times a call on the device, in
seconds; a round is one turn of each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from perfexp.devices import Device
from perfexp.errors import Unsupported
from perfexp.records import disturbances
from perfexp.statistics.estimators import Interval
from perfexp.statistics.moderated import geometric_mean
from perfexp.timing import collecting, turns
from perfexp.timing.conditions import Observer

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
        return geometric_mean([default / own for default, own in pairs])


def _why_unsteady(observer: Observer, *, is_starved: bool) -> str | None:
    """Return why the race's times are unreliable, such as a changing clock.

    None if they are not.
    """
    reasons = [doubt.message for doubt in disturbances.judge({}, {}, observer.facts())]
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
