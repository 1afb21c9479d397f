"""Watch: asks meters while something goes on, so that each has a window from one tick of its counter to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from perfexp.errors import UserError
from perfexp.meters.track import Tick, Track, Window, uncertainty, window

#: Readings of the power in a window, at least.
_POWERS = 8
#: So many periods without a tick are too many.
_PATIENT_TICKS = 3


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How meters are watched.

    Attributes:
        plateau_seconds: for so long it goes on before the window begins.
        window_seconds: least length of the window.
        longest_windows: so many times that length is the most, where its ends can't be told well enough before.
        period_seconds: from one reading of the power to the next, at the most; a window has several.
        tight_seconds: from one reading of the counter to the next where a tick is expected.
        uncertainty: standard uncertainty of the window's length that is well enough, relative.
        patience_seconds: a counter that does not change for so long stands still.
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
        """From one reading of the power to the next: asking takes time, and an integral needs just so many."""
        return min(self.period_seconds, self.window_seconds / _POWERS)


@dataclass
class _Watched:
    """A track on its way through the window.

    Attributes:
        track: of a meter.
        rules: how it is watched.
        start: where its window begins.
        end: where it ends.
        asked: when its power was read.
        waited_from: when its first tick was waited for.
    """

    track: Track
    rules: Rules
    start: Tick | None = None
    end: Tick | None = None
    asked: float = -math.inf
    waited_from: float = 0.0

    def seek_start(self, now: float) -> None:
        """Read the counter; its change is where the window begins."""
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
        """Read what is due; returns when something is due again, by the clock, and infinity after the window."""
        if self.end is not None or self.start is None:
            return math.inf
        if self.track.no_energy:
            self._follow_power(now, self.start)
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
        """What came of it."""
        assert self.start is not None
        return window(self.track, self.start, self.end)

    def _follow_power(self, now: float, start: Tick) -> None:
        """A meter without a counter, or with one that has failed: the power alone, over the length that is wanted."""
        self._ask_power(now)
        if now - start.seconds >= self.rules.window_seconds or self.track.no_power:
            self.end = Tick(now, 0.0, 0.0)

    def _ask_power(self, now: float, *, patient: bool = False) -> None:
        """Read the power, if it is time to; where a tick is waited for, it may wait as long again."""
        if now - self.asked >= self.rules.power_seconds * (2 if patient else 1):
            self.track.ask_power()
            self.asked = now

    def _read(self, start: Tick, now: float) -> None:
        """Read the counter; a tick may end the window, too long a time without one ends it too."""
        if self.track.ask_energy():
            self._maybe_end(start, self.track.ticks[-1])
        elif self.track.ticks and not self.track.no_energy:
            waited = now - self.track.ticks[-1].seconds
            if waited > self._patience():
                self.track.stand_still(waited)

    def _patience(self) -> float:
        return max(self.rules.patience_seconds, _PATIENT_TICKS * (self.track.tick_seconds or 0.0))

    def _next_tight(self, start: Tick) -> float:
        """When the counter is to be read tightly again."""
        return self._expected(start) - self._guard()

    def _expected(self, start: Tick) -> float:
        """The first tick that may end the window, or the one after the last that was seen."""
        period = self.track.tick_seconds
        if period is None:
            return start.seconds + self.rules.window_seconds
        seen = (self.track.ticks[-1].seconds - start.seconds) / period
        # a period that was seen is a little off, and a tick that was seen is a little late
        ticks = math.ceil(max(self.rules.window_seconds / period, seen + 0.5) - 0.05)
        return start.seconds + ticks * period

    def _guard(self) -> float:
        """So long before a tick is expected the counter is read tightly."""
        period = self.track.tick_seconds or 0.0
        return min(0.05 * period + 2 * (self.track.query_seconds + self.rules.tight_seconds), period / 2 or math.inf)

    def _maybe_end(self, start: Tick, tick: Tick) -> None:
        """End the window if it is long enough and its ends are known well enough, or if it has become too long."""
        rules, seconds = self.rules, tick.seconds - start.seconds
        if seconds < rules.window_seconds - (start.width_seconds + tick.width_seconds) / 2:
            return
        if uncertainty(start, tick) <= rules.uncertainty or seconds >= rules.longest_windows * rules.window_seconds:
            self.end = tick


@dataclass
class Watch:
    """A plateau, and then a window of each meter.

    Attributes:
        tracks: of the meters.
        now: the host's clock, seconds.
        rules: how they are watched.
        begun: whether all windows have begun.
        windows: one of each meter, once it is over.
    """

    tracks: Sequence[Track]
    now: Callable[[], float]
    rules: Rules = field(default_factory=Rules)
    begun: bool = False
    windows: list[Window] = field(default_factory=list)

    def run(self, sleep: Callable[[float], None]) -> list[Window]:
        """Watch while nothing goes on; returns a window of each meter.

        Args:
            sleep: lets the time pass.
        """
        for pause in self.steps():
            sleep(pause)
        return self.windows

    def steps(self) -> Iterator[float]:
        """Watch step by step, whatever goes on meanwhile; before the next step so many seconds are to pass."""
        yield from self._plateau()
        watched = [_Watched(track, self.rules) for track in self.tracks]
        yield from self._seek_starts(watched)
        self.begun = True
        while (due := min([each.follow(self.now()) for each in watched])) < math.inf:
            yield max(due - self.now(), self.rules.tight_seconds)
        for track in self.tracks:  # the integral goes up to the end of the window
            track.ask_power()
        self.windows = [each.window() for each in watched]

    def _plateau(self) -> Iterator[float]:
        """Let it go on, and find out how often the counters tick."""
        end = self.now() + self.rules.plateau_seconds
        while self.now() < end:
            unknown = [track for track in self.tracks if track.tick_seconds is None and not track.no_energy]
            for track in unknown:
                track.ask_energy()
            pause = self.rules.tight_seconds if unknown else self.rules.power_seconds
            yield min(pause, max(end - self.now(), 0.0))

    def _seek_starts(self, watched: Sequence[_Watched]) -> Iterator[float]:
        """Read all counters tightly until each has changed; what changed before the first reading tells no moment."""
        for each in watched:
            each.track.ask_energy()
            each.waited_from = self.now()
        while any(each.start is None for each in watched):
            yield self.rules.tight_seconds
            for each in watched:
                each.seek_start(self.now())
