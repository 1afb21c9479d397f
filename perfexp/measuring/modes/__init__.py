"""Modes: the timed call, built from session operations without torch or a clock.

A mode is a phase of the plan (`train`, `inference`). It prepares a `Step`: the call as a whole, and
its segments (phases), such as forward and backward, for the passes that time or profile them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from perfexp.data import Batches
from perfexp.models import Batch, Session, Trainer

#: Segments that a CUDA graph leaves out, because they run on the host.
_ON_HOST = ("data", "schedule", "ema")


@dataclass(kw_only=True)
class State:
    """Values that a call's segments pass on.

    Attributes:
        source: returns the next batch. It may be replaced, for example by one pass over the data.
        batch: batch of the last call.
        outputs: outputs of the last call.
        loss: loss of the last training step, on the device.
    """

    source: Callable[[], Batch]
    batch: Batch | None = None
    outputs: Any = None
    loss: Any = None


@dataclass(kw_only=True)
class Step:
    """A forward pass or training step, as a whole and as named segments in order.

    Attributes:
        call: the whole step. On an asynchronous device it only enqueues work.
        segments: names and functions, for example `data` and `forward`.
        active: context for all calls, such as evaluation mode without autograd.
        state: values of the last call.
        trains: whether it is a training step.
        trainer: training state, if the session can save it.
    """

    call: Callable[[], object]
    segments: tuple[tuple[str, Callable[[], object]], ...]
    active: Callable[[], AbstractContextManager[None]]
    batch_size: int
    state: State
    trains: bool = False
    trainer: Trainer | None = None


def graphed(step: Step, session: Session, *, constant: bool) -> Step:
    """Return the same step with everything after its data as one CUDA graph launch.

    The step must have been called before. What runs on the host stays outside the graph: batches
    are copied into the graph's tensors before it, schedules advance after it.

    Raises:
        Unsupported: the step cannot be captured.

    Args:
        constant: whether all batches have the same inputs. If so, only targets are copied per call.
    """
    state, work = step.state, without_data(step)
    after = tuple((name, part) for name, part in step.segments if name in _ON_HOST[1:])
    state.outputs = state.loss = None  # tensors from earlier calls belong to another stream
    if "data" not in dict(step.segments):
        replay = session.capture(work)
        return replace(step, call=replay, segments=(("graph", replay),))
    first = state.source()
    state.batch = held = session.copy(first)
    if constant:
        held.inputs = first.inputs
    replay = session.capture(work)

    def fetch() -> None:
        session.copy(state.source(), into=held)

    def call() -> None:
        fetch()
        replay()
        for _, part in after:
            part()

    return replace(step, call=call, segments=(("data", fetch), ("graph", replay), *after))


def without_data(step: Step) -> Callable[[], None]:
    """Return the call without its host segments. It uses the last call's batch again."""
    parts = [part for name, part in step.segments if name not in _ON_HOST]

    def work() -> None:
        for part in parts:
            part()

    return work


class Mode(Protocol):
    """An object built from a phase in the configuration's `mode` node."""

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        """Return the call to time, ready for its first call inside `active`."""
