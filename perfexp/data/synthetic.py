"""Random batches that stay on the device, so that only the model is timed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from perfexp.data.rotating import Cycled
from perfexp.errors import UserError
from perfexp.models import Batch, Session

#: Number of label sets for the same inputs. With one, training soon memorizes it; loss and gradients become zeros and
#: denormal numbers, which some devices compute faster and some slower than others.
_LABELS = 8
#: Limit beyond any data set.
_MOST_SAMPLES = 10**12


class Synthetic:
    """Random inputs with contradicting labels from call to call; `num_samples` of an epoch is nominal."""

    labelled = False
    num_classes: int | None = None
    held_out = False
    workers = 0

    def __init__(self, *, num_samples: int | None = None) -> None:
        if num_samples is not None and not 0 < num_samples <= _MOST_SAMPLES:
            raise UserError(f"data.num_samples={num_samples}: a whole number from 1 to {_MOST_SAMPLES:,}, or null.")
        self.num_samples = num_samples

    def open(
        self, *, session: Session, input_size: tuple[int, int], batch_size: int, training: bool, seed: int
    ) -> AbstractContextManager[Cycled]:
        per_epoch = None if self.num_samples is None else max(1, self.num_samples // batch_size)
        first = session.random_batch(input_size, batch_size, seed)
        others = [
            session.random_targets(input_size, batch_size, seed + n) for n in range(1, _LABELS if training else 1)
        ]
        batches = [first, *(Batch(inputs=first.inputs, targets=targets) for targets in others)]
        return nullcontext(Cycled(batches, per_epoch, constant=True))
