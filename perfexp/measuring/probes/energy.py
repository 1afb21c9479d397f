"""Energy per call: the mean power of a plateau of calls times the time of a call.

A plateau is a period of calls that is long enough for the power to become constant. Only its
windows count, each from one tick of the energy counter to another. Net energy leaves out the idle
power, which is measured before and after, or was measured shortly before. `procedure` measures a
plateau in the loop and one with graph replays ("queued"), which keep the device busy. Meters and
their mathematics are in `devices/meters`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from perfexp.devices import Device
from perfexp.devices.meters import DeviceMeters, Reading
from perfexp.devices.meters.energy_metrics import (
    Power,
    above,
    another_pace,
    metric,
    midway,
    product,
)
from perfexp.devices.meters.track import Track
from perfexp.devices.meters.watch import Beside, Feeder, Rules, Watch, threaded
from perfexp.host.cache import JsonCache
from perfexp.records import diagnostics, quantities
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.quantities import member
from perfexp.records.record import Metric, Point
from perfexp.statistics.estimators import Interval
from perfexp.timing.collecting import Call, undisturbed

#: Largest share of the plateau that earlier work on the same calls may replace.
_WORKED_SHARE = 0.5
#: Pause before the windows of an idle power that follows calls, and their maximum length.
_REST_SECONDS, _REST_WINDOW_SECONDS = 1.0, 1.0
#: How long an idle power that follows calls holds for later points and processes, and how far it
#: may drift as a fraction. On an H200 it stayed within 1.3 % for twelve minutes of measurements.
_IDLE_SECONDS, _IDLE_DRIFT = 120.0, 0.013
#: Key of the last idle power in its cache, and Linux's identity of the time since the host's start.
_IDLE, _BOOT = "idle", Path("/proc/sys/kernel/random/boot_id")
#: After this many points in a row with a counter and an integral that disagree, later points no
#: longer wait for agreement.
_MOST_DISAGREED = 2
#: Energies per call, image and epoch: gross, and net of the idle power.
_ENERGIES = {
    "call": (quantities.ENERGY, quantities.NET_ENERGY),
    "image": (quantities.IMAGE_ENERGY, quantities.NET_IMAGE_ENERGY),
    "epoch": (quantities.EPOCH_ENERGY, quantities.NET_EPOCH_ENERGY),
}


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Result of an energy measurement.

    Attributes:
        metrics: power and energy figures; each missing metric has a reason.
        facts: how they were measured, with each meter's raw readings.
        doubts: diagnostics.
    """

    metrics: list[Metric]
    facts: dict[str, Any]
    doubts: list[Diagnostic]

    def add_to(self, point: Point) -> None:
        """Add the result to a point."""
        point.metrics += self.metrics
        point.facts["energy"] = self.facts
        point.doubts += self.doubts


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """What was measured on a plateau of calls, all in the same windows.

    Attributes:
        power: power of the device in watts.
        calls: number of calls.
        call_seconds: mean seconds per call.
    """

    power: Power
    calls: int
    call_seconds: Reading

    @property
    def call_joules(self) -> Reading:
        """Return the energy per call in joules."""
        return product(self.power.mean_watts, self.call_seconds)


class _Earlier(msgspec.Struct):
    """Idle power that another process measured, in watts.

    Attributes:
        time: end of its windows, in seconds of the host's clock, which all processes share.
        window_seconds: length of the windows.
        follows_calls: whether `rest` measured it, after calls, which warm the device.
        tick_seconds: interval between ticks of each meter's counter, by meter name.
        content: facts of the meters.
    """

    time: float
    window_seconds: float
    follows_calls: bool
    tick_seconds: dict[str, float]
    watts: float
    half_width: float | None
    content: list[dict[str, Any]]
    doubts: tuple[Diagnostic, ...] = ()

    @property
    def mean_watts(self) -> Reading:
        """Return the power with its interval, which includes a drift since then."""
        drift_watts = _IDLE_DRIFT * self.watts
        return Reading(self.watts, half_width=math.hypot(self.half_width or 0.0, drift_watts))

    def facts(self) -> list[dict[str, Any]]:
        """Return the facts, as of a `Power`."""
        return self.content


@dataclass(kw_only=True)
class EnergyProcedure:
    """Measures the energy of calls, point by point.

    Attributes:
        detected: meters of the device, or of all ranks' devices.
        cache: folder for the last idle power of these meters; None to measure it always.
        rules: lengths of plateaus and windows.
        sleep: waits on the host for some seconds.
        beside: reads the meters in a thread while the device is kept busy.
    """

    device: Device
    detected: DeviceMeters
    cache: Path | None = None
    rules: Rules = field(default_factory=Rules)
    sleep: Callable[[float], None] = time.sleep
    beside: Beside = threaded
    #: Idle powers in order: another process's or the one before the first point, then after points.
    _idle: list[Power | _Earlier] = field(default_factory=list)
    #: End of the last idle power, and whether it holds for later points.
    _idle_time: float = 0.0
    _follows_calls: bool = False
    #: Interval between ticks of each meter's counter, by meter name.
    _tick_seconds: dict[str, float] = field(default_factory=dict)
    #: Points in a row with a counter and an integral that disagree.
    _disagreed: int = 0

    def __post_init__(self) -> None:
        """Open the cache for these meters, until the host or the device's limits change."""
        self._stored: JsonCache | None = None
        if self.cache is not None and self.detected.meters:
            with suppress(OSError):
                meters = [meter.name for meter in self.detected.meters]
                context = {"boot": _BOOT.read_text(), "meters": meters, **self.device.limits()}
                self._stored = JsonCache(self.cache, context)

    def idle(self) -> Power | _Earlier | None:
        """Return the first idle power of this process; None without a meter.

        It is measured at the first request, unless another process did so within two minutes.
        """
        if not self._idle and self._stored:
            with suppress(msgspec.ValidationError):
                earlier = msgspec.convert(self._stored.find(_IDLE), _Earlier)
                age = self._now() - earlier.time
                if 0 <= age < _IDLE_SECONDS and earlier.window_seconds >= self.rules.window_seconds:
                    for facts in earlier.content:
                        facts["age_seconds"] = round(age, 1)
                    self._tick_seconds |= earlier.tick_seconds
                    self._idle.append(earlier)
                    # a CPU's idle power depends on other work
                    is_valid = earlier.follows_calls and self.device.asynchronous
                    self._idle_time, self._follows_calls = earlier.time, is_valid
        if not self._idle and self.detected.meters:
            self._measure_idle(self.rules)
        return self._idle[0] if self._idle else None

    def rest(self) -> None:
        """Measure the idle power after calls, after a pause for the power to settle.

        Nothing is measured if one that followed calls, of this process or of another on the same
        GPU, is under two minutes old.
        """
        if self._follows_calls and self._now() - self._idle_time < _IDLE_SECONDS:
            return
        window_seconds = min(self.rules.window_seconds, _REST_WINDOW_SECONDS)
        self._measure_idle(
            replace(self.rules, plateau_seconds=_REST_SECONDS, window_seconds=window_seconds),
            follows_calls=True,
        )

    def _measure_idle(self, rules: Rules, *, follows_calls: bool = False) -> None:
        """Measure the power of the idle device and add it to the idle powers."""
        self.device.synchronize()
        tracks = self._tracks()
        power = Power(Watch(tracks, self._now, rules).run(self.sleep), tracks)
        self._idle.append(power)
        self._idle_time, self._follows_calls = self._now(), follows_calls
        self._remember(tracks)
        watts = power.mean_watts
        if self._stored and watts.value is not None and not power.doubts:
            earlier = _Earlier(
                time=self._idle_time,
                window_seconds=rules.window_seconds,
                follows_calls=follows_calls,
                tick_seconds=self._tick_seconds,
                watts=watts.value,
                half_width=watts.half_width,
                content=power.facts(),
            )
            self._stored.add(_IDLE, msgspec.to_builtins(earlier))

    def plateau(self, call: Call, worked_seconds: float = 0.0) -> Plateau | None:
        """Keep the device busy with calls, and measure their power and pace; None without a meter.

        Args:
            call: enqueues on an asynchronous device; it may be called any number of times.
            worked_seconds: time that the device has just worked on such calls; it replaces at most
                half of the plateau.
        """
        is_first = not self._idle
        if (idle := self.idle()) is None:
            return None
        rests_now = is_first and isinstance(idle, Power)  # the device has cooled meanwhile
        tracks, plateau_seconds = self._tracks(), self.rules.plateau_seconds
        with undisturbed():
            if not rests_now:
                plateau_seconds -= min(worked_seconds, _WORKED_SHARE * plateau_seconds)
            rules = replace(self.rules, plateau_seconds=plateau_seconds)
            watch = Watch(tracks, self._now, rules)
            feeder = Feeder(call, self.device, self.sleep)
            calls, window_seconds = self.beside(watch, feeder)
        self._remember(tracks)
        self._disagreed += 1
        if not any(windows.disagrees for windows in watch.windows):
            self._disagreed = 0
        # more windows did not help, and would not help later points
        if self._disagreed >= _MOST_DISAGREED:
            self.rules = replace(self.rules, most_seconds=0.0)
        call_seconds = Reading(None, "no call was completed in the window")
        if calls:
            half_width = feeder.half_width(watch.windows[0].edges)
            call_seconds = Reading(window_seconds / calls, half_width=half_width)
        return Plateau(power=Power(watch.windows, tracks), calls=calls, call_seconds=call_seconds)

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
        """Measure the energy per call in its loop only; see `plateau` and `report`.

        For programs of the repository that measure a call without a point.
        """
        calls_per = calls_per_unit(
            images_per_call=images_per_call, trains=trains, calls_per_epoch=calls_per_epoch
        )
        return self.report(self.plateau(call, worked_seconds), calls_per, clean=clean)

    def report(
        self,
        plateau: Plateau | None,
        calls_per: Mapping[str, Reading],
        *,
        clean: Interval | None = None,
        queued: Plateau | Reading | None = None,
    ) -> Energy:
        """Return the energy figures for a plateau, net of the mean of the last two idle powers.

        With a single idle power, of another process, they are net of that.

        Args:
            plateau: calls in the loop; None without a meter.
            calls_per: number of calls per energy unit, from `calls_per_unit`.
            clean: mean seconds of the same call with no meter reading; None if unknown.
            queued: calls as a CUDA graph, which keeps the device busy, or a reading with the reason
                for their absence. None if both paces agree.
        """
        if plateau is None:
            nothing = Reading(None, self.detected.reason)
            metrics = _metrics(nothing, nothing, nothing, calls_per, None, estimated=False)
            doubts = [
                *self.detected.doubts,
                diagnostics.make("meter_missing", reason=self.detected.reason),
            ]
            return Energy(metrics=metrics, facts={"reason": self.detected.reason}, doubts=doubts)
        power, call_seconds, idle = plateau.power, plateau.call_seconds, self._idle[-2:]
        idle_watts = idle[0].mean_watts
        # the middle of the idle powers before and after the calls
        if len(idle) > 1:
            idle_watts = midway(idle_watts, idle[-1].mean_watts)
        metrics = _metrics(
            power.mean_watts, call_seconds, idle_watts, calls_per, queued, estimated=power.estimated
        )
        metrics += _window_metrics(plateau)
        facts = {"meters": power.facts(), "idle": idle[0].facts()}
        if len(idle) > 1:
            facts["idle_last"] = idle[-1].facts()
        others: list[tuple[str, Power | _Earlier]] = [("idle power", item) for item in idle]
        if isinstance(queued, Plateau):
            facts["queued"] = queued.power.facts()
            others.append(("pace of the device", queued.power))
        doubts = [*self.detected.doubts, *_merge_diagnostics(power, others)]
        # energy per call holds for the pace at which it was measured
        if queued is not None or another_pace(call_seconds, clean):
            is_captured = queued is None or isinstance(queued, Plateau)
            advice = "a larger batch" + " or execution.cuda_graph=true" * is_captured
            doubts.append(
                diagnostics.make("energy_pace", paces=_paces(plateau, clean, queued), advice=advice)
            )
        return Energy(metrics=metrics, facts=facts, doubts=doubts)

    def _tracks(self) -> list[Track]:
        """Return a new recording of each meter, with the tick interval known so far."""
        return [
            Track(meter, self._now, self._tick_seconds.get(meter.name))
            for meter in self.detected.meters
        ]

    def _remember(self, tracks: list[Track]) -> None:
        """Store the tick intervals that recordings have shown, for later recordings."""
        self._tick_seconds |= {
            track.meter.name: tick for track in tracks if (tick := track.tick_seconds) is not None
        }

    def _now(self) -> float:
        """Return the host's clock in seconds."""
        return self.device.now_ns() * 1e-9


def calls_per_unit(
    *, images_per_call: int, trains: bool, calls_per_epoch: int | None
) -> dict[str, Reading]:
    """Return the number of calls in each energy unit: call, image and, in training, epoch.

    Args:
        images_per_call: images in the batches of all ranks.
        trains: whether to include the epoch.
        calls_per_epoch: None for endless data; the reading then has a reason instead of a value.
    """
    # exact numbers: they add nothing to the interval of the energy
    calls_per = {
        "call": Reading(1.0, half_width=0.0),
        "image": Reading(1 / images_per_call, half_width=0.0),
    }
    if trains:
        calls_per["epoch"] = Reading(
            calls_per_epoch, "the data has no end; set data.num_samples", half_width=0.0
        )
    return calls_per


def _metrics(
    watts: Reading,
    call_seconds: Reading,
    idle_watts: Reading,
    calls_per: Mapping[str, Reading],
    queued: Plateau | Reading | None,
    *,
    estimated: bool,
) -> list[Metric]:
    """Return the power and the energy per call, image and epoch, gross and net of idle power.

    Intervals combine power, time and idle power in quadrature (delta method).

    Args:
        watts: mean power of the plateau.
        idle_watts: idle power.
        calls_per: number of calls in each energy unit.
        queued: see `EnergyProcedure.report`.
        estimated: whether a meter only estimates its power.
    """
    metrics = [
        metric(quantities.POWER, watts, estimated=estimated),
        metric(quantities.IDLE_POWER, idle_watts),
    ]
    for number, part in enumerate((watts, above(watts, idle_watts))):
        joules = product(part, call_seconds)
        for unit, calls in calls_per.items():
            is_estimate = estimated or unit == "epoch"
            name = _ENERGIES[unit][number]
            metrics.append(metric(name, product(joules, calls), estimated=is_estimate))
            if name == quantities.ENERGY:  # next to the energy in the loop
                metrics += _queued_metrics(queued)
    return metrics


def _queued_metrics(queued: Plateau | Reading | None) -> list[Metric]:
    """Return the energy, power and seconds per call with the device kept busy; empty for None."""
    if queued is None:
        return []
    if not isinstance(queued, Plateau):
        return [metric(quantities.QUEUED_ENERGY, queued)]
    power = queued.power
    return [
        metric(quantities.QUEUED_ENERGY, queued.call_joules, estimated=power.estimated),
        metric(quantities.QUEUED_POWER, power.mean_watts, estimated=power.estimated),
        metric(quantities.QUEUED_SECONDS, queued.call_seconds),
    ]


def _paces(plateau: Plateau, clean: Interval | None, queued: Plateau | Reading | None) -> str:
    """Describe energy and time per call in the loop, and with the device kept busy."""
    timed = f" ({clean.value * 1e3:.4g} ms when it was timed)" if clean else ""
    paces = [f"{_pace(plateau)} in the loop{timed}"]
    if isinstance(queued, Plateau):
        paces.append(f"{_pace(queued)} as a CUDA graph, which keeps the device busy")
    elif queued is not None:
        paces.append(f"not measured as a CUDA graph, which keeps the device busy ({queued.reason})")
    return ", ".join(paces)


def _pace(plateau: Plateau) -> str:
    """Describe energy and time per call, for example `0.88 J at 12.3 ms per call`."""
    joules, seconds = plateau.call_joules.value, plateau.call_seconds.value
    energy = "no energy" if joules is None else f"{joules:.4g} J"
    if seconds is None:
        return energy
    return f"{energy} at {seconds * 1e3:.4g} ms per call"


def _window_metrics(plateau: Plateau) -> list[Metric]:
    """Return metrics about the plateau's windows, then for each meter if there are several.

    The windows' metrics show how far counter and integral agree. Meters have the order of the
    facts.
    """
    power, call_seconds = plateau.power, plateau.call_seconds
    seconds = max(windows.seconds for windows in power.windows)
    metrics = [
        metric(quantities.COUNTER_POWER, power.counter_watts),
        metric(quantities.INTEGRAL_POWER, power.integral_watts),
        metric(quantities.DIFFERENCE, power.difference),
        metric(quantities.UNCERTAINTY, power.integral_uncertainty),
        metric(quantities.WINDOW_SECONDS, Reading(seconds) if seconds else power.mean_watts),
        metric(quantities.CALLS, Reading(plateau.calls)),
        metric(quantities.CALL_SECONDS, call_seconds),
    ]
    if power.accuracy is not None:
        metrics.append(metric(quantities.METER_ACCURACY, Reading(power.accuracy)))
    for index, (watts, *_) in enumerate(power.parts if len(power.parts) > 1 else ()):
        metrics.append(metric(member(quantities.METER_POWER, index), watts))
        metrics.append(metric(member(quantities.METER_ENERGY, index), product(watts, call_seconds)))
    return metrics


def _merge_diagnostics(
    power: Power, others: Sequence[tuple[str, Power | _Earlier]]
) -> list[Diagnostic]:
    """Return a power's diagnostics, and diagnostics that only others have, with their names.

    Args:
        others: name and power, for example the idle power.
    """
    doubts = list(power.doubts)
    for name, other in others:
        codes = {item.code for item in doubts}
        new = [item for item in other.doubts if item.code not in codes]
        doubts += [msgspec.structs.replace(item, message=f"{name}: {item.message}") for item in new]
    return doubts


def rules_for(
    *, window_seconds: float | None = None, target: float | None = None, rules: Rules | None = None
) -> Rules:
    """Return rules for plateaus with windows of at least `window_seconds`.

    Args:
        window_seconds: by default 5 s if the stopping rule requires a precision of 0.5 % or better,
            otherwise 1 s.
        target: relative half-width that the stopping rule requires; None if it requires none.
        rules: rules to change; by default the usual rules.
    """
    if window_seconds is None:
        window_seconds = 5.0 if target is not None and target <= 0.005 else 1.0
    return replace(rules or Rules(), window_seconds=window_seconds)
