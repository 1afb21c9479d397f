"""Profile a few calls of a run, in a separate process after all timing.

A profiled pass is another run of the same plan. It never supplies a time of the record: its results are the facts of a
separate point (`train_profile`, `inference_profile`). A missing or failing profiler costs the profile and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key

_PROFILE = "_profile"
#: Advice on a profile with fewer kernels of the backward pass than of the forward pass.
_LOST_BACKWARD = "check the timeline for another stream or process, and profile again; if it persists, please report it"
#: The range around a whole call, by its phase.
WHOLE = {"train": "train_step", "inference": "inference"}


class ProfilerFailed(PerfexpError):
    """A profile could not be made; has the reason, a remedy, and the names of partial results."""

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.files = list(files)


def profile_key(key: Key) -> Key:
    """Key of the profile of a timed point."""
    return msgspec.structs.replace(key, phase=key.phase + _PROFILE)


def profiled_key(key: Key) -> Key:
    """Key of the timed point of a profile."""
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_PROFILE))


def is_profile(key: Key) -> bool:
    """Whether a key is that of a profile."""
    return key.phase.endswith(_PROFILE)


def part_name(name: str) -> str:
    """Name of a step's segment (`perfexp.modes.Step`) in a profile."""
    return "optimizer_step" if name == "optimizer" else name


@dataclass(frozen=True, kw_only=True)
class Place:
    """Location of the files of one profile."""

    folder: Path
    stem: str

    def file(self, ending: str = "") -> Path:
        """The file with an ending after the stem (`.nsys-rep`, `_ncu.csv`)."""
        return self.folder / f"{self.stem}{ending}"


def place_of(key: Key, keys: Sequence[Key], folder: Path) -> Place:
    """Location of a profile's files: `train`, or `train_224_b64` where a run has several profiles of a phase."""
    phase = profiled_key(key).phase
    alone = sum(other.phase == key.phase for other in keys) == 1
    return Place(
        folder=folder, stem=phase if alone else f"{phase}_{key.size_label}_b{key.batch_size}"
    )


def refuse_to_overwrite(files: Sequence[Path], folder: Path, way_out: str) -> None:
    """Raise `ProfilerFailed` if a file exists that the folder's manifest does not name."""
    claimed = RunPaths(folder).claimed()
    unclaimed = [
        path.name
        for path in files
        if path.name not in claimed and (path.is_symlink() or path.exists())
    ]
    if unclaimed:
        raise ProfilerFailed(
            f"{', '.join(unclaimed)} would be overwritten, and no manifest says that a run left it: {way_out}"
        )


def why_not_cuda(kind: str, name: str, *, rocm: bool) -> str | None:
    """Why NVIDIA's tools cannot profile a device; None where they can."""
    if kind != "cuda":
        return f"nsys, ncu and NVTX need a CUDA device, not {name}: use profiler=torch"
    if rocm:
        return "nsys, ncu and NVTX need an NVIDIA device, not AMD's: use profiler=torch"
    return None


def refuse_other_devices(device: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a device known not to be NVIDIA's, before a missing tool is reported."""
    kind = str(device.get("kind"))
    why = why_not_cuda(kind, str(device.get("name") or kind), rocm=bool(device.get("rocm")))
    if why and kind in ("cpu", "mps", "cuda"):
        raise Unsupported(why)


@dataclass(frozen=True, kw_only=True)
class About:
    """Inputs of a profiler's command line; the facts of the device are empty if nothing was timed."""

    phase: str
    device: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()


@dataclass(kw_only=True)
class Found:
    """Results of a profile."""

    files: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    doubts: list[Diagnostic] = field(default_factory=list)

    def add_kernels(self, kernels: Sequence[Mapping[str, Any]], top: int) -> None:
        """Add the first kernels, and the number and the time of all."""
        self.facts |= {
            "kernels": kernels[:top],
            "kernel_names": len(kernels),
            "kernel_seconds": sum(kernel["seconds"] for kernel in kernels),
        }

    def doubt(self, reason: str, advice: str = "see run.log") -> None:
        """Report that the profile is incomplete."""
        self.doubts.append(diagnostics.make("profile_incomplete", reason=reason, advice=advice))

    def compare_passes(self, tool: str, forward: float, backward: float) -> None:
        """Report a backward pass with fewer kernels than the forward pass."""
        if backward < forward:
            lost = f"{tool} saw {forward:g} kernels of the forward pass, but only {backward:g} of the backward pass"
            self.doubt(lost, _LOST_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Named ranges, which an attached tool records; none by default."""

    range: Callable[[str], AbstractContextManager[Any]] = nullcontext


@contextmanager
def captured(device: Any) -> Iterator[Marks]:
    """While entered, tools that wait for cudaProfilerStart record; raises `Unsupported` without CUDA and NVTX."""
    import torch

    if why := why_not_cuda(device.kind, device.name, rocm=torch.version.hip is not None):
        raise Unsupported(why)
    device.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield Marks(range=_process_range)
    finally:
        device.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


@contextmanager
def _process_range(name: str) -> Iterator[None]:
    """A range of the process, which includes launches of other threads, above all the backward pass.

    A pushed range belongs to its thread, and autograd launches the backward pass from another one
    (https://docs.pytorch.org/docs/stable/generated/torch.cuda.nvtx.range_start.html).
    """
    import torch

    handle = torch.cuda.nvtx.range_start(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(handle)


@dataclass(kw_only=True)
class Profiler:
    """Base of the objects that a `profiler` node of the configuration builds.

    `chosen`, `command`, `outputs` and `collect` run in the process that waits for the worker, and must not import
    torch; `watching` and `observations` run in the worker.

    Attributes:
        times: whether the run is timed too.
        needs_nvidia: whether it profiles NVIDIA GPUs only.
    """

    name: str = "none"
    warmup: int = 20
    modules: bool = False
    all_points: bool = False

    steps = 1
    top = 20
    times = True
    needs_nvidia = False

    def __post_init__(self) -> None:
        for setting, least in (("warmup", 0), ("steps", 1), ("top", 1)):
            if (value := getattr(self, setting)) < least:
                raise UserError(f"profiler.{setting}={value}: at least {least}.")

    def chosen(self, keys: Sequence[Key]) -> list[Key]:
        """Keys of the profiles to make, from those of the timed points."""
        first = [key for key in keys if key.replicate == 0]
        if not self.all_points:
            first = list({key.phase: key for key in reversed(first)}.values())[::-1]
        return [profile_key(key) for key in first]

    def outputs(self, place: Place) -> list[Path]:
        """Files that may be written: by the tool, by the worker, or by `collect`."""
        return []

    def command(self, place: Place, about: About) -> list[str]:
        """Prefix of the worker's command line; raises `Unsupported` for the device, `ProfilerFailed` for the tool."""
        if self.needs_nvidia:
            refuse_other_devices(about.device)
        return []

    def collect(
        self, place: Place, about: About, said: str, observations: Mapping[str, Any]
    ) -> Found:
        """Results of the profile, after the worker has ended; raises `ProfilerFailed` if there is none.

        `said` is the log of tool and worker; `observations` are the worker's, empty if it failed before.
        """
        return Found()

    def watching(self, place: Place, device: Any) -> AbstractContextManager[Marks]:
        """A context for the profiled calls; raises `Unsupported` for an unsupported device."""
        return captured(device)

    def observations(self) -> dict[str, Any]:
        """JSON values of the worker for `collect`."""
        return {}


class NoProfiler(Profiler):
    """No profile (profiler=none)."""

    def chosen(self, keys: Sequence[Key]) -> list[Key]:
        return []
