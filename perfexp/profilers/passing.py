"""Passing: the calls that a profiler looks at, with their ranges; the same for all profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perfexp.errors import Unsupported, UserError
from perfexp.modes import Step, graphed
from perfexp.profilers import WHOLE, Marks, Place, Profiler, part_name, profiled_key
from perfexp.records.record import Key

if TYPE_CHECKING:
    from perfexp.layers.outline import Outline
    from perfexp.measure.procedure import Procedure


def look(procedure: Procedure, key: Key, profiler: Profiler, place: Place) -> dict[str, Any]:
    """Call a step a few times under the eyes of a profiler.

    Args:
        procedure: everything that stays the same from point to point.
        key: of the profile.
        profiler: that looks on.
        place: where its files go.

    Returns:
        What was done, and what the profiler found, as JSON values.

    Raises:
        UserError: what the user asked for can't be done for any point.
        Exception: whatever the calls raise.
    """
    timed = profiled_key(key)
    with procedure.step(timed) as (step, batches):
        procedure.first_call(step, batches)
        if procedure.graph:
            step = graphed(step, procedure.session, constant=batches.constant)
        outline = _outline(procedure, step) if profiler.modules else None
        procedure.progress(f"{profiler.warmup} calls before {profiler.name} looks")
        for _ in range(profiler.warmup):
            step.call()
        procedure.device.synchronize()
        procedure.progress(f"under the eyes of {profiler.name}")
        with profiler.watching(place, procedure.device) as marks, _modules(procedure, outline, marks) as restart:
            for _ in range(profiler.steps):
                restart()
                call(step, marks, WHOLE[timed.phase])
            procedure.device.synchronize()
        parts = [part_name(name) for name, _ in step.segments]
    return {
        "warmup": profiler.warmup,
        "steps": profiler.steps,
        "marked": [WHOLE[timed.phase], *parts],
        **profiler.told(),
    }


def call(step: Step, marks: Marks, whole: str) -> None:
    """One call, with a range around it and around each of its parts.

    Args:
        step: to be called.
        marks: that make ranges.
        whole: what the call is called.
    """
    with marks.range(whole):
        for name, part in step.segments:
            with marks.range(part_name(name)):
                part()


def _outline(procedure: Procedure, step: Step) -> Outline:
    """The modules that a call calls, found out by a call."""
    session: Any = procedure.session
    if procedure.graph or not hasattr(session, "module"):
        raise UserError("profiler.modules=true needs a torch model that is called part by part, not as a CUDA graph.")
    from perfexp.layers.outline import Opaque, outline_of

    try:
        return outline_of(lambda: [part() for _, part in step.segments], session.module)
    except Opaque as why:
        raise Unsupported(f"profiler.modules=true: {why}") from why


@contextmanager
def _modules(procedure: Procedure, outline: Outline | None, marks: Marks) -> Iterator[Callable[[], None]]:
    """Ranges around the model's modules, where they are wanted; gives what has to be called before each call."""
    if outline is None:
        yield lambda: None
        return
    from perfexp.layers.marking import marking
    from perfexp.profilers.marks import MarkedModules

    session: Any = procedure.session
    with marking(session.module, outline, MarkedModules(marks)) as marker:
        yield marker.restart
