"""How well the energy of a call repeats, and whether counter and integral of the power agree.

    python validation/energy_repeat.py [--windows 5] [--seconds 1] [--plateaus 0.2 0.4 0.6 1.2]

On the first CUDA device, or else the CPU: three loads (a large matrix product, a copy, many small kernels), each
measured so many times one after the other. A line for each: mean power, energy of a call, the standard deviation of
the measurements and their spread (largest minus smallest), both over the mean, the mean half-width of their intervals,
how many of their pairs have intervals that do not overlap, the largest difference between counter and integral, the
counter's tick, and the longest that the meter took to answer. Without a meter it says why there is none.

With `--plateaus` instead: how long calls have to go on before a window begins, where the device has worked on the same
calls for a second just before, as it has when a point has been timed. Half a second of pause, a second of calls, the
plateau, the window; plateaus take turns. A line for each: energy of a call and its deviation, and the mean over that of
the longest plateau.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import torch

from perfexp.devices import Device
from perfexp.devices.cpu import CpuDevice
from perfexp.devices.meters import DeviceMeters
from perfexp.devices.meters.watch import Rules
from perfexp.doctor.meter_selftest import findings, try_meters
from perfexp.measuring.probes.energy import Energy, EnergyProcedure, rules_for

SMALL_KERNELS = 50
#: Before each window, where plateaus are compared: nothing, and then calls.
_PAUSE_SECONDS, _BEFORE_SECONDS = 0.5, 1.0


def device_here() -> Device:
    """The first CUDA device, or the CPU."""
    if not torch.cuda.is_available():
        return CpuDevice()
    from perfexp.devices.cuda import CudaDevice

    return CudaDevice()


def loads(where: str | None) -> dict[str, Callable[[], object]]:
    """What is run, by name."""
    side, megabytes = (4096, 512) if where != "cpu" else (1024, 64)
    first, second, out = (torch.randn(side, side, device=where) for _ in range(3))
    source = torch.ones(megabytes * 2**20, dtype=torch.uint8, device=where)
    target, small = torch.empty_like(source), torch.ones(4096, device=where)

    def many() -> None:
        for _ in range(SMALL_KERNELS):
            small.mul_(1.0)

    return {
        f"matmul {side}": lambda: torch.mm(first, second, out=out),
        f"copy {megabytes} MiB": lambda: target.copy_(source),
        f"{SMALL_KERNELS} small kernels": many,
    }


def value(energy: Energy, name: str) -> float:
    """A figure, or NaN."""
    found = next(metric.value for metric in energy.metrics if metric.name == f"energy/{name}")
    return float("nan") if found is None else found


def apart(windows: Sequence[Energy]) -> tuple[float, str]:
    """The mean relative half-width of the energies' intervals, and the pairs of them that do not overlap."""
    found = [
        next(each for each in energy.metrics if each.name == "energy/per_call_joules")
        for energy in windows
    ]
    ends = [
        (each.low, each.high) for each in found if each.low is not None and each.high is not None
    ]
    pairs = list(combinations(ends, 2))
    disjoint = sum(one[1] < other[0] or other[1] < one[0] for one, other in pairs)
    widths = [(high - low) / (high + low) for low, high in ends]
    return float(np.mean(widths)) if widths else float("nan"), f"{disjoint}/{len(pairs)}"


def report(name: str, windows: Sequence[Energy]) -> None:
    """A line of the table."""
    joules, watts, difference, seconds = (
        np.array([value(each, figure) for each in windows])
        for figure in (
            "per_call_joules",
            "power_mean_watts",
            "integral_difference",
            "window_seconds",
        )
    )
    meter = windows[-1].facts["meters"][0]
    spread, deviation = (
        (joules.max() - joules.min()) / joules.mean(),
        joules.std(ddof=1) / joules.mean(),
    )
    told = f"{watts.mean():9.1f} {joules.mean():12.6g} {deviation:8.2%} {spread:8.2%}"
    half_width, disjoint = apart(windows)
    told += f" {half_width:8.2%} {disjoint:>8} {abs(difference).max():8.2%} {seconds.mean():8.3f}"
    tick, query = meter["tick_seconds"] or float("nan"), meter["query_seconds"]
    print(f"{name:<18} {told} {tick * 1e3:8.1f} {query * 1e3:8.2f}", flush=True)
    for code in dict.fromkeys(doubt.code for each in windows for doubt in each.doubts):
        print(f"{'':<18} doubt: {code}")


def by_plateau(device: Device, found: DeviceMeters, settings: argparse.Namespace) -> None:
    """Print a line for each load and plateau."""
    plateaus = sorted(settings.plateaus)
    rules = [
        rules_for(window_seconds=settings.seconds, rules=Rules(plateau_seconds=seconds))
        for seconds in plateaus
    ]
    procedures = [EnergyProcedure(device=device, detected=found, rules=each) for each in rules]
    for procedure in procedures:
        procedure.idle()
    print(f"{'load':<18} {'plateau s':>9} {'J/call':>12} {'dev.':>8} {'over the longest':>17}")
    for name, call in loads(device.identifier).items():
        measured: dict[float, list[float]] = {seconds: [] for seconds in plateaus}
        for _ in range(settings.windows):
            for seconds, procedure in zip(plateaus, procedures, strict=True):
                device.synchronize()
                time.sleep(_PAUSE_SECONDS)
                work(call, device, _BEFORE_SECONDS)
                measured[seconds].append(
                    value(procedure.measure(call, images_per_call=1), "per_call_joules")
                )
        longest = np.mean(measured[plateaus[-1]])
        for seconds, joules in measured.items():
            deviation = np.std(joules, ddof=1) / np.mean(joules)
            told = (
                f"{np.mean(joules):12.6g} {deviation:8.2%} {np.mean(joules) / longest - 1:+17.2%}"
            )
            print(f"{name:<18} {seconds:9.2f} {told}", flush=True)


def work(call: Callable[[], object], device: Device, seconds: float) -> None:
    """Calls for so long, the device never far behind."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(10):
            call()
        device.synchronize()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="least length of a window")
    parser.add_argument(
        "--plateaus", type=float, nargs="+", help="lengths that are compared, seconds"
    )
    settings = parser.parse_args()
    device = device_here()
    device.start()
    found = device.meters()
    print(device.name)
    for finding in findings(try_meters(found)):
        print(f"  {finding.verdict}: {finding.check}: {finding.found}")
    if not found.meters:
        return
    procedure = EnergyProcedure(
        device=device, detected=found, rules=rules_for(window_seconds=settings.seconds)
    )
    with torch.inference_mode():
        idle = procedure.idle()
        print(f"  idle: {idle.mean_watts.value if idle else None} W")
        if settings.plateaus:
            by_plateau(device, found, settings)
            return
        titles = ("dev.", "spread", "±", "disjoint", "apart", "window s", "tick ms", "query ms")
        print(f"{'load':<18} {'W':>9} {'J/call':>12} {' '.join(f'{title:>8}' for title in titles)}")
        for name, call in loads(device.identifier).items():
            call()
            report(
                name, [procedure.measure(call, images_per_call=1) for _ in range(settings.windows)]
            )


if __name__ == "__main__":
    main()
