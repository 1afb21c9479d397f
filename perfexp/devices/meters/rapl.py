"""RAPL: energy counters for CPU packages and their memory, through Linux's powercap.

Each counter is a zone, a folder such as `intel-rapl:0`. Source: the kernel's
Documentation/power/powercap/powercap.rst. AMD CPUs appear under Intel's names.
"""

from __future__ import annotations

from pathlib import Path

from perfexp.devices.meters import DeviceMeters, Meter, PowerKind, Reading, none_because

#: Linux's zone folder.
POWERCAP = Path("/sys/class/powercap")
#: The registers change about every millisecond. Source: Intel SDM volume 3, chapter "Platform
#: Specific Power Management Support"; for AMD, the kernel's Documentation/hwmon/amd_energy.rst.
_TICK_SECONDS = 1e-3
_PERMISSION = (
    "since CVE-2020-8694 only root may; as root: chmod a+r {pattern}/energy_uj, until the next "
    "restart; in a container also mount /sys/class/powercap and /sys/devices/virtual/powercap"
)
_NO_ZONES = (
    "{folder} shows no zone of RAPL: virtual machines and ARM have none, containers hide it, and "
    "on Linux the module intel_rapl_msr may not be loaded (modprobe intel_rapl_msr)"
)


class RaplMeter(Meter):
    """A zone with its own folder: a package, or its memory."""

    power_kind = PowerKind.absent
    tick_seconds = _TICK_SECONDS
    wrap_joules: float | None = None

    def __init__(self, folder: Path, covers: str) -> None:
        self._energy = folder / "energy_uj"
        self.name, self.covers = f"rapl {folder.name}", covers
        microjoules = _text(folder / "max_energy_range_uj")
        if microjoules.isdecimal() and int(microjoules):
            self.wrap_joules = int(microjoules) * 1e-6

    def energy_joules(self) -> Reading:
        """Return the counter in joules, or why it cannot be read; the kernel counts microjoules."""
        try:
            return Reading(int(self._energy.read_text()) * 1e-6)
        except PermissionError:
            pattern = self._energy.parent.parent / "*rapl:*"
            return Reading(
                None, f"{self._energy} can't be read: {_PERMISSION.format(pattern=pattern)}"
            )
        except (OSError, ValueError) as error:
            return Reading(None, f"{self._energy} can't be read: {error}")

    def power_watts(self) -> Reading:
        """Return no power, with the reason."""
        return Reading(None, "RAPL has an energy counter and no power sensor")


def find(powercap: Path = POWERCAP) -> DeviceMeters:
    """Return meters for the packages and, if there are zones for it, their memory.

    Without zones, or if one is not readable, return the reason. A package includes its sub-zones
    `core` and `uncore`; `dram` is separate. `psys`, available on some platforms, includes
    everything and is not added.
    """
    meters: list[Meter] = []
    for package in _packages(powercap):
        named = _text(package / "name")
        meters.append(RaplMeter(package, f"{named} with everything that runs on it"))
        for zone in sorted(powercap.glob(f"{package.name}:*"), key=_numbers):
            if _text(zone / "name") == "dram" and _numbers(zone)[:-1] == _numbers(package):
                meters.append(RaplMeter(zone, f"the memory of {named}"))
    if not meters:
        return none_because(_NO_ZONES.format(folder=powercap))
    for meter in meters:
        reading = meter.energy_joules()
        if reading.value is None:
            return none_because(reading.reason)
    return DeviceMeters(meters=tuple(meters))


def _packages(powercap: Path) -> list[Path]:
    """Return the zones of whole packages.

    A package may appear twice, through registers and through memory (`intel-rapl-mmio`). It is
    returned once, preferably with its registers.
    """
    zones: dict[str, Path] = {}
    candidates = sorted(
        powercap.glob("*rapl*:*"), key=lambda zone: ("mmio" in zone.name, _numbers(zone))
    )
    for zone in candidates:
        if zone.name.count(":") == 1 and _text(zone / "name").startswith("package"):
            zones.setdefault(_text(zone / "name"), zone)
    return list(zones.values())


def _numbers(zone: Path) -> list[int]:
    """Return a zone's numbers: `intel-rapl:0:1` → [0, 1]."""
    return [int(part) if part.isdecimal() else -1 for part in zone.name.split(":")[1:]]


def _text(path: Path) -> str:
    """Return a file's content without surrounding space; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
