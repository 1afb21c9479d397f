"""Energy: the mean power of a plateau of calls from tick to tick of the energy counter, times the time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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

#: Largest part of the plateau that earlier work on the same calls may replace.
_WORKED_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Result: metrics, with a reason for each missing value, and the facts of each meter, with its raw readings."""

    metrics: list[Metric]
    facts: dict[str, Any]
    doubts: list[Diagnostic]

    def add_to(self, point: Point) -> None:
        """Add the result to a point."""
        point.metrics += self.metrics
        point.facts["energy"] = self.facts
        point.doubts += self.doubts


@dataclass(kw_only=True)
class EnergyProcedure:
    """Measures the energy of calls, one point after the other.

    It waits on the host by `sleep`, and reads the meters by `beside` while the device is kept busy.
    """

    device: Device
    detected: Found
    rules: Rules = field(default_factory=Rules)
    sleep: Callable[[float], None] = time.sleep
    beside: Beside = threaded
    _idle: Power | None = None
    _tick_seconds: dict[str, float] = field(default_factory=dict)

    def idle(self) -> Power | None:
        """Return the device's power with nothing running, measured once; None without a meter."""
        if self._idle is None and self.detected.meters:
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
        """Measure the energy of a call.

        Args:
            call: enqueues on an asynchronous device; it may be called any number of times.
            trains: whether the energy of an epoch is reported as well.
            calls_per_epoch: None where the data has no end.
            clean: mean seconds of the same call while no meter is read; None if unknown.
            worked_seconds: time that the device has just worked on such calls; at most half of the plateau counts.
        """
        calls_per = {"call": Reading(1.0), "image": Reading(1 / images_per_call)}
        if trains:
            calls_per["epoch"] = Reading(calls_per_epoch, "the data has no end; set data.num_samples")
        has_rested = self._idle is None
        idle = self.idle()
        if idle is None:
            nothing = Reading(None, self.detected.reason)
            metrics = _metrics(nothing, nothing, nothing, calls_per, estimated=False)
            return Energy(metrics=metrics, facts={"reason": self.detected.reason}, doubts=list(self.detected.doubts))
        tracks = self._tracks()
        with undisturbed():
            plateau = self.rules.plateau_seconds
            plateau -= 0.0 if has_rested else min(worked_seconds, _WORKED_SHARE * plateau)
            watch = Watch(tracks, self._now, replace(self.rules, plateau_seconds=plateau))
            calls, taken = self.beside(watch, Feeder(call, self.device, self.sleep))
        self._remember(tracks)
        power = Power(watch.windows, tracks)
        longest = max(window.seconds for window in watch.windows)
        call_seconds = Reading(taken / calls) if calls else Reading(None, "no call was completed in the window")
        metrics = [
            *_metrics(power.mean_watts, call_seconds, idle.mean_watts, calls_per, estimated=power.estimated),
            metric("counter_power_watts", power.counter_watts, "watts"),
            metric("integral_power_watts", power.integral_watts, "watts"),
            metric("integral_difference", power.difference, "1"),
            metric("integral_uncertainty", power.integral_uncertainty, "1"),
            metric("window_seconds", Reading(longest) if longest else power.mean_watts, "seconds"),
            metric("calls", Reading(calls), "1"),
            metric("call_seconds", call_seconds, "seconds"),
            *_per_meter(power, call_seconds),
        ]
        facts = {"meters": power.facts(), "idle": idle.facts()}
        pace = another_pace(call_seconds.value, clean)
        diagnostics = [*self.detected.doubts, *power.doubts, *_only_of_idle(idle, power), *pace]
        return Energy(metrics=metrics, facts=facts, doubts=diagnostics)

    def _tracks(self) -> list[Track]:
        return [Track(meter, self._now, self._tick_seconds.get(meter.name)) for meter in self.detected.meters]

    def _remember(self, tracks: list[Track]) -> None:
        self._tick_seconds |= {track.meter.name: tick for track in tracks if (tick := track.tick_seconds) is not None}

    def _now(self) -> float:
        return self.device.now_ns() * 1e-9


def _metrics(
    watts: Reading, call_seconds: Reading, idle_watts: Reading, calls_per: Mapping[str, Reading], *, estimated: bool
) -> list[Metric]:
    """Return the power, and the energy of a call, an image and an epoch, gross and net of the idle power."""
    metrics = [
        metric("power_mean_watts", watts, "watts", estimated=estimated),
        metric("idle_power_watts", idle_watts, "watts"),
    ]
    for prefix, part in (("", watts), ("net_", _above(watts, idle_watts))):
        joules = _times(part, call_seconds)
        metrics += [
            metric(
                f"{prefix}per_{unit}_joules", _times(joules, calls), "joules", estimated=estimated or unit == "epoch"
            )
            for unit, calls in calls_per.items()
        ]
    return metrics


def _times(first: Reading, second: Reading) -> Reading:
    """Return the product, or the reason why a factor is missing."""
    if first.value is None or second.value is None:
        return Reading(None, first.reason if first.value is None else second.reason)
    return Reading(first.value * second.value)


def _above(watts: Reading, idle_watts: Reading) -> Reading:
    if watts.value is None or idle_watts.value is None:
        return watts if watts.value is None else Reading(None, f"the idle power is not known: {idle_watts.reason}")
    if watts.value <= idle_watts.value:
        return Reading(None, f"the mean power is not above the idle power of {idle_watts.value:.4g} W")
    return Reading(watts.value - idle_watts.value)


def _per_meter(power: Power, call_seconds: Reading) -> list[Metric]:
    """Return the metrics of each of several meters, numbered in the order of their names in the facts."""
    if len(power.windows) < 2:
        return []
    metrics = []
    for index, (watts, *_) in enumerate(power.parts):
        metrics.append(metric(f"meter_{index}/power_mean_watts", watts, "watts"))
        joules = _times(watts, call_seconds)
        metrics.append(metric(f"meter_{index}/per_call_joules", joules, "joules"))
    return metrics


def _only_of_idle(idle: Power, power: Power) -> list[Diagnostic]:
    """Return the diagnostics of the idle power that the power of the calls does not have as well."""
    codes = {item.code for item in power.doubts}
    return [
        msgspec.structs.replace(item, message=f"idle power: {item.message}")
        for item in idle.doubts
        if item.code not in codes
    ]


def rules_for(
    *, window_seconds: float | None = None, epsilon: float | None = None, rules: Rules | None = None
) -> Rules:
    """Return rules with a window of at least `window_seconds`, by default one that suits the stopping rule.

    That is 1 s, or 5 s where the rule requires of the times a relative half-width of at most 0.5 % (`epsilon`).
    """
    if window_seconds is None:
        window_seconds = 5.0 if epsilon is not None and epsilon <= 0.005 else 1.0
    return replace(rules or Rules(), window_seconds=window_seconds)
