"""One marked, untimed call for a profiler that the user starts around the command.

NVTX ranges are named spans that NVIDIA's tools show. The result is the command lines that profile
exactly this call with nsys and ncu.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfexp.errors import UserError
from perfexp.measuring.profilers import About, ProfileLocation, Profiler, ProfileResult
from perfexp.measuring.profilers.nsys import recording_command
from perfexp.records.profile_keys import WHOLE

#: Overrides that would make a repeated command find its work done.
_NOT_REPEATED = ("output_dir=", "resume=")


@dataclass(kw_only=True)
class Nvtx(Profiler):
    """Marks one untimed call after the warm-up (profiler=nvtx); the run times nothing.

    The keys are described in `plan/key_descriptions.yaml`.
    """

    name: str = "nvtx"
    step: int = 1

    times, needs_nvidia = False, True

    def __post_init__(self) -> None:
        """Check the settings; calls before the marked call count as warm-up."""
        super().__post_init__()
        if self.step < 1:
            raise UserError(
                f"profiler.step={self.step}: give 1 or more; 1 is the first call after the warm-up."
            )
        self.warmup += self.step - 1

    def collect(
        self, location: ProfileLocation, about: About, said: str, observations: Mapping[str, Any]
    ) -> ProfileResult:
        """Return command lines for profiling the run by hand; there are no files to collect."""
        return ProfileResult(facts={"commands": command_lines(location.stem, about)})


def command_lines(stem: str, about: About) -> dict[str, str]:
    """Return command lines that profile the marked call, by tool.

    Args:
        stem: beginning of output file names.
        about: the run's phase, and the user's arguments to repeat.
    """
    arguments = [text for text in about.command if not text.startswith(_NOT_REPEATED)]
    run = ["python", "-m", "perfexp", *arguments]
    nsys = ["nsys", *recording_command(), f"--output={stem}"]
    ncu = [
        "ncu",
        "--target-processes=all",
        "--clock-control=none",
        "--profile-from-start=off",
        "--nvtx",
    ]
    # without a slash, ncu selects a process range
    ncu += [f"--nvtx-include={WHOLE[about.phase]}", "--set=roofline", f"--export={stem}"]
    return {"nsys": shlex.join([*nsys, *run]), "ncu": shlex.join([*ncu, *run])}
