"""Energy: the mean power of a plateau of calls from tick to tick of the energy counter, times the time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from perfexp.devices import Device
from perfexp.meters import Found, Reading
from perfexp.meters.energy_metrics import Power, another_pace, metric
from perfexp.meters.feeding import Beside, Feeder, threaded
from perfexp.meters.track import Track
from perfexp.meters.watch import Rules, Watch
from perfexp.probes.timing import Call, undisturbed
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.record import Metric, Point
from perfexp.statistics.estimators import Interval

#: So much of the plateau may be the work that the device has just done on the same calls.
_WORKED_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Energy:
    """What came of a measurement.

    Attributes:
        metrics: None with a reason where there is no value.
        facts: every meter apart, with its raw answers.
        doubts: reasons not to trust the figures blindly.
    """

    metrics: list[Metric]
    facts: dict[str, Any]
    doubts: list[Diagnostic]

    def add_to(self, point: Point) -> None:
        """Put it into the record of a point.

        Args:
            point: that is being measured.
        """
        point.metrics += self.metrics
        point.facts["energy"] = self.facts
        point.doubts += self.doubts


@dataclass(kw_only=True)
class EnergyProcedure:
    """Measures the energy of calls, one point after the other; made once in a worker.

    Attributes:
        device: that works.
        found: its meters.
        rules: how they are watched.
        sleep: lets the host's time pass.
        beside: how they are watched while the device is kept at work.
    """

    device: Device
    found: Found
    rules: Rules = field(default_factory=Rules)
    sleep: Callable[[float], None] = time.sleep
    beside: Beside = threaded
    _idle: Power | None = None
    _tick_seconds: dict[str, float] = field(default_factory=dict)

    def idle(self) -> Power | None:
        """The power of the device in context with nothing running; measured once, best before the first point.

        Returns:
            None where there is no meter.
        """
        if self._idle is None and self.found.meters:
            self.device.synchronize()
            tracks = self._tracks()
            self._idle = Power(Watch(tracks, self._now, self.rules).run(self.sleep), tracks)
            self._remember(tracks)
        return self._idle

    def measure(
        self,
        call: Call,
        *,
        images_per_call: int,
        trains: bool = False,
        calls_per_epoch: int | None = None,
        clean: Interval | None = None,
        worked_seconds: float = 0.0,
    ) -> Energy:
        """The energy of a call.

        Args:
            call: enqueues on an asynchronous device; it may be called as often as is needed.
            images_per_call: batch size.
            trains: whether it is a training step, of which an epoch's energy is asked for.
            calls_per_epoch: None where the data has no end.
            clean: mean seconds of a call of the same stream while no meter is asked; None where that is not known.
            worked_seconds: for which the device has worked on such calls until now; half of the plateau at the most.
        """
        per = _Per(images_per_call=images_per_call, trains=trains, calls_per_epoch=calls_per_epoch)
        rested = self._idle is None
        idle = self.idle()
        if idle is None:
            nothing = Reading(None, self.found.reason)
            metrics = per.metrics(nothing, nothing, nothing, estimated=False)
            return Energy(metrics=metrics, facts={"reason": self.found.reason}, doubts=list(self.found.doubts))
        tracks = self._tracks()
        with undisturbed():
            watch = Watch(tracks, self._now, self._rules_after(0.0 if rested else worked_seconds))
            calls, taken = self.beside(watch, Feeder(call, self.device, self.sleep))
        self._remember(tracks)
        power = Power(watch.windows, tracks)
        longest = max(window.seconds for window in watch.windows)
        call_seconds = Reading(taken / calls) if calls else Reading(None, "no call was completed in the window")
        metrics = [
            *per.metrics(power.mean_watts, call_seconds, idle.mean_watts, estimated=power.estimated),
            metric("counter_power_watts", power.counter_watts, "watts"),
            metric("integral_power_watts", power.integral_watts, "watts"),
            metric("integral_difference", power.difference, "1"),
            metric("integral_uncertainty", power.integral_uncertainty, "1"),
            metric("window_seconds", Reading(longest) if longest else power.mean_watts, "seconds"),
            metric("calls", Reading(calls), "1"),
            metric("call_seconds", call_seconds, "seconds"),
            *_apart(power, call_seconds),
        ]
        facts = {"meters": power.facts(), "idle": idle.facts()}
        pace = another_pace(call_seconds.value, clean)
        found = [*self.found.doubts, *power.doubts, *_only_of_idle(idle, power), *pace]
        return Energy(metrics=metrics, facts=facts, doubts=found)

    def _rules_after(self, worked_seconds: float) -> Rules:
        """The plateau without what of it has been there before."""
        plateau = self.rules.plateau_seconds
        return replace(self.rules, plateau_seconds=plateau - min(worked_seconds, _WORKED_SHARE * plateau))

    def _tracks(self) -> list[Track]:
        return [Track(meter, self._now, self._tick_seconds.get(meter.name)) for meter in self.found.meters]

    def _remember(self, tracks: list[Track]) -> None:
        """How often the counters tick, for the next time."""
        self._tick_seconds |= {track.meter.name: tick for track in tracks if (tick := track.tick_seconds) is not None}

    def _now(self) -> float:
        return self.device.now_ns() * 1e-9


@dataclass(frozen=True, kw_only=True)
class _Per:
    """By what a call's energy is divided and multiplied.

    Attributes:
        images_per_call: batch size.
        trains: whether an epoch is asked for.
        calls_per_epoch: None where the data has no end.
    """

    images_per_call: int
    trains: bool
    calls_per_epoch: int | None

    def metrics(self, watts: Reading, call_seconds: Reading, idle_watts: Reading, *, estimated: bool) -> list[Metric]:
        """Gross and net of the idle power.

        Args:
            watts: mean power.
            call_seconds: time of a call.
            idle_watts: power with nothing running.
            estimated: whether the power is.
        """
        found = [
            metric("power_mean_watts", watts, "watts", estimated=estimated),
            metric("idle_power_watts", idle_watts, "watts"),
        ]
        for prefix, part in (("", watts), ("net_", _above(watts, idle_watts))):
            joules = _times(part, call_seconds)
            found.append(metric(f"{prefix}per_call_joules", joules, "joules", estimated=estimated))
            per_image = _times(joules, Reading(1 / self.images_per_call))
            found.append(metric(f"{prefix}per_image_joules", per_image, "joules", estimated=estimated))
            if self.trains:
                per_epoch = _times(joules, Reading(self.calls_per_epoch, "the data has no end: give data.num_samples"))
                found.append(metric(f"{prefix}per_epoch_joules", per_epoch, "joules", estimated=True))
        return found


def _times(first: Reading, second: Reading) -> Reading:
    """The product; none where either is none."""
    if first.value is None or second.value is None:
        return first if first.value is None else Reading(None, second.reason)
    return Reading(first.value * second.value)


def _above(watts: Reading, idle_watts: Reading) -> Reading:
    """What is drawn beyond the idle power."""
    if watts.value is None or idle_watts.value is None:
        return watts if watts.value is None else Reading(None, f"the idle power is not known: {idle_watts.reason}")
    if watts.value <= idle_watts.value:
        return Reading(None, f"the mean power is not above the idle power of {idle_watts.value:.4g} W")
    return Reading(watts.value - idle_watts.value)


def _apart(power: Power, call_seconds: Reading) -> list[Metric]:
    """Each of several meters; their names are in the facts, in the same order."""
    if len(power.windows) < 2:
        return []
    found = []
    for index, (watts, *_) in enumerate(power.parts):
        found.append(metric(f"meter_{index}/power_mean_watts", watts, "watts"))
        joules = _times(watts, call_seconds)
        found.append(metric(f"meter_{index}/per_call_joules", joules, "joules"))
    return found


def _only_of_idle(idle: Power, power: Power) -> list[Diagnostic]:
    """Diagnostics of the idle power whose codes the power of the calls does not have."""
    known = {doubt.code for doubt in power.doubts}
    return [
        msgspec.structs.replace(doubt, message=f"idle power: {doubt.message}")
        for doubt in idle.doubts
        if doubt.code not in known
    ]


def rules_for(
    *, window_seconds: float | None = None, epsilon: float | None = None, rules: Rules | None = None
) -> Rules:
    """The rules with the window that the stopping rule wants.

    Args:
        window_seconds: least length; None for 1 s, or 5 s where the times are measured finely.
        epsilon: relative half-width that the times' intervals are to reach, if any.
        rules: everything else.
    """
    if window_seconds is None:
        window_seconds = 5.0 if epsilon is not None and epsilon <= 0.005 else 1.0
    return replace(rules or Rules(), window_seconds=window_seconds)
