"""Devices: those that were found, and whether the one that is asked for is among them."""

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
    """What a choice comes to on this machine.

    Attributes:
        kind: `cuda`, `cpu`, `mps`, `fake`, or None where it comes to nothing.
        name: what the driver or the system calls it; why there is none.
        device: the survey's facts of a CUDA device.
        file: name of the file of conf/gpu that matches it.
    """

    kind: str | None
    name: str
    device: Mapping[str, Any] | None = None
    file: str | None = None

    @property
    def lock_name(self) -> str | None:
        """Name of its lock; None where it needs none."""
        return str(self.device["uuid"]) if self.device else "cpu" if self.kind == "cpu" else None


def choose(facts: Facts, choice: Choice) -> Chosen:
    """The device that a job would measure on.

    Args:
        facts: of the machine.
        choice: what is asked for.
    """
    if choice.name == "fake":
        return Chosen(kind="fake", name="a scripted device")
    if choice.name == "mps":
        return Chosen(kind="mps", name="Apple's GPU") if part(facts, "mps").get("available") else _none(facts, choice)
    if choice.name == "auto" and not _are_known(facts):
        return _none(facts, choice)
    device = next((device for device in cuda_devices(facts) if device["index"] == choice.index), None)
    if choice.name == "cpu" or (choice.name == "auto" and device is None):
        return Chosen(kind="cpu", name=facts["machine"]["cpu"]["name"])
    if device is None or (choice.name != "auto" and not _files(facts)[choice.name].is_of(device["name"])):
        return _none(facts, choice)
    return Chosen(kind="cuda", name=device["name"], device=device, file=_file_of(facts, device["name"]))


def findings(facts: Facts, choice: Choice, chosen: Chosen) -> Iterator[Finding]:
    """The choice first, then all devices.

    Args:
        facts: of the machine.
        choice: what is asked for.
        chosen: what it comes to.
    """
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
    """What torch calls `cuda:N`.

    Args:
        facts: of the machine.
    """
    devices: Sequence[Mapping[str, Any]] = part(facts, "cuda").get("devices", ())
    return devices


def board_of(facts: Facts, device: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What NVML says of a CUDA device; None where it knows none of that UUID.

    Args:
        facts: of the machine.
        device: the survey's facts of it.
    """
    uuid = str(device["uuid"]).removeprefix("GPU-")
    boards = part(facts, "boards").get("boards", ())
    return next((board for board in boards if board["uuid"].removeprefix("GPU-") == uuid), None)


def _none(facts: Facts, choice: Choice) -> Chosen:
    """What is asked for and what is here, as the job itself would say it."""
    wanted = {"mps": "Apple's GPU", "auto": "the best device"}.get(choice.name)
    wanted = wanted or facts["gpu_files"][choice.name]["product"] or "a CUDA device"
    if not _are_known(facts):
        return Chosen(kind=None, name=f"asks for {wanted}; torch could not be asked which devices are here")
    here = ", ".join(f"{device['name']} (cuda:{device['index']})" for device in cuda_devices(facts))
    here = here or f"{facts['machine']['cpu']['name']}, with 0 CUDA devices"
    return Chosen(kind=None, name=f"asks for {wanted}; here is: {here}")


def _are_known(facts: Facts) -> bool:
    """Whether torch could be asked for its devices."""
    return "devices" in part(facts, "cuda")


def _choice(facts: Facts, choice: Choice, chosen: Chosen) -> Finding:
    check = f"gpu={choice.name}" + (f" gpu.index={choice.index}" if choice.index else "")
    if chosen.kind is None:
        remedy = "choose gpu=auto, another gpu.index, or the machine that has it"
        return fail(check, chosen.name, remedy if _are_known(facts) else "mend what failed above, then ask again")
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
    what = [device["name"], units.format_bytes(device["memory_bytes"]), *capability, f"UUID {device['uuid']}"]
    check, file = f"cuda:{device['index']}", _file_of(facts, device["name"])
    found = "; ".join([", ".join(what), f"conf/gpu/{file}.yaml" if file else "no file of conf/gpu matches it"])
    remedy = "" if file else "gpu=auto measures it; add conf/gpu/NAME.yaml for its peaks"
    if rocm:
        return untested(check, f"{found}; ROCm has not been tried", remedy)
    return ok(check, found) if file else warn(check, found, remedy)


def _unusable(facts: Facts) -> Iterator[Finding]:
    """Boards that the driver shows and torch can't use, or fewer of them."""
    boards, devices = part(facts, "boards").get("boards", ()), cuda_devices(facts)
    torch, reason = part(facts, "torch"), part(facts, "cuda").get("reason")
    if not torch or torch.get("error") or not part(facts, "cuda"):
        return
    if boards and not devices:
        what = f"the driver shows {_counted(boards)}, torch ({build_name(torch)}) can use none"
        remedy = (
            "look at CUDA_VISIBLE_DEVICES and at the driver's version"
            if torch.get("cuda")
            else "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        )
        yield warn("CUDA devices", f"{what}{f': {reason}' if reason else ''}", remedy)
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
