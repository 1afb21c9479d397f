"""Verdicts on detected devices, on the requested device, and on a CUDA device's state.

`whole.diagnose` calls `choose` for the device that a run would use, then `device_findings`, and for
a CUDA device `state_findings`. A *board* is the driver's (NVML's) view of a GPU, a *device* is
torch's view; they are matched by UUID.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from perfexp.devices.nvml import is_used, neighbours
from perfexp.doctor import Choice, Facts, Finding, fail, missing, ok, part, untested, warn, warn_if
from perfexp.doctor.software import build_name
from perfexp.host import gpu_sheets
from perfexp.host.gpu_sheets import GpuFacts, GpuFile
from perfexp.records import units

#: Tolerated relative difference between measured clock and driver clock, read a moment apart.
_CLOCK_TOLERANCE = 0.05
#: A power limit below this share of the data sheet's power gives a warning.
_POWER_SHARE = 0.98


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The device that a run would use.

    Attributes:
        kind: `cuda`, `cpu`, `mps` or `fake`; None without a device.
        name: device name, or the reason for having no device.
        device: the survey's facts about a CUDA device.
        file: name of the matching file in conf/gpu.
    """

    kind: str | None
    name: str
    device: Mapping[str, Any] | None = None
    file: str | None = None

    @property
    def lock_name(self) -> str | None:
        """Return the name of the device lock; None without a lock.

        A run holds this lock while it measures, so that no other run disturbs it.
        """
        if self.device:
            return str(self.device["uuid"])
        if self.kind in ("cpu", "mps"):
            return self.kind
        return None


def choose(facts: Facts, choice: Choice) -> Chosen:
    """Return the device that a run with this choice would use on this machine.

    `perfexp doctor` also reads this device's lock and earlier figures.
    """
    if choice.name == "fake":
        return Chosen(kind="fake", name="a scripted device")
    if choice.name == "mps":
        if not part(facts, "mps").get("available"):
            return _none(facts, choice)
        return Chosen(kind="mps", name="Apple's GPU")
    # without torch's answer, the CPU may not be the best device
    if choice.name == "auto" and not _are_known(facts):
        return _none(facts, choice)
    device = next(
        (device for device in cuda_devices(facts) if device["index"] == choice.index), None
    )
    if choice.name == "cpu" or (choice.name == "auto" and device is None):
        return Chosen(kind="cpu", name=facts["machine"]["cpu"]["name"])
    if device is None or (
        choice.name != "auto" and not _files(facts)[choice.name].is_of(device["name"])
    ):
        return _none(facts, choice)
    return Chosen(
        kind="cuda", name=device["name"], device=device, file=_file_of(facts, device["name"])
    )


def device_findings(facts: Facts, choice: Choice, chosen: Chosen) -> Iterator[Finding]:
    """Yield a finding about the choice, then findings about all devices.

    `whole.diagnose` calls it.
    """
    yield _choice(facts, choice, chosen)
    error = part(facts, "cuda").get("error")
    if error and not part(facts, "torch").get("error"):
        yield warn(
            "CUDA devices",
            f"can't be listed: {error}",
            "try nvidia-smi, and another build of torch",
        )
    for device in cuda_devices(facts):
        yield _cuda(facts, device)
    yield from _unusable(facts)
    if part(facts, "mps").get("available"):
        yield untested(
            "Apple's GPU", "found; perfexp has not been tried on one", "gpu=mps measures it"
        )
    cpu = facts["machine"]["cpu"]
    memory = units.format_bytes(facts["machine"]["memory_bytes"])
    yield ok(
        "CPU",
        f"{cpu['name']}, {cpu['cores'] or 'unknown'} cores "
        f"({cpu['logical_cores']} logical), {memory}",
    )


def cuda_devices(facts: Facts) -> Sequence[Mapping[str, Any]]:
    """Return the survey's facts about devices with a torch name `cuda:N`."""
    devices: Sequence[Mapping[str, Any]] = part(facts, "cuda").get("devices", ())
    return devices


def _none(facts: Facts, choice: Choice) -> Chosen:
    """Return that the choice has no device here, with the reason and the devices that there are."""
    requirement = {"mps": "Apple's GPU", "auto": "the best device"}.get(choice.name)
    requirement = requirement or facts["gpu_files"][choice.name]["product"] or "a CUDA device"
    if not _are_known(facts):
        return Chosen(
            kind=None,
            name=f"asks for {requirement}; torch could not list the devices of this machine",
        )
    devices = ", ".join(
        f"{device['name']} (cuda:{device['index']})" for device in cuda_devices(facts)
    )
    devices = devices or f"{facts['machine']['cpu']['name']}, with 0 CUDA devices"
    return Chosen(kind=None, name=f"asks for {requirement}; here is: {devices}")


def _are_known(facts: Facts) -> bool:
    """Return whether the survey has listed the CUDA devices, even if there are none."""
    return "devices" in part(facts, "cuda")


def _choice(facts: Facts, choice: Choice, chosen: Chosen) -> Finding:
    """Return whether the requested device exists and has been tested with perfexp."""
    check = f"gpu={choice.name}"
    if choice.index:
        check += f" gpu.index={choice.index}"
    if chosen.kind is None:
        remedy = "choose gpu=auto, another gpu.index, or the machine that has it"
        if not _are_known(facts):
            remedy = "fix the failures above, then repeat the command"
        return fail(check, chosen.name, remedy)
    if chosen.kind == "mps":
        return untested(check, "Apple's GPU: perfexp has not been tried on one")
    if chosen.kind == "fake":
        return warn(check, "a scripted device: every time is simulated", "gpu=auto")
    if chosen.kind == "cpu" and choice.name == "auto" and choice.index:
        return warn(check, f"there is no cuda:{choice.index}: {chosen.name}", "another gpu.index")
    if part(facts, "torch").get("rocm") and chosen.device:
        return untested(check, f"{chosen.name}: ROCm has not been tried")
    index_text = f" (cuda:{choice.index})" if chosen.device else ""
    return ok(check, f"{chosen.name}{index_text}")


def _cuda(facts: Facts, device: Mapping[str, Any]) -> Finding:
    """Return a finding about one CUDA device: facts, and the file of conf/gpu that describes it."""
    rocm = part(facts, "torch").get("rocm")
    check = f"cuda:{device['index']}"
    observation = f"{device['name']}, {units.format_bytes(device['memory_bytes'])}, "
    if not rocm:
        observation += f"compute capability {device['compute_capability']}, "
    observation += f"UUID {device['uuid']}; "
    file = _file_of(facts, device["name"])
    if file:
        observation += f"conf/gpu/{file}.yaml"
        remedy = ""
    else:
        observation += "no file of conf/gpu matches it"
        remedy = "gpu=auto measures it; add conf/gpu/NAME.yaml for its peaks"
    if rocm:
        return untested(check, f"{observation}; ROCm has not been tried", remedy)
    return warn_if(not file, check, observation, remedy)


def _unusable(facts: Facts) -> Iterator[Finding]:
    """Yield a finding about boards that the driver shows and torch cannot use.

    Without torch's answer there is none.
    """
    boards, devices = part(facts, "boards").get("boards", ()), cuda_devices(facts)
    torch, reason = part(facts, "torch"), part(facts, "cuda").get("reason")
    if not torch or torch.get("error") or not part(facts, "cuda"):
        return
    if boards and not devices:
        observation = (
            f"the driver shows {_counted(boards)}, torch ({build_name(torch)}) can use none"
        )
        if reason:
            observation += f": {reason}"
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        if torch.get("cuda"):
            remedy = "check CUDA_VISIBLE_DEVICES and the driver's version"
        yield warn("CUDA devices", observation, remedy)
    elif torch.get("cuda") and not devices:
        yield warn(
            "CUDA devices",
            f"none: {reason or 'torch finds none'}",
            "on a cluster: run it in a job with a GPU",
        )
    elif len(devices) < len(boards):
        yield ok("boards", f"the driver shows {_counted(boards)}, torch may use {len(devices)}")


def _counted(boards: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of boards with their names, for example `2 boards (NVIDIA L40S)`."""
    names = ", ".join(sorted({board["name"] for board in boards}))
    return f"{units.counted(len(boards), 'board')} ({names})"


def _file_of(facts: Facts, name: str) -> str | None:
    """Return the name of the file in conf/gpu that matches a product name; None without one."""
    return gpu_sheets.matching(_files(facts), name)


def _files(facts: Facts) -> dict[str, GpuFile]:
    """Return the patterns of the files in conf/gpu, by name, without their facts."""
    return {
        name: GpuFile(match=file["match"], facts=GpuFacts())
        for name, file in facts["gpu_files"].items()
    }


def state_findings(facts: Facts, chosen: Chosen) -> Iterator[Finding]:
    """Yield findings about the chosen CUDA device's state.

    They cover driver, clocks, throttling, temperature, power, other users, MIG slices, ECC and
    NVML.
    """
    clocks = part(facts, "clocks")
    if part(facts, "torch").get("rocm"):
        yield from _clocks(clocks, {})
        return
    board = board_of(facts, chosen)
    yield _driver(facts, board)
    yield from _clocks(clocks, board or {})
    if board is None:
        yield _no_board(facts)
        return
    yield from _heat_and_power(
        board, clocks.get("busy", {}), facts["gpu_files"].get(chosen.file, {})
    )
    yield from _sharing(board["facts"], board["state"])
    yield ok(
        "ECC", {True: "on", False: "off", None: "this board has none"}[board["facts"].get("ecc")]
    )
    yield ok("NVML", "answers")


def board_of(facts: Facts, chosen: Chosen) -> Mapping[str, Any] | None:
    """Return the driver's facts about the chosen CUDA device; None if it reports none.

    `state_findings` checks them; the history of a device needs its driver version.
    """
    if chosen.device:
        uuid = str(chosen.device["uuid"]).removeprefix("GPU-")
        for board in part(facts, "boards").get("boards", ()):
            if board["uuid"].removeprefix("GPU-") == uuid:
                return cast(Mapping[str, Any], board)
    return None


def _driver(facts: Facts, board: Mapping[str, Any] | None) -> Finding:
    """Return the versions of driver, CUDA and cuDNN; a warning without cuDNN."""
    torch = part(facts, "torch")
    driver = (board or {}).get("facts", {}).get("driver") or "unknown"
    observation = f"driver {driver}, CUDA {torch['cuda']}"
    if not torch["cudnn"]:
        return warn(
            "CUDA",
            f"{observation}, no cuDNN",
            "convolutions are slow without it: install torch with cuDNN",
        )
    # 90100 is version 9.1.0, 8902 is 8.9.2
    major, minor_patch = divmod(torch["cudnn"], 10_000 if torch["cudnn"] >= 90_000 else 1_000)
    return ok("CUDA", f"{observation}, cuDNN {major}.{minor_patch // 100}.{minor_patch % 100}")


def _clocks(clocks: Mapping[str, Any], board: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings from `try_clocks`: kernels run, event clock, and clock canary."""
    if not clocks:  # the survey's own finding says why
        return
    if error := clocks.get("error"):
        remedy = (
            "try nvidia-smi; a build of torch for this compute capability: "
            "https://pytorch.org/get-started/locally"
        )
        yield fail("kernels", f"the device runs none: {error}", remedy)
        return
    if reason := clocks.get("not_tried"):
        yield warn("kernels", f"not tried: {reason}", "repeat when the device is free")
        return
    tick = units.format_seconds(clocks["event_tick_seconds"], 2)
    record = units.format_seconds(clocks["record_seconds"], 2)
    yield ok("event clock", f"tick {tick}, a record costs {record}")
    yield _canary(clocks, board)


def _canary(clocks: Mapping[str, Any], board: Mapping[str, Any]) -> Finding:
    """Compare the clock that a calibration kernel measured (the canary) with the driver's."""
    spin, reported = clocks["canary_hertz"], clocks["busy"].get("sm_clock_hertz")
    if reported is None:
        return ok("clock canary", f"{_megahertz(spin)}; no clock of the driver's to compare with")
    highest = board.get("facts", {}).get("max_sm_clock_hertz")
    observation = f"{_megahertz(spin)}, the driver reports {_megahertz(reported)}"
    if highest:
        observation += f" of at most {_megahertz(highest)}"
    remedy = "the clock varies: repeat when the device is idle and cool"
    return warn_if(abs(spin / reported - 1) > _CLOCK_TOLERANCE, "clock canary", observation, remedy)


def _no_board(facts: Facts) -> Finding:
    """Return why the driver reports nothing about the chosen device."""
    boards = part(facts, "boards")
    if error := boards.get("error"):
        return missing(
            "NVML",
            f"does not answer: {error}",
            "pip install nvidia-ml-py, and the driver's libnvidia-ml",
        )
    observation, remedy = "shows no board with this UUID", "check nvidia-smi -L"
    if any(board["facts"].get("mig") for board in boards.get("boards", ())):
        observation += "; MIG is on, and slices have identities of their own"
        remedy = "state, power and energy stay unknown; measure on a whole board"
    return warn("NVML", observation, remedy)


def _heat_and_power(
    board: Mapping[str, Any], busy: Mapping[str, Any], sheet: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield findings about throttling, temperature and power limit.

    Args:
        busy: state under load; empty if the clocks were not tried.
        sheet: facts from the matching file in conf/gpu.
    """
    busy = busy or board["state"]  # throttling only shows under load
    reasons, celsius = busy.get("throttling"), busy.get("temperature_celsius")
    if reasons is None:
        yield _not_reported("throttling")
    else:
        remedy = "let it cool, check its power limit (nvidia-smi -q -d PERFORMANCE), then repeat"
        observation = f"slowed down by: {', '.join(reasons)}" if reasons else "none"
        yield warn_if(bool(reasons), "throttling", observation, remedy)
    yield _not_reported("temperature") if celsius is None else ok("temperature", f"{celsius} °C")
    watts, limit = board["state"].get("power_watts"), board["facts"].get("power_limit_watts")
    sheet_watts = sheet.get("power_watts") or 0.0
    if limit is None:
        yield _not_reported("power limit")
        return
    is_lower = limit < _POWER_SHARE * sheet_watts
    observation = f"{limit:.0f} W"
    if watts is not None:
        observation += f"; {watts:.0f} W now"
    if is_lower:
        observation += f"; the data sheet has {sheet_watts:.0f} W"
    yield warn_if(is_lower, "power limit", observation, "figures are those of this limit")


def _not_reported(check: str) -> Finding:
    return missing(check, "not reported by the driver", "a newer driver may")


def _sharing(facts: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings about MIG slices and other users of the board.

    The state was read before the survey itself used the device.
    """
    if seen := neighbours(state):
        remedy = "measure when nobody else uses the device (nvidia-smi shows who)"
        yield warn_if(is_used(state), "neighbours", ", ".join(seen), remedy)
    else:
        yield missing(
            "neighbours", "the driver does not report who uses the device", "run nvidia-smi as root"
        )
    if facts.get("mig"):
        remedy = (
            "measure on a whole board, or read the figures as those of the slice and its neighbours"
        )
        yield warn("MIG", "on: slices share the board's power and clocks", remedy)
    else:
        yield ok("MIG", "off" if facts.get("mig") is False else "this board has none")


def _megahertz(hertz: float) -> str:
    return f"{hertz * 1e-6:.0f} MHz"
