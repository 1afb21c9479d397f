"""NVIDIA board state from NVML, the driver's management library. An unanswered query gives None.

A board is a whole GPU. These queries need no CUDA context, so the parent process can use them, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from perfexp.devices import Conditions
from perfexp.devices.meters import PowerKind
from perfexp.devices.meters.boards import NvmlMeter, answer, initialized

#: Bits of throttle reasons that slow a loaded device, without idle, application clocks and
#: sync boost. Source: nvml.h, nvmlClocksEventReason….
_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slow-down",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
#: Counters of time with reduced clocks, nanoseconds. Source: nvml.h, NVML_FI_DEV_PERF_POLICY_….
#: `LOW_UTILIZATION` and the totals are left out because they also count an idle device.
_POLICIES = {
    "POWER": "power cap",
    "THERMAL": "thermal",
    "BOARD_LIMIT": "board limit",
    "SYNC_BOOST": "sync boost",
    "RELIABILITY": "voltage reliability",
}
#: Facts that affect speed and differ between equal boards or from day to day.
_LIMITS = (
    "driver",
    "power_limit_watts",
    "max_sm_clock_hertz",
    "max_memory_clock_hertz",
    "application_clock_hertz",
    "auto_boost",
    "ecc",
    "mig",
)
#: Maximum utilization of an unused board, percent.
_BUSY_PERCENT = 5


class Board:
    """One board, by torch's UUID, with or without the prefix `GPU-`."""

    def __init__(self, uuid: str) -> None:
        self._nvml = initialized()
        bare = uuid.removeprefix("GPU-")
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}")

    def facts(self) -> dict[str, Any]:
        """Return constant facts, in watts, hertz and bytes, as JSON values for the record."""
        nvml, query = self._nvml, self._query
        clocks = [
            query(f"{kind}Clock", nvml.NVML_CLOCK_SM, unit=1e6)
            for kind in ("Applications", "DefaultApplications")
        ]
        is_changed = None
        if None not in clocks:
            is_changed = clocks[0] != clocks[1]
        persistence = query("PersistenceMode")
        return {
            "driver": answer(nvml, nvml.nvmlSystemGetDriverVersion),
            "power_limit_watts": query("EnforcedPowerLimit", unit=1e-3),
            "max_sm_clock_hertz": query("MaxClockInfo", nvml.NVML_CLOCK_SM, unit=1e6),
            "max_memory_clock_hertz": query("MaxClockInfo", nvml.NVML_CLOCK_MEM, unit=1e6),
            "application_clock_hertz": clocks[0],
            # the driver does not report the limits of nvidia-smi --lock-gpu-clocks
            "application_clock_changed": is_changed,
            "auto_boost": _flag(query("AutoBoostedClocksEnabled")),
            "persistence": None if persistence is None else bool(persistence),
            "vbios": query("VbiosVersion"),
            "numa_node": _numa_node(getattr(query("PciInfo"), "busId", None)),
            "ecc": _flag(query("EccMode")),
            "mig": _flag(query("MigMode")),
            "pcie_generation": query("CurrPcieLinkGeneration"),
            "pcie_width": query("CurrPcieLinkWidth"),
        }

    def limits(self) -> dict[str, Any]:
        """Return the facts that limit a board's speed. The driver does not report locked clocks."""
        facts = self.facts()
        return {name: facts[name] for name in _LIMITS}

    def state(self) -> dict[str, Any]:
        """Return current clocks, temperature, power, throttling and the number of processes.

        Processes are counted if they have a context on the board.
        """
        nvml, query = self._nvml, self._query
        processes = query("ComputeRunningProcesses")
        return {
            "sm_clock_hertz": query("ClockInfo", nvml.NVML_CLOCK_SM, unit=1e6),
            "memory_clock_hertz": query("ClockInfo", nvml.NVML_CLOCK_MEM, unit=1e6),
            "temperature_celsius": query("Temperature", nvml.NVML_TEMPERATURE_GPU),
            "power_watts": query("PowerUsage", unit=1e-3),
            "throttling": self._throttling(),
            "processes": None if processes is None else len(processes),
            "utilization_percent": getattr(query("UtilizationRates"), "gpu", None),
        }

    def conditions(self) -> Conditions:
        """Return throttle counters and temperature.

        A board without counters reports its current throttle reasons.
        """
        nvml = self._nvml
        fields = [getattr(nvml, f"NVML_FI_DEV_PERF_POLICY_{policy}") for policy in _POLICIES]
        # one call for all counters, because a call takes a millisecond
        counters = self._query("FieldValues", fields) or ()
        throttled_ns = {
            name: int(counter.value.ullVal)
            for name, counter in zip(_POLICIES.values(), counters, strict=False)
            if counter.nvmlReturn == nvml.NVML_SUCCESS
        }
        reasons = None if throttled_ns else self._throttling()
        temperature = self._query("Temperature", nvml.NVML_TEMPERATURE_GPU)
        return Conditions(throttled_ns or None, reasons, temperature)

    def load_queries(self) -> dict[str, Callable[[], float | None]]:
        """Return queries for the clock (hertz) and the power (watts) that this board answers.

        Power averaged over a second is left out, because it contains earlier work.
        """
        meter = NvmlMeter(self._nvml, self._handle, "")
        clock = partial(self._query, "ClockInfo", self._nvml.NVML_CLOCK_SM, unit=1e6)
        queries: dict[str, Callable[[], float | None]] = {"loaded_sm_clock_hertz": clock}
        if meter.power_kind is PowerKind.instantaneous:
            queries["loaded_power_watts"] = lambda: meter.power_watts().value
        return {name: query for name, query in queries.items() if query() is not None}

    def _throttling(self) -> list[str] | None:
        """Return the names of the current throttle reasons.

        None if the driver does not report them.
        """
        reasons = self._query("CurrentClocksThrottleReasons")
        if reasons is None:
            return None
        return [name for bit, name in _THROTTLES.items() if reasons & bit]

    def used_bytes(self) -> int | None:
        """Return board memory in use by any process."""
        memory = self._query("MemoryInfo")
        return None if memory is None else int(memory.used)

    def _query(self, subject: str, *arguments: Any, unit: float | None = None) -> Any:
        """Return NVML's answer about a subject, multiplied by `unit` to get SI units.

        Args:
            subject: end of the function's name, for example `PowerUsage` for
                `nvmlDeviceGetPowerUsage`.
        """
        value = answer(
            self._nvml, getattr(self._nvml, f"nvmlDeviceGet{subject}"), self._handle, *arguments
        )
        if value is None or unit is None:
            return value
        return value * unit


def is_used(state: Mapping[str, Any]) -> bool:
    """Return whether others use the board in a `Board.state` from before this process's context.

    Some drivers hide other processes; a utilization above 5 % shows them.
    """
    return bool(state.get("processes")) or (state.get("utilization_percent") or 0) > _BUSY_PERCENT


def neighbours(state: Mapping[str, Any]) -> list[str]:
    """Describe other users of the board, for example "2 other processes", "30 % busy".

    Args:
        state: `Board.state` from before this process's context.
    """
    others, busy = state.get("processes"), state.get("utilization_percent")
    words = []
    if others is not None:
        plural = "es" if others > 1 else ""
        words.append(f"{others or 'no'} other process{plural}")
    if busy is not None:
        words.append(f"{busy} % busy")
    return words


def find_board(uuid: str) -> tuple[Board | None, str]:
    """Return the board with a torch UUID, or None and the reason, such as a missing package."""
    try:
        return Board(uuid), ""
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    except Exception as error:
        return None, f"NVML does not answer: {error}"


def all_boards() -> dict[str, Any]:
    """Return all boards with facts and state, even if torch cannot use them, for `perfexp doctor`.

    Raises the same errors as `initialized`.
    """
    boards = [(identity, Board(identity["uuid"])) for identity in _identities()]
    return {
        "boards": [
            {**identity, "facts": board.facts(), "state": board.state()}
            for identity, board in boards
        ]
    }


def places() -> list[tuple[str, str]]:
    """Return each board's UUID and PCI address, as Linux writes it, in driver order.

    The local job queue finds the CPU cores near a board this way. Empty without a driver.
    """
    try:
        nvml = initialized()
        pairs = [
            (nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetPciInfo(handle).busId)
            for handle in _handles(nvml)
        ]
    except Exception:  # no library, no driver
        return []
    texts = ((uuid, bus.decode() if isinstance(bus, bytes) else bus) for uuid, bus in pairs)
    return [(str(uuid), str(bus)[-12:].lower()) for uuid, bus in texts]


def visible_names() -> list[str] | None:
    """Return the names of `visible_boards`; None if only CUDA can know them."""
    boards = visible_boards()
    return None if boards is None else [board["name"] for board in boards]


def visible_boards() -> list[dict[str, str]] | None:
    """Return `uuid` and `name` of the boards visible to this process, in CUDA's order.

    None if only CUDA can know. Raises the same errors as `initialized`. Predictions for `gpu=auto`
    use them before torch is imported.
    """
    identities = _identities()
    uuids = [identity["uuid"] for identity in identities]
    # CUDA lists MIG slices and, by default, sorts different boards by speed
    is_sliced = any(Board(uuid).facts()["mig"] for uuid in uuids)
    is_mixed = len({identity["name"] for identity in identities}) > 1
    if is_sliced or (is_mixed and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"):
        return None
    visible: list[dict[str, str]] = []
    for text in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(uuids)).split(","):
        word = text.strip()
        matching = [identity for number, identity in enumerate(identities) if word == str(number)]
        matching += [
            identity for identity in identities if word and identity["uuid"].startswith(word)
        ]
        if len(matching) != 1:  # CUDA ignores all later entries
            break
        visible += matching
    return visible


def _identities() -> list[dict[str, str]]:
    """Return each board's `uuid` and `name`, in driver order."""
    nvml = initialized()
    return [
        {"uuid": nvml.nvmlDeviceGetUUID(handle), "name": nvml.nvmlDeviceGetName(handle)}
        for handle in _handles(nvml)
    ]


def _handles(nvml: Any) -> list[Any]:
    """Return NVML's handles for all boards, in driver order."""
    return list(map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())))


def _numa_node(bus_id: str | bytes | None, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node, the part of the host's memory that is near the board.

    None if Linux reports none.

    Args:
        bus_id: NVML's bus id, for example `00000000:1B:00.0`.
    """
    name = bus_id.decode() if isinstance(bus_id, bytes) else bus_id or ""
    with suppress(OSError, ValueError):  # Linux writes the domain with four digits
        node = int((root / name[-12:].lower() / "numa_node").read_text())
        if node >= 0:  # -1 means unknown
            return node
    return None


def _flag(mode: Any) -> bool | None:
    """Return the current mode; NVML returns it together with the pending mode."""
    if mode is None:
        return None
    return bool(mode[0])
