"""Mode: what one call is; it puts a session's operations together and knows nothing of torch or of time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from perfexp.data import Batches
from perfexp.models import Batch, Session


@dataclass(kw_only=True)
class State:
    """What the segments of a call hand to one another.

    Attributes:
        source: where the next batch comes from; another one may be put here (one pass of an epoch).
        batch: inputs and targets of the call.
        outputs: of the forward pass.
        loss: in training.
    """

    source: Callable[[], Batch]
    batch: Batch | None = None
    outputs: Any = None
    loss: Any = None


@dataclass(kw_only=True)
class Step:
    """One call, whole and in its parts.

    Attributes:
        call: the whole call; enqueues on an asynchronous device.
        segments: the same call as named parts, in order (`data`, `forward`, …).
        active: entered around all calls.
        batch_size: samples per call.
        state: what the last call left.
        trains: whether the call is a training step.
    """

    call: Callable[[], object]
    segments: tuple[tuple[str, Callable[[], object]], ...]
    active: Callable[[], AbstractContextManager[None]]
    batch_size: int
    state: State
    trains: bool = False


def graphed(step: Step, session: Session, *, constant: bool) -> Step:
    """The same call with everything after its data as one launch (a CUDA graph).

    Args:
        step: has been called before.
        session: that it calls.
        constant: whether all batches have the same inputs: then only their targets are copied for each call.

    Raises:
        Unsupported: it can't be captured.
    """
    data, work = dict(step.segments).get("data"), behind_the_data(step)
    step.state.outputs = step.state.loss = None  # what an earlier call left belongs to another stream

    if data is None:
        replay = session.capture(work)
        return replace(step, call=replay, segments=(("graph", replay),))
    state = step.state
    first = state.source()
    state.batch = kept = session.copy(first)
    if constant:
        kept.inputs = first.inputs
    replay = session.capture(work)

    def fetch() -> None:
        session.copy(state.source(), into=kept)

    def call() -> None:
        fetch()
        replay()

    return replace(step, call=call, segments=(("data", fetch), ("graph", replay)))


def behind_the_data(step: Step) -> Callable[[], None]:
    """A call without its data: it works on the batch that the last one had.

    Args:
        step: has been called before.
    """
    parts = [part for name, part in step.segments if name != "data"]

    def work() -> None:
        for part in parts:
            part()

    return work


class Mode(Protocol):
    """What a phase of the configuration's `mode` node builds."""

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        """The call to be timed.

        Args:
            session: a loaded model.
            batches: its inputs.
            batch_size: samples per batch.
        """
