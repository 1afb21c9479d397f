"""Watching meters under load, with back-to-back windows from tick to tick for each meter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from perfexp.errors import UserError
from perfexp.meters.track import Tick, Track, Windows, windows_between

#: Minimum number of windows, and of counter ticks in each.
WINDOWS, _TICKS = 3, 3
#: A tick seen within this part of a window's minimum length is on time.
_LATE = 0.05
#: Minimum number of power readings in all windows together, or in each window if the meter has no
#: counter.
_POWERS = 8


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
        least = min(self.window_seconds, self.period_seconds, self.tight_seconds, self.uncertainty)
        if (
            least <= 0
            or min(self.plateau_seconds, self.most_seconds) < 0
            or self.patience_seconds <= 0
        ):
            raise UserError(
                f"energy: window_seconds={self.window_seconds:g} has to be positive, "
                f"plateau_seconds={self.plateau_seconds:g} and most_seconds={self.most_seconds:g} "
                "at least 0."
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
        """Read the counter; its first change begins the first window."""
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
        """Take due readings; return the next reading's time, or infinity after the last window."""
        if len(self.edges) > self.wanted:
            return math.inf
        if self.track.no_energy:  # power readings only
            self._ask_power(now)
            if now >= self._least() or self.track.no_power:
                self.edges.append(Tick(now, 0.0, 0.0))
                if self.track.no_power:
                    self.wanted = len(self.edges) - 1
        else:
            tight = now >= self._next_tight()
            self._ask_power(now, patient=tight)
            if tight:
                self._read(now)
        if len(self.edges) > self.wanted:
            return math.inf
        power = self.asked + self._power_seconds()
        if self.track.no_energy:
            return min(power, self._least())
        return min(power, self._next_tight())

    def windows(self) -> Windows:
        return windows_between(self.track, self.edges)

    def _power_seconds(self) -> float:
        """Return the interval between power readings.

        It is just short enough for integrals, since queries take time.
        """
        windows = WINDOWS if self.track.no_energy else 1
        return min(self.rules.period_seconds, self.rules.window_seconds / windows / _POWERS)

    def _ask_power(self, now: float, *, patient: bool = False) -> None:
        """Read the power if due.

        Args:
            patient: whether it may be late by one period, because a tick is expected.
        """
        if now - self.asked >= self._power_seconds() * (2 if patient else 1):
            self.track.ask_power()
            self.asked = now

    def _read(self, now: float) -> None:
        """Read the counter. A tick, or a long time without a tick, may end a window."""
        if self.track.ask_energy():
            tick, least = self.track.ticks[-1], self._least()
            # a late tick, for example in the first reading after a pause, ends only a window of
            # double length
            if tick.width_seconds > _LATE * self.rules.window_seconds / WINDOWS:
                least += least - self.edges[-1].seconds
            # windows may be short by the uncertainty of their ends
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

    def _expected(self) -> float:
        """Return the first tick that may end the window, or the tick after the last seen."""
        period, least = self.track.tick_seconds, self._least()
        if period is None:
            return least
        last = self.edges[-1].seconds
        seen = (self.track.ticks[-1].seconds - last) / period
        # measured periods are imprecise, and observed ticks a little late
        return last + math.ceil(max((least - last) / period, seen + 0.5) - 0.05) * period


@dataclass
class Watch:
    """A plateau, followed by the windows of each meter."""

    tracks: Sequence[Track]
    now: Callable[[], float]
    rules: Rules = field(default_factory=Rules)
    begun: bool = False
    windows: list[Windows] = field(default_factory=list)

    def run(self, sleep: Callable[[float], None]) -> list[Windows]:
        """Watch without other work; return each meter's windows."""
        for pause in self.steps():
            sleep(pause)
        return self.windows

    def steps(self) -> Iterator[float]:
        """Watch step by step; yield the seconds to wait before the next step."""
        yield from self._plateau()
        watched = [_Watched(track, self.rules) for track in self.tracks]
        yield from self._seek_starts(watched)
        for track in self.tracks:
            track.skip_ticks()
        self.begun, end = True, self.now() + self.rules.most_seconds
        while True:
            while (due := min([item.follow(self.now()) for item in watched])) < math.inf:
                yield max(due - self.now(), self.rules.tight_seconds)
            for track in self.tracks:  # the integral extends to the last window's end
                track.ask_power()
            self.windows = [item.windows() for item in watched]
            if self.now() >= end or all(map(self._suffices, self.windows)):
                return
            for item in watched:
                item.wanted = len(item.edges)

    def _suffices(self, windows: Windows) -> bool:
        """Return whether the ends are precise, and the integral agrees with the counter.

        The integral must also be precise enough to check the counter.
        """
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
        """Read all counters tightly until each has changed.

        A change before the first reading has no known time.
        """
        for item in watched:
            item.track.ask_energy()
            item.waited_from = self.now()
        while not all(item.edges for item in watched):
            yield self.rules.tight_seconds
            for item in watched:
                item.seek_start(self.now())
