"""Profiled calls with their ranges, in the same way for all profilers.

This is the worker's part of a profile: `worker.entry` calls `profile_point` in a process that the
profiler has started or observes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from perfexp.errors import Unsupported, UserError
from perfexp.measuring.layers.events import RangeMark, Scope
from perfexp.measuring.layers.marking import Opaque, Outline, Ranges, marking, outline_of
from perfexp.measuring.modes import Step, graphed
from perfexp.measuring.profilers import Marks, ProfileLocation, Profiler, part_name
from perfexp.records.profile_keys import WHOLE, profiled_key
from perfexp.records.record import Key

if TYPE_CHECKING:
    from perfexp.measuring.procedure import Procedure


def profile_point(
    procedure: Procedure, key: Key, profiler: Profiler, location: ProfileLocation
) -> dict[str, Any]:
    """Make a few calls of a point's step under the profiler.

    Args:
        key: key of the profile's point.
        location: folder for the profiler's files.

    Returns:
        Numbers of warm-up and profiled calls, range names, and the profiler's observations.

    Raises:
        UserError: the plan asks for ranges of modules, and the model is not a torch model.
        Unsupported: the device, or the model's modules, cannot be profiled.
    """
    timed = profiled_key(key)
    with procedure.step(timed) as (step, batches):
        procedure.first_call(step, batches)
        if procedure.graph:
            step = graphed(step, procedure.session, constant=batches.constant)
        outline = _outline(procedure, step) if profiler.modules else None
        procedure.progress(f"{profiler.warmup} warm-up calls for {profiler.name}")
        for _ in range(profiler.warmup):
            step.call()
        procedure.device.synchronize()
        procedure.progress(f"profiled by {profiler.name}")
        with (
            profiler.watching(location, procedure.device) as marks,
            _marked_modules(procedure, outline, marks) as restart,
        ):
            for _ in range(profiler.steps):
                restart()
                call(step, marks, WHOLE[timed.phase])
            procedure.device.synchronize()
        parts = [part_name(name) for name, _ in step.segments]
    return {
        "warmup": profiler.warmup,
        "steps": profiler.steps,
        "marked": [WHOLE[timed.phase], *parts],
        **profiler.observations(),
    }


def call(step: Step, marks: Marks, range_name: str) -> None:
    """Make one call, with a range named `range_name` around it and a range around each phase."""
    with marks.range(range_name):
        for name, part in step.segments:
            with marks.range(part_name(name)):
                part()


def _outline(procedure: Procedure, step: Step) -> Outline:
    """Return the module calls in a call, so that `marking` can name them; see `outline_of`."""
    session: Any = procedure.session
    if procedure.graph or not hasattr(session, "module"):
        raise UserError(
            "profiler.modules=true needs a torch model that is called part by part, not as a CUDA "
            "graph."
        )
    try:
        return outline_of(lambda: [part() for _, part in step.segments], session.module)
    except Opaque as why:
        raise Unsupported(f"profiler.modules=true: {why}") from why


@contextmanager
def _marked_modules(
    procedure: Procedure, outline: Outline | None, marks: Marks
) -> Iterator[Callable[[], None]]:
    """Put ranges around the model's modules while entered, if there is an outline.

    Yield a function to call before each call: module calls count from 0 again.
    """
    if outline is None:
        yield lambda: None
        return
    session: Any = procedure.session
    with marking(session.module, outline, _ModuleRanges(marks)) as marker:
        yield marker.restart


class _ModuleRanges(Ranges):
    """Opens the profiler's range around each call of a module and of its operations.

    Marking takes host time, which the profile shows.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def around(self, mark: RangeMark | None) -> AbstractContextManager[Any]:
        """Open a range for a module or operation; `profile_point` marks calls and phases itself."""
        if mark is None or mark.scope not in (Scope.module, Scope.operation):
            return nullcontext()
        return self._marks.range(mark.path or mark.kind)
