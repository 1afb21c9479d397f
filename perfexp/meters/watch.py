"""Watch: asks meters while something goes on, so that each has a window from one tick of its counter to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from perfexp.errors import UserError
from perfexp.meters.track import Tick, Track, Window, uncertainty, window

#: Readings of the power in a window, where asking disturbs what goes on.
_SPARSE = 8
#: It does where it stands still for this fraction of the window …
_DRY = 0.002
#: … and the readings are of the wrong moments where it does in this share of them.
_DRY_ROUNDS = 0.1
#: So many periods without a tick are too many.
_PATIENT_TICKS = 3


class Between(Protocol):
    """What goes on while nobody asks a meter."""

    def let_pass(self, seconds: float) -> None:
        """Let about so much time pass.

        Args:
            seconds: at least something is done however short that is.
        """

    def ran_dry(self) -> bool:
        """Whether what goes on had come to its end before it was given more."""


class Rest:
    """Nothing goes on (a `Between`).

    Args:
        sleep: lets the time pass.
    """

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self._sleep = sleep

    def let_pass(self, seconds: float) -> None:
        """See `Between`."""
        self._sleep(seconds)

    def ran_dry(self) -> bool:
        """There is nothing that could."""
        return False


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How meters are watched.

    Attributes:
        plateau_seconds: for so long it goes on before the window begins.
        window_seconds: least length of the window.
        longest_windows: so many times that length is the most, where its ends can't be told well enough before.
        period_seconds: from one reading of the power to the next.
        tight_seconds: from one reading of the counter to the next where a tick is expected.
        uncertainty: standard uncertainty of the window's length that is well enough, relative.
        patience_seconds: a counter that does not change for so long stands still.
    """

    plateau_seconds: float = 1.2
    window_seconds: float = 1.0
    longest_windows: float = 5.0
    period_seconds: float = 0.02
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
        owed: whether the counter is to be read as the power was.
        sparse: whether it is read as rarely as will do.
    """

    track: Track
    rules: Rules
    start: Tick | None = None
    end: Tick | None = None
    asked: float = -math.inf
    waited_from: float = 0.0
    owed: bool = False
    sparse: bool = False

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

    def follow(self, now: float) -> bool:
        """Read what is due; returns whether more is to be read at once, since a tick is expected."""
        if self.end is not None or self.start is None:
            return False
        if self.track.no_energy:
            return self._follow_power(now, self.start)
        tight = now >= self._expected(self.start) - self._guard()
        if tight or self.owed:
            self.owed = False
            self._read(self.start, now)
        elif self._ask_power(now):  # one question at a time, so that the device can be given work between two
            self.owed = not self.sparse
        return (tight or self.owed) and self.end is None

    def window(self) -> Window:
        """What came of it."""
        assert self.start is not None
        return window(self.track, self.start, self.end)

    def _follow_power(self, now: float, start: Tick) -> bool:
        """A meter without a counter, or with one that has failed: the power alone, over the length that is wanted."""
        self._ask_power(now)
        if now - start.seconds >= self.rules.window_seconds or self.track.no_power:
            self.end = Tick(now, 0.0, 0.0)
        return False

    def _ask_power(self, now: float) -> bool:
        """Read the power, if it is time to; returns whether it was."""
        period = self.rules.window_seconds / _SPARSE if self.sparse else self.rules.period_seconds
        if now - self.asked < period:
            return False
        self.track.ask_power()
        self.asked = now
        return True

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
        return 0.05 * period + 2 * (self.track.query_seconds + self.rules.tight_seconds)

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
        between: what goes on.
        now: the host's clock, seconds.
        rules: how they are watched.
        begun: called when all windows have begun.
        dry_seconds: the longest for which what goes on may have stood still in the window, since it ran dry while
            meters were asked.
    """

    tracks: Sequence[Track]
    between: Between
    now: Callable[[], float]
    rules: Rules = field(default_factory=Rules)
    begun: Callable[[], None] = lambda: None
    dry_seconds: float = 0.0
    _rounds: int = 0
    _dry_rounds: int = 0

    @property
    def disturbed(self) -> bool:
        """Whether what goes on often stood still just when a meter was asked, however short that was."""
        return self._dry_rounds > _DRY_ROUNDS * self._rounds

    def run(self) -> list[Window]:
        """Watch; returns a window of each meter."""
        self._plateau()
        watched = [_Watched(track, self.rules) for track in self.tracks]
        self._seek_starts(watched)
        self.begun()
        while any(each.end is None for each in watched):
            pause = self.rules.period_seconds / 4
            for each in watched:
                began = self.now()
                if each.follow(began):
                    pause = self.rules.tight_seconds
                self._account(watched, self.now() - began)
                self._refill()
            self.between.let_pass(pause)
        for track in self.tracks:  # the integral goes up to the end of the window
            track.ask_power()
        return [each.window() for each in watched]

    def _plateau(self) -> None:
        """Let it go on, and find out how often the counters tick."""
        self.between.let_pass(self.rules.tight_seconds)
        end = self.now() + self.rules.plateau_seconds
        while self.now() < end:
            for track in self.tracks:
                track.ask_energy()
                self._refill()
                track.ask_power()
                self._refill()
            unknown = any(track.tick_seconds is None and not track.no_energy for track in self.tracks)
            pause = self.rules.tight_seconds if unknown else self.rules.period_seconds
            self.between.let_pass(min(pause, max(end - self.now(), 0.0)))

    def _seek_starts(self, watched: Sequence[_Watched]) -> None:
        """Read all counters tightly until each has changed; what changed before the first reading tells no moment."""
        for each in watched:
            each.track.ask_energy()
            each.waited_from = self.now()
        while any(each.start is None for each in watched):
            self.between.let_pass(self.rules.tight_seconds)
            for each in watched:
                each.seek_start(self.now())
                self._refill()

    def _refill(self) -> None:
        """Give what goes on something to do, where it is in want of it."""
        self.between.let_pass(0.0)

    def _account(self, watched: Sequence[_Watched], asking_seconds: float) -> None:
        """Where asking lets it stand still for long, ask less often."""
        if not asking_seconds:
            return
        self._rounds += 1
        if self.between.ran_dry():
            self._dry_rounds += 1
            self.dry_seconds += asking_seconds
            for each in watched:
                each.sparse = self.dry_seconds > _DRY * self.rules.window_seconds
