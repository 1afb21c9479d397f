"""Mode: the kind of call that is timed, put together from a session's operations without torch or a clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from perfexp.data import Batches
from perfexp.models import Batch, Session, Trainer

#: Segments that a CUDA graph leaves out: they work on the host.
_ON_HOST = ("data", "schedule", "ema")


@dataclass(kw_only=True)
class State:
    """Values that the segments of a call pass on; the `source` of batches may be replaced, as by one pass of data."""

    source: Callable[[], Batch]
    batch: Batch | None = None
    outputs: Any = None
    loss: Any = None


@dataclass(kw_only=True)
class Step:
    """A forward pass or a training step, whole and in its named segments, in order (`data`, `forward`, …).

    The call enqueues on an asynchronous device; all calls are made in the context `active`. The `trainer` has the
    state of a training, where the session can save it.
    """

    call: Callable[[], object]
    segments: tuple[tuple[str, Callable[[], object]], ...]
    active: Callable[[], AbstractContextManager[None]]
    batch_size: int
    state: State
    trains: bool = False
    trainer: Trainer | None = None


def graphed(step: Step, session: Session, *, constant: bool) -> Step:
    """Return the same call, called before, with everything after its data as one launch (a CUDA graph).

    If the inputs of all batches are the same (`constant`), only targets are copied for each call. Raises `Unsupported`
    if it can't be captured.
    """
    state, work = step.state, without_data(step)
    after = tuple((name, part) for name, part in step.segments if name in _ON_HOST[1:])
    state.outputs = state.loss = None  # tensors of an earlier call belong to another stream
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
    """Return the call without its segments on the host; it works on the batch of the last call."""
    parts = [part for name, part in step.segments if name not in _ON_HOST]

    def work() -> None:
        for part in parts:
            part()

    return work


class Mode(Protocol):
    """What a phase of the configuration's `mode` node builds."""

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        """Return the call to be timed."""
