"""Inference: a call is one forward pass in evaluation mode, and fetching its batch where the data is real."""

from __future__ import annotations

from perfexp.data import Batches
from perfexp.models import Session
from perfexp.modes import State, Step


class Inference:
    """Forward passes without autograd."""

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        """See `Mode`."""
        state = State(batch=batches.next())
        fetch, run = batches.next, session.forward
        inputs = state.batch.inputs if state.batch else None

        def data() -> None:
            state.batch = fetch()

        def forward() -> None:
            state.outputs = run(state.batch.inputs)  # type: ignore[union-attr]

        def forward_constant() -> None:
            state.outputs = run(inputs)

        def both() -> None:
            data()
            forward()

        constant = batches.constant
        return Step(
            call=forward_constant if constant else both,
            segments=(("forward", forward_constant),) if constant else (("data", data), ("forward", forward)),
            active=session.inferring,
            batch_size=batch_size,
            state=state,
        )
