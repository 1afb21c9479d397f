"""Self-test of energy meters for `perfexp doctor`: do they move, how often, at what cost?

A meter has an energy counter, power readings, or both. `try_meters` runs in a worker and watches an
idle device for about a second; `findings` turns its result into verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from perfexp.devices.meters import DeviceMeters, PowerKind
from perfexp.devices.meters.energy_metrics import Power
from perfexp.devices.meters.track import Track
from perfexp.devices.meters.watch import Rules, Watch
from perfexp.doctor import Finding, missing, ok, untested, warn, warn_if
from perfexp.records import units

#: A self-test is short and not a measurement.
_RULES = Rules(plateau_seconds=0.5, window_seconds=0.5, most_seconds=1.0, uncertainty=0.01)
#: A slower query gives a warning.
_SLOW_SECONDS = 0.01
#: Remedy of a finding about a meter without energy.
_NULL = "energy will be null, with this reason"


def try_meters(
    device_meters: DeviceMeters,
    *,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Watch idle meters for about a second and return their observations, as JSON values.

    Without meters, `reason` has the reason.

    Args:
        device_meters: meters of a device.
        now: clock in seconds.
        sleep: waits for some seconds.
    """
    if not device_meters.meters:
        return {
            "reason": device_meters.reason,
            "doubts": msgspec.to_builtins(device_meters.doubts),
            "meters": [],
        }
    tracks = [Track(meter, now) for meter in device_meters.meters]
    power = Power(Watch(tracks, now, _RULES).run(sleep), tracks)
    meters = []
    for track, facts in zip(tracks, power.facts(), strict=True):
        # without raw answers
        short = {name: value for name, value in facts.items() if name not in ("counter", "power")}
        meters.append({**short, "no_energy": track.no_energy, "no_power": track.no_power})
    return {
        "reason": "",
        "doubts": msgspec.to_builtins([*device_meters.doubts, *power.doubts]),
        "meters": meters,
    }


def findings(tried: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings from `try_meters`, a few lines per meter."""
    if not tried["meters"]:
        yield missing("energy", str(tried["reason"]), _NULL)
    for meter in tried["meters"]:
        yield _counter(meter)
        yield _power(meter)
        seconds = meter["query_seconds"]
        observation = f"took at most {units.format_seconds(seconds, 2)}"
        remedy = "windows get coarse: close other programs that query the driver (nvidia-smi, dcgm)"
        yield warn_if(seconds > _SLOW_SECONDS, f"query {meter['name']}", observation, remedy)
    for doubt in tried["doubts"]:
        verdict = untested if doubt["code"] == "untested" else warn
        yield verdict("energy", doubt["detail"], doubt["remedy"])


def _counter(meter: Mapping[str, Any]) -> Finding:
    """Return the finding about a meter's energy counter: its tick and the power at rest."""
    check = f"energy counter {meter['name']}"
    watts = meter["counter_watts"]
    if watts is None:
        return missing(check, meter["no_energy"] or "no window came about", _NULL)
    tick = meter["tick_seconds"]
    ticks = f"ticks every {units.format_seconds(tick, 2)}" if tick else "moves"
    return ok(check, f"{ticks}, {units.digits(watts)} W at rest; counts {meter['covers']}")


def _power(meter: Mapping[str, Any]) -> Finding:
    """Return the finding about a meter's power readings."""
    check = f"power {meter['name']}"
    if meter["integral_watts"] is None:
        remedy = "the energy counter is enough; there is nothing to compare it with"
        return missing(check, meter["no_power"] or "too few readings", remedy)
    is_average = meter["power_kind"] == PowerKind.average
    kind = "an average over about a second" if is_average else "instantaneous"
    return ok(check, f"{units.digits(meter['integral_watts'])} W at rest, {kind}")
