"""Load images through torch's DataLoader, with processes that end with this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.host import lifeline
from perfexp.models import Batch, Session


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Settings of a loader of images.

    Attributes:
        workers: number of processes that load images; 0 loads them between the model's calls.
        pin_memory: whether batches are in pinned memory, for asynchronous copies.
        prefetch_factor: batches that each worker loads ahead.

    Raises:
        UserError: a number is too small.
    """

    workers: int
    pin_memory: bool
    prefetch_factor: int

    def __post_init__(self) -> None:
        if self.workers < 0 or self.prefetch_factor < 1:
            raise UserError(
                f"data.workers={self.workers} data.prefetch_factor={self.prefetch_factor}: at least 0 and 1."
            )

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        *,
        training: bool,
        seed: int,
        order: Sampler[int] | None = None,
    ) -> DataLoader[Any]:
        """A loader whose processes persist from one pass over the data to the next.

        Args:
            dataset: samples or errors, since torch would wrap an exception's message in a stack trace.
            training: whether to shuffle, unless `order` is given.
            seed: seed of the order and of the processes' random numbers.
        """
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=order,
            shuffle=training and order is None,
            drop_last=training,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,  # starting over must not start processes
            prefetch_factor=self.prefetch_factor if self.workers else None,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            collate_fn=collate,
            generator=torch.Generator().manual_seed(seed),
            # torch's own check, every five seconds, misses a parent that ended earlier
            worker_init_fn=partial(_tie, os.getpid()),
        )


class LoadedBatches:
    """Batches of a loader, valid while the context of their data is open."""

    constant = False

    def __init__(self, loader: DataLoader[Any], count: int, batch_size: int, session: Session) -> None:
        self.per_epoch: int | None = len(loader)
        self._loader: DataLoader[Any] | None = loader
        self._iterator: Iterator[Any] = iter(())
        self._on_host: Batch | None = None
        self._count = count
        self._batch_size = batch_size
        self._session = session

    def next(self) -> Batch:
        """See `Batches`. The batch is always full, since a smaller call would be another measurement.

        Raises:
            UserError: an image or its label cannot be used.
            Unsupported: there are fewer images than in a batch.
            PerfexpError: a worker process died.
        """
        check_batch(self._count, self._batch_size)
        while True:
            batch = self._load()
            if batch is None:
                self._restart()
            elif len(batch.inputs) == self._batch_size:
                # Free the previous batch only here, while the device may still work: returning a worker's memory
                # takes host time (3.6 ms for 11 MB of shared memory on an AMD EPYC).
                self._on_host = batch
                return self._session.place(batch)

    def epoch(self) -> Iterator[Batch]:
        """See `Batches`. In evaluation the last one may be smaller.

        Raises:
            UserError: an image or its label cannot be used.
            PerfexpError: a worker process died.
        """
        self._restart()
        while (batch := self._load()) is not None:
            yield self._session.place(batch)

    def close(self) -> None:
        """End the worker processes, which torch does once the iterator is deleted."""
        self._iterator = iter(())
        self._loader = self._on_host = None

    def _restart(self) -> None:
        assert self._loader is not None, "these batches are closed"
        self._iterator = iter(self._loader)

    def _load(self) -> Batch | None:
        """The next batch, on the host; None at the end of the data."""
        died = None
        try:
            loaded = next(self._iterator, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            died = str(error).splitlines()[0]
        except (EOFError, OSError) as error:  # the process died while its batch was transferred
            died = f"the process ended while its batch was fetched ({type(error).__name__})."
        if died:
            # While the iterator exists, torch raises its error again in any code that runs when a child ends.
            # The error's traceback would hold the iterator, so it is not chained.
            self.close()
            raise PerfexpError(
                f"A process that loads pictures failed: {died} It may lack memory, or shared memory (in a container: "
                "--shm-size=8g); data.workers=0 needs none."
            )
        if isinstance(loaded, UserError):
            raise loaded
        return None if loaded is None else Batch(inputs=loaded[0], targets=loaded[1])


def check_batch(count: int, batch_size: int) -> None:
    """Raise `Unsupported` unless there are enough images for a batch."""
    if count < batch_size:
        raise Unsupported(
            f"There are {count} pictures, fewer than the {batch_size} of one batch. Use a smaller batch_size, or more "
            "pictures."
        )


def _tie(parent: int, worker: int) -> None:
    """Initialize process number `worker` of a loader."""
    lifeline.die_with(parent)
