"""Profiled calls with their ranges, in the same way for all profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from perfexp.errors import Unsupported, UserError
from perfexp.layers.events import Mark, Scope
from perfexp.layers.marking import Opaque, Outline, Ranges, marking, outline_of
from perfexp.modes import Step, graphed
from perfexp.profilers import WHOLE, Marks, Place, Profiler, part_name, profiled_key
from perfexp.records.record import Key

if TYPE_CHECKING:
    from perfexp.measuring.procedure import Procedure


def look(procedure: Procedure, key: Key, profiler: Profiler, place: Place) -> dict[str, Any]:
    """Profile a few calls of a step.

    Returns call counts, range names, and the profiler's observations.
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
            profiler.watching(place, procedure.device) as marks,
            _modules(procedure, outline, marks) as restart,
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


def call(step: Step, marks: Marks, whole: str) -> None:
    """Make one call, with a range named `whole` around it and a range around each part."""
    with marks.range(whole):
        for name, part in step.segments:
            with marks.range(part_name(name)):
                part()


def _outline(procedure: Procedure, step: Step) -> Outline:
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
def _modules(
    procedure: Procedure, outline: Outline | None, marks: Marks
) -> Iterator[Callable[[], None]]:
    """Put ranges around the model's modules, if requested.

    Yields a function to call before each call.
    """
    if outline is None:
        yield lambda: None
        return
    session: Any = procedure.session
    with marking(session.module, outline, _MarkedModules(marks)) as marker:
        yield marker.restart


class _MarkedModules(Ranges):
    """A range around each call of a module and of its operations.

    Marking takes host time, which the profile shows.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def around(self, mark: Mark | None) -> AbstractContextManager[Any]:
        if mark is None or mark.scope not in (Scope.module, Scope.operation):
            return nullcontext()
        return self._marks.range(mark.path or mark.kind)
