"""Sources of the inputs of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from perfexp.errors import UserError
from perfexp.models import Batch, Session


class Batches(Protocol):
    """Batches of one size, ready for the model.

    Attributes:
        constant: whether all batches share inputs that are on the device already, so that inference has no data phase.
        per_epoch: batches in one pass over the data, or None for endless data.
    """

    constant: bool
    per_epoch: int | None

    def next(self) -> Batch:
        """The next batch, on the device; starts over at the end of the data."""

    def epoch(self) -> Iterator[Batch]:
        """One whole pass from its beginning, on the device."""


class Data(Protocol):
    """Interface of the object that a `data` node of the configuration builds.

    It may have an attribute `problems`: a line about each file that cannot be used and is left out.

    Attributes:
        labelled: whether the targets are real, so that an accuracy is meaningful.
        num_classes: number of classes of the labels, or None where the model decides.
        held_out: whether evaluation uses other samples than training.
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
        """Batches of one size (height and width in pixels), closed on leaving.

        Raises `UserError` if the data cannot be read, `Unsupported` if there are fewer samples than in one batch.
        """


def check(data: Data) -> None:
    """Check that user-defined data has all members of `Data`; raises `UserError` otherwise."""
    lacking = [name for name in (*Data.__annotations__, "open") if not hasattr(data, name)]
    if lacking:
        raise UserError(
            f"data: {type(data).__name__} lacks {', '.join(lacking)}; see perfexp.data.Data."
        )
