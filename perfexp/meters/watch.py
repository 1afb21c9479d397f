"""Watch meters during a load, so that each has a window between two ticks of its counter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from perfexp.errors import UserError
from perfexp.meters.track import Tick, Track, Window, uncertainty, window

#: Least number of power readings in a window.
_POWERS = 8
#: Periods without a tick after which a counter counts as stuck.
_PATIENT_TICKS = 3


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a watch.

    Attributes:
        plateau_seconds: duration of the load before the window begins.
        longest_windows: greatest length of the window relative to `window_seconds`, where its ends are imprecise.
        period_seconds: greatest interval between readings of the power.
        tight_seconds: interval between readings of the counter around an expected tick.
        uncertainty: sufficient relative standard uncertainty of the window's length.
        patience_seconds: time without a change after which a counter counts as stuck.
    """

    plateau_seconds: float = 1.2
    window_seconds: float = 1.0
    longest_windows: float = 5.0
    period_seconds: float = 0.1
    tight_seconds: float = 0.0005
    uncertainty: float = 0.003
    patience_seconds: float = 1.0

    def __post_init__(self) -> None:
        least = min(self.window_seconds, self.period_seconds, self.tight_seconds, self.uncertainty)
        if least <= 0 or self.plateau_seconds < 0 or self.longest_windows < 1 or self.patience_seconds <= 0:
            raise UserError(
                f"energy: window_seconds={self.window_seconds:g} has to be positive, "
                f"plateau_seconds={self.plateau_seconds:g} at least 0."
            )

    @property
    def power_seconds(self) -> float:
        """Interval between readings of the power, just short enough for an integral, since queries take time."""
        return min(self.period_seconds, self.window_seconds / _POWERS)


@dataclass
class _Watched:
    track: Track
    rules: Rules
    start: Tick | None = None
    end: Tick | None = None
    asked: float = -math.inf
    waited_from: float = 0.0

    def seek_start(self, now: float) -> None:
        """Read the counter; its change begins the window."""
        if self.start is not None:
            return
        if self.track.ask_energy():
            self.start = self.track.ticks[-1]
        elif self.track.no_energy:
            self.start = Tick(now, 0.0, 0.0)
        elif now - self.waited_from > self._patience():
            self.track.stand_still(now - self.waited_from)
            self.start = Tick(now, 0.0, 0.0)

    def follow(self, now: float) -> float:
        """Take due readings; returns the time of the next one, or infinity after the window."""
        if self.end is not None or self.start is None:
            return math.inf
        if self.track.no_energy:  # the power alone, over the least length
            self._ask_power(now)
            if now - self.start.seconds >= self.rules.window_seconds or self.track.no_power:
                self.end = Tick(now, 0.0, 0.0)
        else:
            tight = now >= self._next_tight(self.start)
            self._ask_power(now, patient=tight)
            if tight:
                self._read(self.start, now)
        if self.end is not None:
            return math.inf
        power = self.asked + self.rules.power_seconds
        return power if self.track.no_energy else min(power, self._next_tight(self.start))

    def window(self) -> Window:
        assert self.start is not None
        return window(self.track, self.start, self.end)

    def _ask_power(self, now: float, *, patient: bool = False) -> None:
        """Read the power if due; around an expected tick it may be late by one period."""
        if now - self.asked >= self.rules.power_seconds * (2 if patient else 1):
            self.track.ask_power()
            self.asked = now

    def _read(self, start: Tick, now: float) -> None:
        """Read the counter; a tick, or too long a time without one, may end the window."""
        if self.track.ask_energy():
            rules, tick = self.rules, self.track.ticks[-1]
            seconds = tick.seconds - start.seconds
            # the window may be short by the uncertainty of its ends
            if seconds >= rules.window_seconds - (start.width_seconds + tick.width_seconds) / 2 and (
                uncertainty(start, tick) <= rules.uncertainty or seconds >= rules.longest_windows * rules.window_seconds
            ):
                self.end = tick
        elif self.track.ticks and not self.track.no_energy:
            waited = now - self.track.ticks[-1].seconds
            if waited > self._patience():
                self.track.stand_still(waited)

    def _patience(self) -> float:
        return max(self.rules.patience_seconds, _PATIENT_TICKS * (self.track.tick_seconds or 0.0))

    def _next_tight(self, start: Tick) -> float:
        period = self.track.tick_seconds or 0.0
        guard = min(0.05 * period + 2 * (self.track.query_seconds + self.rules.tight_seconds), period / 2 or math.inf)
        return self._expected(start) - guard

    def _expected(self, start: Tick) -> float:
        """The first tick that may end the window, or the one after the last observed tick."""
        period = self.track.tick_seconds
        if period is None:
            return start.seconds + self.rules.window_seconds
        seen = (self.track.ticks[-1].seconds - start.seconds) / period
        # a measured period is imprecise, and an observed tick is a little late
        ticks = math.ceil(max(self.rules.window_seconds / period, seen + 0.5) - 0.05)
        return start.seconds + ticks * period


@dataclass
class Watch:
    """A plateau, and then a window of each meter."""

    tracks: Sequence[Track]
    now: Callable[[], float]
    rules: Rules = field(default_factory=Rules)
    begun: bool = False
    windows: list[Window] = field(default_factory=list)

    def run(self, sleep: Callable[[float], None]) -> list[Window]:
        """Watch without other work; returns a window of each meter."""
        for pause in self.steps():
            sleep(pause)
        return self.windows

    def steps(self) -> Iterator[float]:
        """Watch step by step; yields the seconds to pass before the next step."""
        yield from self._plateau()
        watched = [_Watched(track, self.rules) for track in self.tracks]
        yield from self._seek_starts(watched)
        self.begun = True
        while (due := min([item.follow(self.now()) for item in watched])) < math.inf:
            yield max(due - self.now(), self.rules.tight_seconds)
        for track in self.tracks:  # the integral extends to the end of the window
            track.ask_power()
        self.windows = [item.window() for item in watched]

    def _plateau(self) -> Iterator[float]:
        end = self.now() + self.rules.plateau_seconds
        while self.now() < end:
            unknown = [track for track in self.tracks if track.tick_seconds is None and not track.no_energy]
            for track in unknown:
                track.ask_energy()
            pause = self.rules.tight_seconds if unknown else self.rules.power_seconds
            yield min(pause, max(end - self.now(), 0.0))

    def _seek_starts(self, watched: Sequence[_Watched]) -> Iterator[float]:
        """Read all counters tightly until each has changed; a change before the first reading has no known time."""
        for item in watched:
            item.track.ask_energy()
            item.waited_from = self.now()
        while any(item.start is None for item in watched):
            yield self.rules.tight_seconds
            for item in watched:
                item.seek_start(self.now())
