"""Data: sources for call inputs.

May import: devices, host, models, records.
Used by: commands, measuring, worker.

A `data` node of the configuration names a class here. The worker builds it once and opens it for
each point (input size and batch size), which gives `Batches`. Each source has its own module:
`synthetic` (random numbers), `images`, `clips`, `cifar`, `cityscapes` and `skeletons`. `made`
generates small data sets for `perfexp make-data`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from perfexp.errors import UserError
from perfexp.models import Batch, Session


class Batches(Protocol):
    """Batches for one input size and batch size, ready for the model.

    Attributes:
        constant: whether all batches share inputs that are already on the device, so that inference
            has no data phase.
        per_epoch: batches in one pass over the data; None for endless data.
    """

    constant: bool
    per_epoch: int | None

    def next(self) -> Batch:
        """Return the next batch, on the device; start over at the end of the data."""

    def epoch(self) -> Iterator[Batch]:
        """Yield one whole pass from its beginning, on the device."""


class Data(Protocol):
    """Interface of objects built from a `data` node of the configuration.

    It may have an attribute `problems`: a line about each unusable file that is left out, such as a
    damaged image.

    Attributes:
        labelled: whether the targets are real, so that an accuracy is meaningful.
        num_classes: number of label classes; None if the model decides.
        num_samples: number of training samples, the size of an epoch; None for endless data.
        held_out: whether evaluation and training use different samples.
        workers: number of processes that load images; 0 for none.
    """

    labelled: bool
    num_classes: int | None
    num_samples: int | None
    held_out: bool
    workers: int

    def open(
        self,
        *,
        session: Session,
        input_size: tuple[int, int],
        batch_size: int,
        training: bool,
        seed: int,
    ) -> AbstractContextManager[Batches]:
        """Return a context with batches for one point; leaving it ends the loader's processes.

        Args:
            session: the open model, which places batches on its device.
            input_size: height and width in pixels.
            training: whether to open the training samples, or those for evaluation.
            seed: seed for the order and for random crops.

        Raises:
            UserError: the data cannot be read.
            Unsupported: there are fewer samples than in one batch.
        """


def check(data: Data) -> None:
    """Raise `UserError` if a user's own data class lacks a member of `Data`.

    The worker calls it before it opens the data.
    """
    missing = [name for name in (*Data.__annotations__, "open") if not hasattr(data, name)]
    if missing:
        raise UserError(
            f"data: {type(data).__name__} lacks {', '.join(missing)}; see perfexp.data.Data."
        )
