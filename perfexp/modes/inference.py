"""Inference: one forward pass in evaluation mode, after fetching its batch where the data is real."""

from __future__ import annotations

from perfexp.data import Batches
from perfexp.models import Session
from perfexp.modes import State, Step


class Inference:
    """Forward passes without autograd."""

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        """See `Mode`."""
        state, run = State(source=batches.next), session.forward

        if batches.constant:
            inputs = batches.next().inputs

            def constant() -> None:
                state.outputs = run(inputs)

            return Step(
                call=constant,
                segments=(("forward", constant),),
                active=session.inferring,
                batch_size=batch_size,
                state=state,
            )

        def data() -> None:
            state.batch = state.source()

        def forward() -> None:
            assert state.batch is not None
            state.outputs = run(state.batch.inputs)

        def call() -> None:
            data()
            forward()

        return Step(
            call=call,
            segments=(("data", data), ("forward", forward)),
            active=session.inferring,
            batch_size=batch_size,
            state=state,
        )
