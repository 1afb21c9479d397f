"""Judge the detected devices, and whether the requested one is among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfexp.diagnosis import Choice, Facts, Finding, fail, ok, part, untested, warn
from perfexp.diagnosis.software import build_name
from perfexp.host import gpu_sheets
from perfexp.host.gpu_sheets import GpuFacts, GpuFile
from perfexp.records import units


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Device of a choice on this machine.

    Attributes:
        kind: `cuda`, `cpu`, `mps`, `fake`, or None for no device.
        name: product name, or the reason for no device.
        device: the survey's facts of a CUDA device.
        file: name of the matching file of conf/gpu.
    """

    kind: str | None
    name: str
    device: Mapping[str, Any] | None = None
    file: str | None = None

    @property
    def lock_name(self) -> str | None:
        """Name of its lock; None without a lock."""
        return str(self.device["uuid"]) if self.device else "cpu" if self.kind == "cpu" else None


def choose(facts: Facts, choice: Choice) -> Chosen:
    """The device on which a job would measure."""
    if choice.name == "fake":
        return Chosen(kind="fake", name="a scripted device")
    if choice.name == "mps":
        return Chosen(kind="mps", name="Apple's GPU") if part(facts, "mps").get("available") else _none(facts, choice)
    # without torch's answer, the CPU is not known to be the best device
    if choice.name == "auto" and not _are_known(facts):
        return _none(facts, choice)
    device = next((device for device in cuda_devices(facts) if device["index"] == choice.index), None)
    if choice.name == "cpu" or (choice.name == "auto" and device is None):
        return Chosen(kind="cpu", name=facts["machine"]["cpu"]["name"])
    if device is None or (choice.name != "auto" and not _files(facts)[choice.name].is_of(device["name"])):
        return _none(facts, choice)
    return Chosen(kind="cuda", name=device["name"], device=device, file=_file_of(facts, device["name"]))


def findings(facts: Facts, choice: Choice, chosen: Chosen) -> Iterator[Finding]:
    """The choice first, then all devices."""
    yield _choice(facts, choice, chosen)
    error = part(facts, "cuda").get("error")
    if error and not part(facts, "torch").get("error"):
        yield warn("CUDA devices", f"can't be listed: {error}", "try nvidia-smi, and another build of torch")
    for device in cuda_devices(facts):
        yield _cuda(facts, device)
    yield from _unusable(facts)
    if part(facts, "mps").get("available"):
        yield untested("Apple's GPU", "found; this version of perfexp does not measure it", "gpu=cpu measures the CPU")
    cpu = facts["machine"]["cpu"]
    memory = units.format_bytes(facts["machine"]["memory_bytes"])
    yield ok("CPU", f"{cpu['name']}, {cpu['cores'] or 'unknown'} cores ({cpu['logical_cores']} logical), {memory}")


def cuda_devices(facts: Facts) -> Sequence[Mapping[str, Any]]:
    """Devices with a torch name `cuda:N`."""
    devices: Sequence[Mapping[str, Any]] = part(facts, "cuda").get("devices", ())
    return devices


def board_of(facts: Facts, device: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """NVML's facts of a CUDA device; None if NVML has no board with its UUID."""
    uuid = str(device["uuid"]).removeprefix("GPU-")
    boards = part(facts, "boards").get("boards", ())
    return next((board for board in boards if board["uuid"].removeprefix("GPU-") == uuid), None)


def _none(facts: Facts, choice: Choice) -> Chosen:
    """No device, with the requested and the existing ones in the job's own words."""
    wanted = {"mps": "Apple's GPU", "auto": "the best device"}.get(choice.name)
    wanted = wanted or facts["gpu_files"][choice.name]["product"] or "a CUDA device"
    if not _are_known(facts):
        return Chosen(kind=None, name=f"asks for {wanted}; torch could not list the devices of this machine")
    here = ", ".join(f"{device['name']} (cuda:{device['index']})" for device in cuda_devices(facts))
    here = here or f"{facts['machine']['cpu']['name']}, with 0 CUDA devices"
    return Chosen(kind=None, name=f"asks for {wanted}; here is: {here}")


def _are_known(facts: Facts) -> bool:
    return "devices" in part(facts, "cuda")


def _choice(facts: Facts, choice: Choice, chosen: Chosen) -> Finding:
    check = f"gpu={choice.name}" + (f" gpu.index={choice.index}" if choice.index else "")
    if chosen.kind is None:
        remedy = "choose gpu=auto, another gpu.index, or the machine that has it"
        return fail(
            check, chosen.name, remedy if _are_known(facts) else "fix the failures above, then repeat the command"
        )
    if chosen.kind == "mps":
        return fail(check, "Apple's GPU is here, but this version of perfexp does not measure it", "gpu=cpu")
    if chosen.kind == "fake":
        return warn(check, "a scripted device: every time is simulated", "gpu=auto")
    if chosen.kind == "cpu" and choice.name == "auto" and choice.index:
        return warn(check, f"there is no cuda:{choice.index}: {chosen.name}", "another gpu.index")
    if part(facts, "torch").get("rocm") and chosen.device:
        return untested(check, f"{chosen.name}: ROCm has not been tried")
    return ok(check, f"{chosen.name}{f' (cuda:{choice.index})' if chosen.device else ''}")


def _cuda(facts: Facts, device: Mapping[str, Any]) -> Finding:
    """A device, with the file of conf/gpu that has its data sheet."""
    rocm = bool(part(facts, "torch").get("rocm"))
    capability = [] if rocm else [f"compute capability {device['compute_capability']}"]
    description = [device["name"], units.format_bytes(device["memory_bytes"]), *capability, f"UUID {device['uuid']}"]
    check, file = f"cuda:{device['index']}", _file_of(facts, device["name"])
    observation = "; ".join(
        [", ".join(description), f"conf/gpu/{file}.yaml" if file else "no file of conf/gpu matches it"]
    )
    remedy = "" if file else "gpu=auto measures it; add conf/gpu/NAME.yaml for its peaks"
    if rocm:
        return untested(check, f"{observation}; ROCm has not been tried", remedy)
    return ok(check, observation) if file else warn(check, observation, remedy)


def _unusable(facts: Facts) -> Iterator[Finding]:
    """Boards of the driver that torch cannot use."""
    boards, devices = part(facts, "boards").get("boards", ()), cuda_devices(facts)
    torch, reason = part(facts, "torch"), part(facts, "cuda").get("reason")
    if not torch or torch.get("error") or not part(facts, "cuda"):
        return
    if boards and not devices:
        observation = f"the driver shows {_counted(boards)}, torch ({build_name(torch)}) can use none"
        remedy = (
            "check CUDA_VISIBLE_DEVICES and the driver's version"
            if torch.get("cuda")
            else "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        )
        yield warn("CUDA devices", f"{observation}{f': {reason}' if reason else ''}", remedy)
    elif torch.get("cuda") and not devices:
        yield warn("CUDA devices", f"none: {reason or 'torch finds none'}", "on a cluster: run it in a job with a GPU")
    elif len(devices) < len(boards):
        yield ok("boards", f"the driver shows {_counted(boards)}, torch may use {len(devices)}")


def _counted(boards: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(sorted({board["name"] for board in boards}))
    return f"{len(boards)} board{'' if len(boards) == 1 else 's'} ({names})"


def _file_of(facts: Facts, name: str) -> str | None:
    return gpu_sheets.matching(_files(facts), name)


def _files(facts: Facts) -> dict[str, GpuFile]:
    return {name: GpuFile(match=file["match"], facts=GpuFacts()) for name, file in facts["gpu_files"].items()}
