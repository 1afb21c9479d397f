"""Batches that stay on the device: no data phase disturbs the measurement (data=synthetic).

`Synthetic` has random inputs. `Rotating` has copies of the same batch at many addresses, together
larger than the device's caches (cache=rotate), so that each call reads its inputs from memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice
from typing import Any

from perfexp.data import Batches
from perfexp.errors import UserError
from perfexp.models import Batch, Session

#: Size of all copies together, relative to the size of the caches.
_TIMES_CACHE = 2


class Cycled:
    """Batches on the device, in rotation.

    Args:
        batches: endless batches.
        per_epoch: batches in one pass; None for endless data.
        constant: whether they share their inputs.
    """

    on_device = True

    def __init__(self, batches: Iterable[Batch], per_epoch: int | None, *, constant: bool) -> None:
        self._cycle, self.per_epoch, self.constant = iter(batches), per_epoch, constant

    def next(self) -> Batch:
        return next(self._cycle)

    def epoch(self) -> Iterator[Batch]:
        return islice(self._cycle, self.per_epoch or 0)


class Rotating(Cycled):
    """Copies of the same inputs in rotation; `measuring` wraps a point's batches with it.

    Together they are larger than `cache_bytes`, so that calls read their inputs from memory.

    Args:
        cache_bytes: size of the device's caches.
    """

    def __init__(self, batches: Batches, session: Session, cache_bytes: int) -> None:
        first = batches.next()
        size = _size(first.inputs) or cache_bytes or 1
        self.copies = max(math.ceil(_TIMES_CACHE * cache_bytes / size) + 1, 2)
        inputs = [first.inputs, *(session.copy(first).inputs for _ in range(self.copies - 1))]
        rotating = (Batch(inputs=copy, targets=batches.next().targets) for copy in cycle(inputs))
        super().__init__(rotating, batches.per_epoch, constant=False)


def _size(inputs: Any) -> int:
    """Return the bytes of a call's inputs, which may be several tensors."""
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if isinstance(inputs, tuple):
        return sum(map(_size, inputs))
    return int(getattr(inputs, "nbytes", 0))


def on_device(batches: Batches) -> bool:
    """Return whether all batches are already on the device, or are created there.

    Calls with such batches have no data phase.
    """
    return batches.constant or getattr(batches, "on_device", False)


#: Number of label sets for the same inputs. A single set is soon memorized: loss and gradients
#: become zeros and denormal numbers, which devices compute faster or slower than other numbers.
_LABELS = 8
#: Limit beyond any data set.
_MOST_SAMPLES = 10**12


class Synthetic:
    """Random inputs, with several sets of random labels for the same inputs in training.

    `num_samples` is the nominal size of an epoch; without it the data is endless.
    """

    labelled = False
    num_classes: int | None = None
    held_out = False
    workers = 0

    def __init__(self, *, num_samples: int | None = None) -> None:
        if num_samples is not None and not 0 < num_samples <= _MOST_SAMPLES:
            raise UserError(
                f"data.num_samples={num_samples}: a whole number from 1 to {_MOST_SAMPLES:,}, or "
                "null."
            )
        self.num_samples = num_samples

    def open(
        self,
        *,
        session: Session,
        input_size: tuple[int, int],
        batch_size: int,
        training: bool,
        seed: int,
    ) -> AbstractContextManager[Cycled]:
        """Open endless batches with random inputs; see `perfexp.data.Data`."""
        per_epoch = None if self.num_samples is None else max(1, self.num_samples // batch_size)
        first = session.random_batch(input_size, batch_size, seed)
        seeds = range(seed + 1, seed + (_LABELS if training else 1))

        def batches() -> Iterator[Batch]:
            """Yield the batches in turn, without end; in training with different targets."""
            if first.targets is None:
                yield first  # the first call may determine the shape of targets
                first.targets = session.random_targets(input_size, batch_size, seed)
            others = [
                Batch(
                    inputs=first.inputs,
                    targets=session.random_targets(input_size, batch_size, other_seed),
                )
                for other_seed in seeds
            ]
            yield from cycle([first, *others])

        return nullcontext(Cycled(batches(), per_epoch, constant=True))
