"""Load samples through torch's DataLoader, in processes that end with this process.

`Loading` is the base class of all data sets on disk. A subclass returns its `Samples`: which items
there are, how one is prepared, and how several are joined to a batch. `LoadedBatches` then gives
batches to the measuring loop.
"""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from perfexp.data import Batches
from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.host import lifeline, locks
from perfexp.models import Batch, Session

#: Longest path of a temporary folder that leaves room for a Unix socket
#: (`/pymp-xxxxxxxx/listener-xxxxxxxx`). Its whole path has at most 107 bytes on Linux, 103 on
#: macOS.
_LONGEST_FOLDER = 70

#: ImageNet's mean and standard deviation: red, green, blue, for values from 0 to 1.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


#: Inputs and targets of one sample; the targets are None without labels.
Sample = tuple[torch.Tensor, Any]


def stacked(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a batch's inputs and targets from samples; None if the samples have no targets."""
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), None if targets[0] is None else torch.stack(targets)


class Samples(Dataset[Any]):
    """A split's samples, prepared in the loader's processes.

    A `UserError` is returned as a sample or batch, since torch would wrap its message in a stack
    trace.

    Args:
        items: sources of the samples: a sequence, or another data set.
        prepare: returns a sample's inputs and targets; raises `UserError`. Targets are a tensor, or
            None in all samples.
        join: returns a batch's inputs and targets, on the host; raises `UserError`.
    """

    def __init__(
        self,
        items: Any,
        prepare: Callable[[Any], Sample] = tuple,
        join: Callable[[Sequence[Sample]], Any] = stacked,
    ) -> None:
        self._items, self._prepare, self._join = items, prepare, join

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Sample | UserError:
        """Return a prepared sample, or the error that it raised."""
        try:
            return self._prepare(self._items[index])
        except UserError as error:
            return error

    def collate(self, samples: list[Any]) -> tuple[Any, torch.Tensor | None] | UserError:
        """Join samples to a batch on the host, or return the first error.

        torch's DataLoader calls it in the loading processes.
        """
        try:
            for sample in samples:
                if isinstance(sample, UserError):
                    raise sample
            joined: tuple[Any, torch.Tensor | None] = self._join(samples)
            return joined
        except UserError as error:
            return error


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Return an RGB image as float32 (3, height, width), normalized with ImageNet's statistics.

    Images, clips and Cityscapes end their preparation with it.
    """
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div_(255)
    return (
        pixels.sub_(torch.tensor(MEAN).view(3, 1, 1))
        .div_(torch.tensor(STD).view(3, 1, 1))
        .contiguous()
    )


class Order(Sampler[int]):
    """The order of samples, pass after pass, for torch's DataLoader.

    With a seed, each pass has a new random order; without one, samples come in order. An iteration
    continues after a pass if `endless` was set when it began, so that loading goes on ahead.
    """

    def __init__(self, count: int, seed: int | None) -> None:
        self._count = count
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.endless = True

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Yield sample numbers: one pass, or pass after pass while endless."""
        endless = self.endless
        while True:
            if self._generator is None:
                yield from range(self._count)
            else:
                yield from torch.randperm(self._count, generator=self._generator).tolist()
            if not endless:
                return


@dataclass(kw_only=True, eq=False)
class Loading:
    """Base class of data loaded by processes; raises `UserError` if a number is too small.

    Its fields are configuration keys, for example `data.workers`, the number of loading processes
    (0 loads in this process). `plan/key_descriptions.yaml` describes them.
    """

    workers: int = 2
    pin_memory: bool = False
    prefetch_factor: int = 2

    def __post_init__(self) -> None:
        if self.workers < 0 or self.prefetch_factor < 1:
            settings = f"data.workers={self.workers} data.prefetch_factor={self.prefetch_factor}"
            raise UserError(f"{settings}: at least 0 and 1.")

    def samples(
        self, session: Session, input_size: tuple[int, int], *, training: bool, seed: int
    ) -> Samples:
        """Return the samples for training or evaluation; each data set implements it.

        `open` calls it for each point.

        Raises:
            UserError: the data set has no samples with this input size, or none to train with.
        """
        raise NotImplementedError

    def open(
        self,
        *,
        session: Session,
        input_size: tuple[int, int],
        batch_size: int,
        training: bool,
        seed: int,
    ) -> AbstractContextManager[Batches]:
        """Open batches for one point; see `perfexp.data.Data`.

        The loader's processes persist between passes over the data.
        """
        samples = self.samples(session, input_size, training=training, seed=seed)
        if training:
            check_batch(len(samples), batch_size)
        order = Order(len(samples), seed if training else None)
        _shorten_sockets()
        # a new pass must not start processes
        loader = DataLoader(
            samples,
            batch_size=batch_size,
            sampler=order,
            drop_last=training,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            prefetch_factor=self.prefetch_factor if self.workers else None,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            collate_fn=samples.collate,
            generator=torch.Generator().manual_seed(seed),
            # torch checks every five seconds, and misses a parent that ended earlier
            worker_init_fn=partial(_tie, os.getpid()),
        )
        return closing(LoadedBatches(loader, order, batch_size, session))


class LoadedBatches:
    """A loader's batches, valid while the context of their data is open.

    In `next` the order continues after a pass, so that no pass begins with a wait.
    """

    constant = False

    def __init__(
        self, loader: DataLoader[Any], order: Order, batch_size: int, session: Session
    ) -> None:
        self.per_epoch: int | None = len(loader)
        self._loader: DataLoader[Any] | None = loader
        self._iterator: Iterator[Any] = iter(())
        self._on_host: Batch | None = None
        self._order, self._batch_size, self._session = order, batch_size, session

    def next(self) -> Batch:
        """Return the next batch on the device, always a full one (see `Batches`).

        A smaller batch would be another measurement, so it is skipped.

        Raises:
            UserError: an image, label or mask is unusable.
            Unsupported: there are fewer images than in a batch.
            PerfexpError: a worker process died.
        """
        check_batch(len(self._order), self._batch_size)
        while True:
            batch = self._load()
            if batch is None:
                self._restart()
            elif len(batch.inputs) == self._batch_size:
                # Free the previous batch only here, while the device may still work. Returning a
                # worker's memory takes host time (3.6 ms for 11 MB on an AMD EPYC).
                self._on_host = batch
                return self._session.place(batch)

    def epoch(self) -> Iterator[Batch]:
        """Yield one whole pass (see `Batches`); errors are those of `next`.

        In evaluation the last batch may be smaller.
        """
        with patch.object(self._order, "endless", False):
            self._restart()
            while (batch := self._load()) is not None:
                yield self._session.place(batch)

    def close(self) -> None:
        """End the worker processes; torch ends them when the iterator is deleted."""
        self._iterator = iter(())
        self._loader = self._on_host = None

    def _restart(self) -> None:
        """Begin a pass in a new order."""
        assert self._loader is not None, "these batches are closed"
        self._iterator = iter(self._loader)

    def _load(self) -> Batch | None:
        """Return the next batch on the host; None at the end of a pass.

        Raises:
            UserError: a sample is unusable.
            PerfexpError: a worker process died.
        """
        failure = None
        try:
            loaded = next(self._iterator, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            failure = str(error).splitlines()[0]
        except (EOFError, OSError) as error:  # the process died during the transfer
            failure = f"the process ended while its batch was fetched ({type(error).__name__})."
        if failure:
            # While the iterator exists, torch raises its error again in any code that runs when
            # a child ends. The traceback would hold the iterator, so the error is not chained.
            self.close()
            raise PerfexpError(
                f"A process that loads images failed: {failure} It may lack memory, or shared "
                "memory (in a container: --shm-size=8g); data.workers=0 needs none."
            )
        if isinstance(loaded, UserError):
            raise loaded
        if loaded is None:
            return None
        return Batch(inputs=loaded[0], targets=loaded[1])


def check_batch(count: int, batch_size: int) -> None:
    """Raise `Unsupported` if there are fewer samples than in a batch.

    Such a point is recorded as unsupported, and other points continue.
    """
    if count < batch_size:
        raise Unsupported(
            f"There are {count} samples, fewer than the {batch_size} of one batch. Use a smaller "
            "batch_size, or more samples."
        )


def _shorten_sockets() -> None:
    """Choose a folder for the sockets between the loader's processes.

    If a socket path is too long, multiprocessing prints an error in the loading process, and this
    process waits for its batch forever. TMPDIR is long, for example, in jobs on some clusters.
    """
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        with patch.object(tempfile, "tempdir", str(locks.TEMPORARY)):
            # created once per process, and inherited by its children
            multiprocessing.util.get_temp_dir()


def _tie(parent: int, _number: int) -> None:
    """Initialize a loader process: it ends with the process `parent`."""
    lifeline.die_with(parent)
