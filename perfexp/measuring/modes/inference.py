"""Inference: one forward pass in evaluation mode, after fetching its batch if the data is real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfexp.data import Batches
from perfexp.measuring.modes import State, Step
from perfexp.models import Session


class Inference:
    """Forward passes without autograd (mode=inference).

    The keys are described in `plan/key_descriptions.yaml`.
    """

    def __init__(self, *, trained: bool = False, batch_size: Any = None) -> None:
        self.trained = trained

    def prepare(self, *, session: Session, batches: Batches, batch_size: int) -> Step:
        """See `Mode`; the phases are `data`, unless the inputs never change, and `forward`."""
        state, run = State(source=batches.next), session.forward

        call: Callable[[], None]
        # the inputs are already on the device, so there is no data segment
        if batches.constant:
            inputs = batches.next().inputs

            def constant() -> None:
                state.outputs = run(inputs)

            call, segments = constant, [("forward", constant)]
        else:

            def data() -> None:
                state.batch = state.source()

            def forward() -> None:
                assert state.batch is not None
                state.outputs = run(state.batch.inputs)

            def both() -> None:
                data()
                forward()

            call, segments = both, [("data", data), ("forward", forward)]
        return Step(
            call=call,
            segments=tuple(segments),
            active=session.inferring,
            batch_size=batch_size,
            state=state,
        )
