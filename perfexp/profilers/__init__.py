"""Profilers: what looks at a few calls of a run, in a process of its own after everything has been timed.

A profiled pass is another run of the same plan. It never supplies a time of the record: what it finds lies in the
facts of a point of its own (`train_profile`, `inference_profile`), beside what the pass cost. A profiler that is not
there, or that fails, costs the profile and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.records.diagnostics import Diagnostic
from perfexp.records.paths import RunPaths
from perfexp.records.record import Key

_PROFILE = "_profile"
#: The range around a whole call, by its phase.
WHOLE = {"train": "train_step", "inference": "inference"}
#: What a part of a call is called in a profile, where that is not its own name.
_PARTS = {"optimizer": "optimizer_step"}


class ProfilerFailed(PerfexpError):
    """A profile could not be made: what happened, and what to do about it.

    Args:
        message: both.
        files: names of what it left all the same.
    """

    def __init__(self, message: str, files: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.files = list(files)


def profile_key(key: Key) -> Key:
    """Of the profile of a timed point.

    Args:
        key: of that point.
    """
    return msgspec.structs.replace(key, phase=key.phase + _PROFILE)


def profiled_key(key: Key) -> Key:
    """Of the timed point that a profile is of.

    Args:
        key: of the profile.
    """
    return msgspec.structs.replace(key, phase=key.phase.removesuffix(_PROFILE))


def is_profile(key: Key) -> bool:
    """Whether it is a point of a profile.

    Args:
        key: of any point.
    """
    return key.phase.endswith(_PROFILE)


def part_name(name: str) -> str:
    """What a part of a call is called in a profile.

    Args:
        name: of a segment of `perfexp.modes.Step`.
    """
    return _PARTS.get(name, name)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the files of one profile lie.

    Attributes:
        folder: of the run.
        stem: what their names begin with.
    """

    folder: Path
    stem: str

    @property
    def base(self) -> Path:
        """The path to which tools append a suffix of theirs."""
        return self.folder / self.stem

    def file(self, ending: str) -> Path:
        """One of the files.

        Args:
            ending: what follows the stem (`.nsys-rep`, `_ncu.csv`).
        """
        return self.folder / f"{self.stem}{ending}"


def place_of(key: Key, keys: Sequence[Key], folder: Path) -> Place:
    """Where the files of a profile go: `train`, or `train_224_b64` where a run has several profiles of a phase.

    Args:
        key: of the profile.
        keys: of all profiles of the run.
        folder: of the run.
    """
    phase = profiled_key(key).phase
    alone = sum(other.phase == key.phase for other in keys) == 1
    return Place(folder=folder, stem=phase if alone else f"{phase}_{key.size_label}_b{key.batch_size}")


def refuse_to_overwrite(files: Sequence[Path], folder: Path, way_out: str) -> None:
    """See that nothing is lost that perfexp did not write, as the manifest of a folder says.

    Args:
        files: that are going to be written there.
        folder: of a run, or any.
        way_out: what the user can do.

    Raises:
        ProfilerFailed: something is there that the manifest does not name.
    """
    known = RunPaths(folder).claimed()
    there = [path.name for path in files if path.name not in known and (path.is_symlink() or path.exists())]
    if there:
        raise ProfilerFailed(
            f"{', '.join(there)} would be overwritten, and no manifest says that a run left it: {way_out}"
        )


def why_not_cuda(kind: str, name: str, *, rocm: bool) -> str | None:
    """Why NVIDIA's tools can't look at a device; None where they can.

    Args:
        kind: of the device.
        name: of the device.
        rocm: whether torch was built for AMD's.
    """
    if kind != "cuda":
        return f"nsys, ncu and NVTX look at CUDA devices, and this is {name}: use profiler=torch"
    if rocm:
        return "nsys, ncu and NVTX look at NVIDIA's devices, and this is AMD's: use profiler=torch"
    return None


def refuse_other_devices(device: Mapping[str, Any]) -> None:
    """See that nobody is told to install a tool that could not look at his device anyway.

    Args:
        device: facts of it, as the timed run recorded them; where there are none, the worker finds out.

    Raises:
        Unsupported: it is known to be no NVIDIA device.
    """
    kind = str(device.get("kind"))
    if kind not in ("cpu", "mps", "cuda"):
        return
    if why := why_not_cuda(kind, str(device.get("name") or kind), rocm=bool(device.get("rocm"))):
        raise Unsupported(why)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a profiler's command line depends on.

    Attributes:
        phase: `train` or `inference`.
        device: facts of the device, as the timed run recorded them; empty where nothing was timed.
        command: overrides that the user typed.
    """

    phase: str
    device: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()


@dataclass(kw_only=True)
class Found:
    """What a profile shows.

    Attributes:
        files: names in the run's folder.
        facts: JSON values.
        doubts: about the profile.
    """

    files: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    doubts: list[Diagnostic] = field(default_factory=list)


class Marks(Protocol):
    """Ranges with names, which a tool that looks on records."""

    def range(self, name: str) -> AbstractContextManager[Any]:
        """To be entered.

        Args:
            name: of the range.
        """


class NoMarks:
    """Nobody looks on."""

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Nothing."""
        yield


class Profiler(Protocol):
    """What a `profiler` node of the configuration builds.

    `chosen`, `command`, `outputs` and `collect` are asked in the process that waits for the worker, and must not import
    torch; `watching` in the worker.

    Attributes:
        name: of the group's option.
        times: whether the run is timed too.
        warmup: calls before those that are looked at.
        steps: calls that are looked at.
        modules: whether the modules of the model have ranges too.
    """

    name: str
    times: bool
    warmup: int
    steps: int
    modules: bool

    def chosen(self, keys: Sequence[Key]) -> list[Key]:
        """Keys of the profiles to be made.

        Args:
            keys: of the timed points.
        """

    def outputs(self, place: Place) -> list[Path]:
        """The files that may be written: by the tool, by the worker, or when its profile is collected.

        Args:
            place: of the profile.
        """

    def command(self, place: Place, about: About) -> list[str]:
        """What comes before the worker on its command line.

        Args:
            place: of the profile.
            about: what it depends on.

        Raises:
            Unsupported: the device can't be looked at so, as far as that is known here.
            ProfilerFailed: the tool is not there, or too old.
        """

    def collect(self, place: Place, about: About, said: str, told: Mapping[str, Any]) -> Found:
        """What the profile shows, once the worker has ended.

        Args:
            place: of the profile.
            about: what its command line depended on.
            said: what tool and worker wrote to the log.
            told: what the worker told; empty where it did not come so far.

        Raises:
            ProfilerFailed: there is no profile.
        """

    def watching(self, place: Place, device: Any) -> AbstractContextManager[Marks]:
        """Entered around the calls that are looked at; leaves its findings in `told`.

        Args:
            place: of the profile.
            device: that works.

        Raises:
            Unsupported: this device can't be looked at so.
        """

    def told(self) -> dict[str, Any]:
        """What the worker hands to `collect`; JSON values."""


class Settings:
    """What all profilers have in common.

    Args:
        name: of the group's option.
        warmup: calls before those that are looked at.
        steps: calls that are looked at.
        modules: whether the modules of the model have ranges too.
        all_points: whether each timed point has a profile; otherwise the first one of each phase.
        top: rows of the tables of kernels and operators in the record.
    """

    times = True

    def __init__(
        self, *, name: str, warmup: int, steps: int, modules: bool = False, all_points: bool = False, top: int = 20
    ) -> None:
        for what, value, least in (("warmup", warmup, 0), ("steps", steps, 1), ("top", top, 1)):
            if value < least:
                raise UserError(f"profiler.{what}={value}: at least {least}.")
        self.name, self.warmup, self.steps = name, warmup, steps
        self.modules, self.all_points, self.top = modules, all_points, top

    def chosen(self, keys: Sequence[Key]) -> list[Key]:
        """See `Profiler`."""
        return self.chosen_of(keys, all_points=self.all_points)

    @staticmethod
    def chosen_of(keys: Sequence[Key], *, all_points: bool) -> list[Key]:
        """Keys of the profiles of some points.

        Args:
            keys: of the timed points.
            all_points: whether each has one; otherwise the first one of each phase.
        """
        first = [key for key in keys if key.replicate == 0]
        if not all_points:
            first = list({key.phase: key for key in reversed(first)}.values())[::-1]
        return [profile_key(key) for key in first]

    def told(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class NoProfiler:
    """Nobody looks on (profiler=none).

    Args:
        name: of the group's option.
    """

    times, warmup, steps, modules = True, 0, 1, False

    def __init__(self, *, name: str = "none") -> None:
        self.name = name

    def chosen(self, keys: Sequence[Key]) -> list[Key]:
        """None."""
        return []

    def outputs(self, place: Place) -> list[Path]:
        """None."""
        return []

    def command(self, place: Place, about: About) -> list[str]:
        """Nothing."""
        return []

    def collect(self, place: Place, about: About, said: str, told: Mapping[str, Any]) -> Found:
        """Nothing."""
        return Found()

    @contextmanager
    def watching(self, place: Place, device: Any) -> Iterator[Marks]:
        """Nothing."""
        yield NoMarks()

    def told(self) -> dict[str, Any]:
        """Nothing."""
        return {}
