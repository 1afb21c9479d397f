"""Watching meters under load, with back-to-back windows from tick to tick for each meter.

A watch first lets the load reach a plateau, then reads each counter closely around its expected
ticks and the power regularly. A `Feeder` runs the load alongside, as busy as during timing, so that
the power belongs to the timed calls.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfexp.devices.meters.track import Tick, Track, Windows, windows_between
from perfexp.errors import UserError
from perfexp.statistics.estimators import windows_half_width

if TYPE_CHECKING:
    from perfexp.devices import Device, Event


#: Minimum number of windows, and of counter ticks in each.
WINDOWS, _TICKS = 3, 3
#: A tick seen within this part of a window's minimum length is on time.
_LATE = 0.05
#: Minimum number of power readings in all windows together, or in each window if the meter has no
#: counter.
_POWERS = 8
#: Approximate duration of a block of calls; each block ends with an event.
_BLOCK_SECONDS = 0.002
_MOST_CALLS = 1000
#: Pending work that the device should have if its queue is deep enough.
_LEAD_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings for a watch.

    Attributes:
        plateau_seconds: load time before the windows begin.
        window_seconds: minimum length of the first three windows together.
        most_seconds: time after which no window is added. Windows are added while the ends are
            imprecise, or while the integral disagrees with the counter or cannot check it. For
            example, in 10 s, ten readings per second of a power with 25 % scatter check the counter
            to 10 %.
        period_seconds: maximum interval between power readings.
        tight_seconds: interval between counter readings around an expected tick.
        uncertainty: sufficient relative standard uncertainty of the total window length.
        patience_seconds: time without a change after which a counter counts as stuck.
    """

    plateau_seconds: float = 1.2
    window_seconds: float = 1.0
    most_seconds: float = 10.0
    period_seconds: float = 0.1
    tight_seconds: float = 0.0005
    uncertainty: float = 0.0025
    patience_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Raise `UserError` for times that are not positive."""
        positive = (
            self.window_seconds,
            self.period_seconds,
            self.tight_seconds,
            self.uncertainty,
            self.patience_seconds,
        )
        if min(positive) <= 0 or min(self.plateau_seconds, self.most_seconds) < 0:
            raise UserError(
                f"energy: window_seconds={self.window_seconds:g} has to be positive, "
                f"plateau_seconds={self.plateau_seconds:g} and most_seconds={self.most_seconds:g} "
                "at least 0."
            )


@dataclass
class _MeterWatch:
    """One meter's windows while they are watched.

    Attributes:
        edges: ticks at window ends so far; a meter without a counter has plain times.
        num_windows: windows to complete before `follow` ends.
        power_read_at: time of the last power reading, seconds.
        sought_from: start of the search for the first tick, seconds.
    """

    track: Track
    rules: Rules
    edges: list[Tick] = field(default_factory=list)
    num_windows: int = WINDOWS
    power_read_at: float = -math.inf
    sought_from: float = 0.0

    def seek_start(self, now: float) -> None:
        """Read the counter; its first change begins the first window.

        A counter that does not change for too long is abandoned, and power readings are used.
        """
        if self.edges:
            return
        if self.track.read_energy():
            self.edges.append(self.track.ticks[-1])
        elif self.track.no_energy:
            self.edges.append(Tick(now, 0.0, 0.0))
        elif now - self.sought_from > self._patience_seconds():
            self.track.abandon_counter(now - self.sought_from)
            self.edges.append(Tick(now, 0.0, 0.0))

    def follow(self, now: float) -> float:
        """Take due readings; return the next reading's time, or infinity after the last window.

        `Watch.steps` calls it repeatedly; times are the host's clock in seconds.
        """
        if len(self.edges) > self.num_windows:
            return math.inf
        if self.track.no_energy:  # power readings only
            self._read_power(now)
            if now >= self._earliest_end() or self.track.no_power:
                self.edges.append(Tick(now, 0.0, 0.0))
                if self.track.no_power:
                    self.num_windows = len(self.edges) - 1
        else:
            is_tick_near = now >= self._tight_from()
            self._read_power(now, is_tick_near=is_tick_near)
            if is_tick_near:
                self._read_counter(now)
        if len(self.edges) > self.num_windows:
            return math.inf
        power = self.power_read_at + self._power_seconds()
        if self.track.no_energy:
            return min(power, self._earliest_end())
        return min(power, self._tight_from())

    def windows(self) -> Windows:
        """Return the powers in the windows so far."""
        return windows_between(self.track, self.edges)

    def _power_seconds(self) -> float:
        """Return the interval between power readings.

        It is just short enough for integrals, since queries take time.
        """
        windows = WINDOWS if self.track.no_energy else 1
        return min(self.rules.period_seconds, self.rules.window_seconds / windows / _POWERS)

    def _read_power(self, now: float, *, is_tick_near: bool = False) -> None:
        """Read the power if it is due.

        Args:
            is_tick_near: whether a tick is expected, for which a power reading may be one period
                late.
        """
        if now - self.power_read_at >= self._power_seconds() * (2 if is_tick_near else 1):
            self.track.read_power()
            self.power_read_at = now

    def _read_counter(self, now: float) -> None:
        """Read the counter. A tick, or a long time without a tick, may end a window.

        A counter that is stuck is abandoned; its windows then come from power readings.
        """
        if self.track.read_energy():
            tick, earliest = self.track.ticks[-1], self._earliest_end()
            # a late tick, for example in the first reading after a pause, ends only a window of
            # double length
            if tick.width_seconds > _LATE * self.rules.window_seconds / WINDOWS:
                earliest += earliest - self.edges[-1].seconds
            # windows may be short by the uncertainty of their ends
            if tick.seconds >= earliest - (self.edges[0].width_seconds + tick.width_seconds) / 2:
                self.edges.append(tick)
        elif self.track.ticks and not self.track.no_energy:
            waited = now - self.track.ticks[-1].seconds
            if waited > self._patience_seconds():
                self.track.abandon_counter(waited)

    def _patience_seconds(self) -> float:
        """Return the time without a tick after which the counter counts as stuck."""
        return max(self.rules.patience_seconds, _TICKS * (self.track.tick_seconds or 0.0))

    def _tight_from(self) -> float:
        """Return the time, just before an expected tick, from which to read the counter often."""
        period = self.track.tick_seconds or 0.0
        # the period's error, and the time for two queries
        margin = 0.05 * period + 2 * (self.track.query_seconds + self.rules.tight_seconds)
        return self._next_end_tick() - min(margin, period / 2 or math.inf)

    def _earliest_end(self) -> float:
        """Return the earliest end of the open window.

        All windows share the total length, and each has some ticks.
        """
        least = self.edges[0].seconds + len(self.edges) * self.rules.window_seconds / WINDOWS
        period = self.track.tick_seconds
        if self.track.no_energy or period is None:
            return least
        # a slow counter has shorter windows if three windows of three ticks take too long
        ticks = min(max(int(self.rules.most_seconds / (WINDOWS * period)), 1), _TICKS)
        # ticks come at whole numbers of periods
        return max(least, self.edges[-1].seconds + (ticks - 0.5) * period)

    def _next_end_tick(self) -> float:
        """Return the expected time of the next tick that may end the window."""
        period, earliest = self.track.tick_seconds, self._earliest_end()
        if period is None:
            return earliest
        last_edge = self.edges[-1].seconds
        periods_needed = (earliest - last_edge) / period
        periods_seen = (self.track.ticks[-1].seconds - last_edge) / period
        # measured periods are imprecise, and observed ticks a little late
        periods = math.ceil(max(periods_needed, periods_seen + 0.5) - 0.05)
        return last_edge + periods * period


@dataclass
class Watch:
    """A plateau, followed by the windows of each meter.

    Attributes:
        now: host's clock, seconds.
        begun: whether the windows have begun, so that calls count from now on.
        windows: the result, one entry per meter, complete when the watch is over.
    """

    tracks: Sequence[Track]
    now: Callable[[], float]
    rules: Rules = field(default_factory=Rules)
    begun: bool = False
    windows: list[Windows] = field(default_factory=list)

    def run(self, sleep: Callable[[float], None]) -> list[Windows]:
        """Watch without other work, for the idle power; return each meter's windows."""
        for pause in self.steps():
            sleep(pause)
        return self.windows

    def steps(self) -> Iterator[float]:
        """Watch step by step; yield the seconds to wait before the next step.

        Windows are added until all results suffice, or `most_seconds` have passed.
        """
        yield from self._plateau()
        watches = [_MeterWatch(track, self.rules) for track in self.tracks]
        yield from self._seek_starts(watches)
        for track in self.tracks:
            track.fix_tick_seconds()
        self.begun, end = True, self.now() + self.rules.most_seconds
        while True:
            while (due := min([watch.follow(self.now()) for watch in watches])) < math.inf:
                yield max(due - self.now(), self.rules.tight_seconds)
            for track in self.tracks:  # the integral extends to the last window's end
                track.read_power()
            self.windows = [watch.windows() for watch in watches]
            if self.now() >= end or all(map(self._suffices, self.windows)):
                return
            for watch in watches:
                watch.num_windows = len(watch.edges)

    def _suffices(self, windows: Windows) -> bool:
        """Return whether the ends are precise, and the integral agrees with the counter.

        The integral must also be precise enough to check the counter.
        """
        is_precise = (windows.uncertainty or 0.0) <= self.rules.uncertainty
        return is_precise and not windows.disagrees and not windows.is_unchecked

    def _plateau(self) -> Iterator[float]:
        """Wait until the load is steady; learn unknown counter periods until then.

        Yield the seconds to wait before the next step.
        """
        end = self.now() + self.rules.plateau_seconds
        while self.now() < end:
            pause = self.rules.period_seconds
            for track in self.tracks:
                if track.tick_seconds is None and not track.no_energy:
                    track.read_energy()
                    pause = self.rules.tight_seconds
            yield min(pause, max(end - self.now(), self.rules.tight_seconds))

    def _seek_starts(self, watches: Sequence[_MeterWatch]) -> Iterator[float]:
        """Read all counters tightly until each has changed; yield the seconds between readings.

        A change before the first reading has no known time.
        """
        for watch in watches:
            watch.track.read_energy()
            watch.sought_from = self.now()
        while not all(watch.edges for watch in watches):
            yield self.rules.tight_seconds
            for watch in watches:
                watch.seek_start(self.now())


class StreamPosition(NamedTuple):
    """A position in the stream of calls: an event, and the number of calls before it."""

    event: Event
    calls: int


class Feeder:
    """Keeps a device busy with a call, and counts completed calls by events.

    Calls are enqueued about 20 ms ahead on an asynchronous device. On a synchronous device they
    simply run. The first call runs at once, to estimate the call time.

    Args:
        sleep: function that waits for some seconds; tests advance simulated time instead.
    """

    def __init__(
        self, call: Callable[[], object], device: Device, sleep: Callable[[float], None]
    ) -> None:
        self._call, self._device, self._sleep = call, device, sleep
        self._pending: deque[StreamPosition] = deque()
        self._spare: list[Event] = []
        self._calls, self._device_seconds = 0, 0.0
        #: Host time, calls and device time when a block end was seen.
        self._log: list[tuple[float, int, float]] = []
        device.synchronize()
        self._passed = self.start = StreamPosition(device.new_event(), 0)
        device.record(self._passed.event)
        self._call_seconds = self._busy_until = 0.0
        # first estimate of the call time
        self._enqueue(1)
        device.synchronize()
        self._collect()

    def feed(self, rest_seconds: float = _BLOCK_SECONDS) -> None:
        """Enqueue a block of calls, or rest if the device has enough pending work.

        `threaded` calls it in a loop, so events are checked at least once in `rest_seconds`.

        Args:
            rest_seconds: maximum rest.
        """
        self._collect()
        ahead = self._busy_until - self._now() - _LEAD_SECONDS
        if ahead > 0:
            self._sleep(min(ahead, rest_seconds))
        else:
            self._enqueue(min(max(int(_BLOCK_SECONDS / self._call_seconds), 1), _MOST_CALLS))

    def begin(self) -> None:
        """Begin the window about now, at the last event that the device has passed."""
        self._collect()
        self.start = self._passed

    def end(self) -> tuple[int, float]:
        """End the window about now; return its number of calls and their duration in seconds."""
        self._collect()
        if self._passed.calls == self.start.calls:  # a call is longer than the window
            self._device.synchronize()
            self._collect()
        seconds = self._device.elapsed_seconds(self.start.event, self._passed.event)
        self._device.synchronize()
        return self._passed.calls - self.start.calls, seconds

    def half_width(self, edges: Sequence[float]) -> float | None:
        """Return the half-width of the mean call time's 95 % interval in seconds, over windows.

        None for too few calls.

        Args:
            edges: window ends by the host's clock, seconds.
        """
        times, calls, seconds = map(np.asarray, zip(*self._log, strict=True))
        at = np.searchsorted(times, edges)
        at = at[at < len(times)]  # the last edge may be later than every block end
        counts, lengths = np.diff(calls[at]), np.diff(seconds[at])
        if len(counts) < 2 or not counts.all():
            return None
        return windows_half_width((lengths / counts).tolist(), counts.tolist())

    def _now(self) -> float:
        """Return the host's clock in seconds."""
        return self._device.now_ns() * 1e-9

    def _enqueue(self, calls: int) -> None:
        """Enqueue a block of calls, and an event that marks its end.

        The expected end of all pending work moves on by the block's duration.
        """
        begun = self._now()
        for _ in range(calls):
            self._call()
        self._calls += calls
        event = self._spare.pop() if self._spare else self._device.new_event()
        self._device.record(event)
        self._pending.append(StreamPosition(event, self._calls))
        self._busy_until = max(self._busy_until, begun) + calls * self._call_seconds

    def _collect(self) -> None:
        """Update the passed position, the call time, and the latest end of pending work.

        It handles all events that the device has passed since the last time.
        """
        while self._pending and self._device.passed(self._pending[0].event):
            before, self._passed = self._passed, self._pending.popleft()
            seconds = self._device.elapsed_seconds(before.event, self._passed.event)
            self._call_seconds = max(seconds / (self._passed.calls - before.calls), 1e-9)
            self._device_seconds += seconds
            self._log.append((self._now(), self._passed.calls, self._device_seconds))
            # the window's first event is needed until its end
            if before is not self.start:
                self._spare.append(before.event)
        left = (self._calls - self._passed.calls) * self._call_seconds
        self._busy_until = min(self._busy_until, self._now() + left)


#: Feeds until a watch is over; returns the number of calls completed in the window and their
#: seconds. An example is `threaded`; tests take turns instead.
Beside = Callable[[Watch, Feeder], tuple[int, float]]


def threaded(watch: Watch, feeder: Feeder) -> tuple[int, float]:
    """Feed until the watch is over; return the window's calls and seconds. See `Beside`.

    This thread feeds; another thread queries and releases the GIL in the driver.
    """
    abandoned = threading.Event()

    def ask() -> None:
        for pause in watch.steps():
            if abandoned.wait(pause):
                return

    with ThreadPoolExecutor(1, thread_name_prefix="meters") as pool:
        asking = pool.submit(ask)
        try:
            begun = False
            while not asking.done():
                if watch.begun and not begun:
                    begun = True
                    feeder.begin()
                feeder.feed()
            asking.result()
            return feeder.end()
        finally:
            abandoned.set()
