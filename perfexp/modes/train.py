"""Training: one whole step of data, forward, loss, backward and optimizer."""

from __future__ import annotations

from typing import Any

from perfexp.data import Batches
from perfexp.models import Session
from perfexp.modes import State, Step


class Train:
    """Training steps, with an optimizer's `name` (`sgd`, `adam`, `adamw`) and arguments in torch (`lr`, …)."""

    def __init__(self, *, optimizer: dict[str, Any]) -> None:
        self.optimizer = dict(optimizer)

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        state = State(source=batches.next)
        update = session.optimizer(self.optimizer)

        def data() -> None:
            state.batch = state.source()

        def forward() -> None:
            assert state.batch is not None
            state.outputs = session.learn(state.batch)

        def loss() -> None:
            assert state.batch is not None
            state.loss = session.loss(state.outputs, state.batch.targets)

        def backward() -> None:
            session.backward(state.loss)

        def call() -> None:
            data()
            forward()
            loss()
            backward()
            update()

        segments = (("data", data), ("forward", forward), ("loss", loss), ("backward", backward), ("optimizer", update))
        active = session.training
        return Step(call=call, segments=segments, active=active, batch_size=batch_size, state=state, trains=True)
