"""Profiles of a few calls, in a separate process after all timing: nsys, ncu, NVTX or torch.

A profiler is an object that the plan's `profiler` node builds. The parent asks it for the command
line that puts a tool such as nsys around the worker, and for the results afterward. The worker
makes the calls (`passing`), with ranges that name phases and modules for the tool.

A profiled pass is another run of the same plan. It never supplies a time for the record: its
results are the facts of a separate point (`train_profile`, `inference_profile`). If a profiler is
missing or fails, only the profile is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.records import diagnostics
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths
from perfexp.records.profile_keys import profile_key, profiled_key
from perfexp.records.record import Key

#: Advice for a profile with fewer kernels in the backward pass than in the forward pass.
_LOST_BACKWARD = (
    "check the timeline for another stream or process, and profile again; if it persists, please "
    "report it"
)


class ProfilerFailed(PerfexpError):
    """A failed profile, with the reason, a remedy, and the names of partial results.

    The profile's point becomes `failed` with this message.
    """

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.files = list(files)


def part_name(name: str) -> str:
    """Return the name of a step segment (`perfexp.measuring.modes.Step`) in a profile."""
    return "optimizer_step" if name == "optimizer" else name


@dataclass(frozen=True, kw_only=True)
class ProfileLocation:
    """Location of a profile's files: their folder, and the beginning of their names."""

    folder: Path
    stem: str

    def file(self, ending: str = "") -> Path:
        """Return the file with an ending after the stem, for example `.nsys-rep` or `_ncu.csv`."""
        return self.folder / f"{self.stem}{ending}"


def place_of(key: Key, keys: Sequence[Key], folder: Path) -> ProfileLocation:
    """Return the location of a profile's files.

    The stem is `train`, or for example `train_224_b64` if the run profiles a phase several times.

    Args:
        key: key of the profile's point.
        keys: keys of all of the run's profiles.
        folder: folder of profiles in the run.
    """
    phase = profiled_key(key).phase
    alone = sum(other.phase == key.phase for other in keys) == 1
    return ProfileLocation(
        folder=folder, stem=phase if alone else f"{phase}_{key.size_label}_b{key.batch_size}"
    )


def refuse_to_overwrite(files: Sequence[Path], folder: Path, way_out: str) -> None:
    """Raise `ProfilerFailed` if a file exists that the folder's manifest does not list.

    The manifest lists the files that perfexp wrote.

    Args:
        way_out: advice for the message.
    """
    claimed = RunPaths(folder).claimed()
    unclaimed = []
    for path in files:
        if path.name not in claimed and (path.is_symlink() or path.exists()):
            unclaimed.append(path.name)
    if unclaimed:
        raise ProfilerFailed(
            f"{', '.join(unclaimed)} would be overwritten, and no manifest says that a run left "
            f"it: {way_out}"
        )


def why_not_cuda(kind: str, name: str, *, rocm: bool) -> str | None:
    """Return why NVIDIA's tools cannot profile a device; None if they can.

    Args:
        kind: `cuda`, `cpu` or `mps`.
        name: product name, for the message.
        rocm: whether torch is built for AMD's GPUs, which have the kind `cuda`, too.
    """
    if kind != "cuda":
        return f"nsys, ncu and NVTX need a CUDA device, not {name}: use profiler=torch"
    if rocm:
        return "nsys, ncu and NVTX need an NVIDIA device, not AMD's: use profiler=torch"
    return None


def refuse_other_devices(device: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for a device that is not NVIDIA's, before reporting a missing tool."""
    kind = str(device.get("kind"))
    why = why_not_cuda(kind, str(device.get("name") or kind), rocm=bool(device.get("rocm")))
    if why and kind in ("cpu", "mps", "cuda"):
        raise Unsupported(why)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a profiler may know about the run when it makes its command line.

    Attributes:
        phase: `train` or `inference`.
        device: device facts; empty if nothing was timed.
        command: the user's arguments of perfexp.
    """

    phase: str
    device: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()


@dataclass(kw_only=True)
class ProfileResult:
    """Results of a profile.

    Attributes:
        files: names of the files that the profile left.
        facts: what the profile's point records, for example the slowest kernels.
        doubts: diagnostics, for example that the profile is incomplete.
    """

    files: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    doubts: list[Diagnostic] = field(default_factory=list)

    def add_kernels(self, kernels: Sequence[Mapping[str, Any]], top: int) -> None:
        """Add the first kernels as facts, and the number of names and total seconds of all.

        Args:
            kernels: `tools.ranked` kernels, by decreasing time.
            top: number of kernels to list.
        """
        self.facts |= {
            "kernels": kernels[:top],
            "kernel_names": len(kernels),
            "kernel_seconds": sum(kernel["seconds"] for kernel in kernels),
        }

    def doubt(self, reason: str, advice: str = "see details/run.log") -> None:
        """Add the diagnostic that the profile is incomplete."""
        self.doubts.append(diagnostics.make("profile_incomplete", reason=reason, advice=advice))

    def compare_passes(self, tool: str, forward: float, backward: float) -> None:
        """Add a diagnostic if the backward pass has fewer kernels than the forward pass.

        A backward pass has more, so the tool must have missed some.
        """
        if backward < forward:
            lost = (
                f"{tool} saw {forward:g} kernels of the forward pass, but only {backward:g} of "
                "the backward pass"
            )
            self.doubt(lost, _LOST_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How the worker marks calls and phases for an attached tool.

    Attributes:
        range: returns a context that is shown in the profile under the given name; by default one
            without effect.
    """

    range: Callable[[str], AbstractContextManager[Any]] = nullcontext


@contextmanager
def captured(device: Any) -> Iterator[Marks]:
    """Make tools that wait for cudaProfilerStart record while entered; yield ranges for them.

    Raises:
        Unsupported: the device is not an NVIDIA GPU.
    """
    import torch

    if why := why_not_cuda(device.kind, device.name, rocm=torch.version.hip is not None):
        raise Unsupported(why)
    device.synchronize()
    torch.cuda.profiler.start()
    try:
        yield Marks(range=_process_range)
    finally:
        device.synchronize()
        torch.cuda.profiler.stop()


@contextmanager
def _process_range(name: str) -> Iterator[None]:
    """Open a process range, which includes launches from other threads.

    A pushed range belongs to its thread, but autograd launches the backward pass from another
    thread.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.nvtx.range_start.html
    """
    import torch

    handle = torch.cuda.nvtx.range_start(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_end(handle)


@dataclass(kw_only=True)
class Profiler:
    """Base class for objects built from a `profiler` node.

    `chosen`, `command`, `outputs` and `collect` run in the process that waits for the worker, and
    must not import torch. `watching` and `observations` run in the worker.

    The other keys are described in `plan/key_descriptions.yaml`.

    Attributes:
        times: whether the run is timed too.
        needs_nvidia: whether only NVIDIA GPUs can be profiled.

    Raises:
        UserError: a number is too small.
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
        """Return the keys of the profiles to make, from the timed points' keys."""
        first = [key for key in keys if key.replicate == 0]
        if not self.all_points:
            first = list({key.phase: key for key in reversed(first)}.values())[::-1]
        return [profile_key(key) for key in first]

    def outputs(self, location: ProfileLocation) -> list[Path]:
        """Return the files that the tool, the worker or `collect` may write."""
        return []

    def command(self, location: ProfileLocation, about: About) -> list[str]:
        """Return the tool's command line, which the worker's is appended to; empty without a tool.

        Raises:
            Unsupported: the device cannot be profiled.
            ProfilerFailed: the tool is missing or too old.
        """
        if self.needs_nvidia:
            refuse_other_devices(about.device)
        return []

    def collect(
        self, location: ProfileLocation, about: About, said: str, observations: Mapping[str, Any]
    ) -> ProfileResult:
        """Return the profile's results after the worker and the tool have ended.

        Args:
            said: output of tool and worker.
            observations: the worker's observations; empty if it failed earlier.

        Raises:
            ProfilerFailed: there is no profile.
        """
        return ProfileResult()

    def watching(self, location: ProfileLocation, device: Any) -> AbstractContextManager[Marks]:
        """Return a context for the profiled calls, which yields ranges for them.

        Raises:
            Unsupported: the device cannot be profiled.
        """
        return captured(device)

    def observations(self) -> dict[str, Any]:
        """Return JSON values from the worker, which the parent passes to `collect`."""
        return {}


class NoProfiler(Profiler):
    """No profile (profiler=none)."""

    def chosen(self, keys: Sequence[Key]) -> list[Key]:
        return []
