"""nvtx: one marked call and nothing else, for a profiler that the user starts himself around the command."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from perfexp.errors import UserError
from perfexp.profilers import WHOLE, About, Found, Marks, Place, Settings, refuse_other_devices
from perfexp.profilers.nsys import TRACE

#: Overrides that would have the command find its work done.
_NOT_REPEATED = ("output_dir=", "resume=")


class Nvtx(Settings):
    """Marks one call with ranges of NVTX and ends (profiler=nvtx). Nothing is timed: a tool may look on.

    Args:
        name: of the group's option.
        warmup: calls before.
        step: which call after them is marked, from 1.
        modules: whether the modules of the model have ranges too.
        all_points: whether each point has a marked call; otherwise the first one of each phase.
    """

    times = False

    def __init__(
        self, *, name: str = "nvtx", warmup: int = 20, step: int = 1, modules: bool = False, all_points: bool = False
    ) -> None:
        if step < 1:
            raise UserError(f"profiler.step={step}: the first one after the warm-up is 1.")
        super().__init__(name=name, warmup=warmup, steps=1, modules=modules, all_points=all_points)
        self.warmup = warmup + step - 1

    def outputs(self, place: Place) -> list[Path]:
        """None: what looks on writes where its own command line says."""
        return []

    def command(self, place: Place, about: About) -> list[str]:
        """Nothing."""
        refuse_other_devices(about.device)
        return []

    def watching(self, place: Place, device: Any) -> AbstractContextManager[Marks]:
        """See `Profiler`."""
        from perfexp.profilers.marks import captured

        return captured(device)

    def collect(self, place: Place, about: About, said: str, told: Mapping[str, Any]) -> Found:
        """See `Profiler`: the command lines that look at the marked call."""
        return Found(facts={"commands": command_lines(place.stem, about)})


def command_lines(stem: str, about: About) -> dict[str, str]:
    """What to type to have the marked call looked at, by tool.

    Args:
        stem: of the tool's own output.
        about: the command of the run, and its phase.
    """
    own = [text for text in about.command if not text.startswith(_NOT_REPEATED)]
    run = ["python", "-m", "perfexp", *own]
    nsys = [
        "nsys",
        "profile",
        f"--trace={','.join(TRACE)}",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--kill=none",
        "--cuda-graph-trace=node",
        f"--output={stem}",
    ]
    ncu = [
        "ncu",
        "--target-processes=all",
        "--clock-control=none",
        "--profile-from-start=off",
        "--nvtx",
        f"--nvtx-include={WHOLE[about.phase]}",  # without a slash: a range of the process
        "--set=roofline",
        f"--export={stem}",
    ]
    return {"nsys": shlex.join([*nsys, *run]), "ncu": shlex.join([*ncu, *run])}
