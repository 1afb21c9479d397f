"""Watch meters during a load, so that each has windows back to back, from tick to tick of its counter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from perfexp.errors import UserError
from perfexp.meters.track import Tick, Track, Windows, windows_between

#: Least number of windows, and of the counter's ticks in each.
WINDOWS, _TICKS = 3, 3
#: Part of a window's least length within which a tick is seen in time.
_LATE = 0.05
#: Least number of power readings in the windows together; in each window if they are all that a meter has.
_POWERS = 8


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a watch.

    Attributes:
        plateau_seconds: duration of the load before the windows begin.
        window_seconds: least length of the first three windows together.
        most_seconds: time after which no window is added. Windows are added while the ends are imprecise, or the
            counter disagrees with the integral or is unchecked by it. In 10 s, ten readings per second of a power
            that scatters by 25 % of its mean check the counter to 10 %.
        period_seconds: greatest interval between readings of the power.
        tight_seconds: interval between readings of the counter around an expected tick.
        uncertainty: sufficient relative standard uncertainty of the length of all windows.
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
        least = min(self.window_seconds, self.period_seconds, self.tight_seconds, self.uncertainty)
        if (
            least <= 0
            or min(self.plateau_seconds, self.most_seconds) < 0
            or self.patience_seconds <= 0
        ):
            raise UserError(
                f"energy: window_seconds={self.window_seconds:g} has to be positive, "
                f"plateau_seconds={self.plateau_seconds:g} and most_seconds={self.most_seconds:g} at least 0."
            )


@dataclass
class _Watched:
    track: Track
    rules: Rules
    edges: list[Tick] = field(default_factory=list)
    wanted: int = WINDOWS
    asked: float = -math.inf
    waited_from: float = 0.0

    def seek_start(self, now: float) -> None:
        """Read the counter; its change begins the first window."""
        if self.edges:
            return
        if self.track.ask_energy():
            self.edges.append(self.track.ticks[-1])
        elif self.track.no_energy:
            self.edges.append(Tick(now, 0.0, 0.0))
        elif now - self.waited_from > self._patience():
            self.track.stand_still(now - self.waited_from)
            self.edges.append(Tick(now, 0.0, 0.0))

    def follow(self, now: float) -> float:
        """Take due readings; returns the time of the next one, or infinity after the last window."""
        if len(self.edges) > self.wanted:
            return math.inf
        if self.track.no_energy:  # the power alone
            self._ask_power(now)
            if now >= self._least() or self.track.no_power:
                self.edges.append(Tick(now, 0.0, 0.0))
                self.wanted = len(self.edges) - 1 if self.track.no_power else self.wanted
        else:
            tight = now >= self._next_tight()
            self._ask_power(now, patient=tight)
            if tight:
                self._read(now)
        if len(self.edges) > self.wanted:
            return math.inf
        power = self.asked + self._power_seconds()
        return min(power, self._least()) if self.track.no_energy else min(power, self._next_tight())

    def windows(self) -> Windows:
        return windows_between(self.track, self.edges)

    def _power_seconds(self) -> float:
        """Interval between readings of the power, just short enough for integrals, since queries take time."""
        windows = WINDOWS if self.track.no_energy else 1
        return min(self.rules.period_seconds, self.rules.window_seconds / windows / _POWERS)

    def _ask_power(self, now: float, *, patient: bool = False) -> None:
        """Read the power if due; around an expected tick it may be late by one period."""
        if now - self.asked >= self._power_seconds() * (2 if patient else 1):
            self.track.ask_power()
            self.asked = now

    def _read(self, now: float) -> None:
        """Read the counter; a tick, or too long a time without one, may end a window."""
        if self.track.ask_energy():
            tick, least = self.track.ticks[-1], self._least()
            # a tick that was seen late, as by the first reading after a pause, ends a window of double length only
            if tick.width_seconds > _LATE * self.rules.window_seconds / WINDOWS:
                least += least - self.edges[-1].seconds
            # the windows may be short by the uncertainty of their ends
            if tick.seconds >= least - (self.edges[0].width_seconds + tick.width_seconds) / 2:
                self.edges.append(tick)
        elif self.track.ticks and not self.track.no_energy:
            waited = now - self.track.ticks[-1].seconds
            if waited > self._patience():
                self.track.stand_still(waited)

    def _patience(self) -> float:
        return max(self.rules.patience_seconds, _TICKS * (self.track.tick_seconds or 0.0))

    def _next_tight(self) -> float:
        period = self.track.tick_seconds or 0.0
        guard = min(
            0.05 * period + 2 * (self.track.query_seconds + self.rules.tight_seconds),
            period / 2 or math.inf,
        )
        return self._expected() - guard

    def _least(self) -> float:
        """Earliest end of the window that is open: all windows take their parts of the length, and some ticks each."""
        least = self.edges[0].seconds + len(self.edges) * self.rules.window_seconds / WINDOWS
        period = self.track.tick_seconds
        if self.track.no_energy or period is None:
            return least
        # a counter so slow that three windows of three ticks take too long has shorter ones
        ticks = min(max(int(self.rules.most_seconds / (WINDOWS * period)), 1), _TICKS)
        return max(
            least, self.edges[-1].seconds + (ticks - 0.5) * period
        )  # a tick is at a whole number of periods

    def _expected(self) -> float:
        """The first tick that may end the window, or the one after the last observed tick."""
        period, least = self.track.tick_seconds, self._least()
        if period is None:
            return least
        last = self.edges[-1].seconds
        seen = (self.track.ticks[-1].seconds - last) / period
        # a measured period is imprecise, and an observed tick is a little late
        return last + math.ceil(max((least - last) / period, seen + 0.5) - 0.05) * period


@dataclass
class Watch:
    """A plateau, and then the windows of each meter."""

    tracks: Sequence[Track]
    now: Callable[[], float]
    rules: Rules = field(default_factory=Rules)
    begun: bool = False
    windows: list[Windows] = field(default_factory=list)

    def run(self, sleep: Callable[[float], None]) -> list[Windows]:
        """Watch without other work; returns the windows of each meter."""
        for pause in self.steps():
            sleep(pause)
        return self.windows

    def steps(self) -> Iterator[float]:
        """Watch step by step; yields the seconds to pass before the next step."""
        yield from self._plateau()
        watched = [_Watched(track, self.rules) for track in self.tracks]
        yield from self._seek_starts(watched)
        for track in self.tracks:
            track.skip_ticks()
        self.begun, end = True, self.now() + self.rules.most_seconds
        while True:
            while (due := min([item.follow(self.now()) for item in watched])) < math.inf:
                yield max(due - self.now(), self.rules.tight_seconds)
            for track in self.tracks:  # the integral extends to the end of the last window
                track.ask_power()
            self.windows = [item.windows() for item in watched]
            if self.now() >= end or all(map(self._suffices, self.windows)):
                return
            for item in watched:
                item.wanted = len(item.edges)

    def _suffices(self, windows: Windows) -> bool:
        """Whether the ends are precise enough, and the integral agrees with the counter as well as it can tell."""
        is_precise = (windows.uncertainty or 0.0) <= self.rules.uncertainty
        return is_precise and not windows.disagrees and not windows.is_unchecked

    def _plateau(self) -> Iterator[float]:
        end = self.now() + self.rules.plateau_seconds
        while self.now() < end:
            unknown = [
                track for track in self.tracks if track.tick_seconds is None and not track.no_energy
            ]
            for track in unknown:
                track.ask_energy()
            pause = self.rules.tight_seconds if unknown else self.rules.period_seconds
            yield min(pause, max(end - self.now(), self.rules.tight_seconds))

    def _seek_starts(self, watched: Sequence[_Watched]) -> Iterator[float]:
        """Read all counters tightly until each has changed; a change before the first reading has no known time."""
        for item in watched:
            item.track.ask_energy()
            item.waited_from = self.now()
        while not all(item.edges for item in watched):
            yield self.rules.tight_seconds
            for item in watched:
                item.seek_start(self.now())
