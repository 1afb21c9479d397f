"""Synthetic data: one random batch that stays on the device, so that nothing but the model is timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perfexp.models import Batch, Session


class Synthetic:
    """Random inputs and labels, drawn once for each point.

    Args:
        num_samples: how many samples one epoch is taken to have; nothing of that size is stored.
    """

    labelled = False
    num_classes: int | None = None
    held_out = False

    def __init__(self, *, num_samples: int | None = None) -> None:
        self.num_samples = num_samples

    @contextmanager
    def open(
        self, *, session: Session, input_size: tuple[int, int], batch_size: int, training: bool, seed: int
    ) -> Iterator[SyntheticBatches]:
        """See `Data`."""
        per_epoch = None if self.num_samples is None else max(1, self.num_samples // batch_size)
        yield SyntheticBatches(session.random_batch(input_size, batch_size, seed), per_epoch)


class SyntheticBatches:
    """The same batch again and again.

    Args:
        batch: on the device.
        per_epoch: how many make an epoch.
    """

    constant = True

    def __init__(self, batch: Batch, per_epoch: int | None) -> None:
        self._batch = batch
        self.per_epoch = per_epoch

    def next(self) -> Batch:
        """See `Batches`."""
        return self._batch

    def epoch(self) -> Iterator[Batch]:
        """See `Batches`."""
        for _ in range(self.per_epoch or 0):
            yield self._batch
