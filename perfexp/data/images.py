"""Images: pictures from a folder, by class in subfolders, through torch's DataLoader with its worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from perfexp.data.pictures import Split, centre_crop, find_split, random_crop, read_picture, to_tensor
from perfexp.errors import PerfexpError, Unsupported, UserError
from perfexp.models import Batch, Session


class Images:
    """A folder with a subfolder of pictures for each class; or `train` and `val`, each such a folder; or just pictures.

    In training pictures are shuffled, cut at random and mirrored; in evaluation they keep their order and their middle.

    Args:
        root: the folder.
        workers: processes that load pictures; 0 loads them between the model's calls.
        pin_memory: whether batches are put where a CUDA device can fetch them by itself.
        prefetch_factor: batches that each worker loads ahead.

    Raises:
        UserError: the folder can't be read, or holds no pictures.
    """

    def __init__(
        self,
        *,
        root: str,
        workers: int = 2,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
    ) -> None:
        if workers < 0 or prefetch_factor < 1:
            raise UserError(f"data.workers={workers} data.prefetch_factor={prefetch_factor}: at least 0 and 1.")
        self._root = Path(root).expanduser()
        self._workers = workers
        self._pin_memory = pin_memory
        self._prefetch_factor = prefetch_factor
        self._train, self._val = _find_splits(self._root)
        self.labelled = self._train.labels is not None
        self.num_classes = len(self._train.classes) if self.labelled else None
        self.num_samples: int | None = len(self._train.files)
        self.held_out = self._val is not self._train

    @contextmanager
    def open(
        self, *, session: Session, input_size: tuple[int, int], batch_size: int, training: bool, seed: int
    ) -> Iterator[ImageBatches]:
        """See `Data`."""
        split = self._train if training else self._val
        if training and not self.labelled:
            raise UserError(
                f"The pictures in {self._root} have no classes to learn. Put them into a subfolder for each class, or "
                "use mode=inference."
            )
        if training:
            _check_batch(split, batch_size)
        batches = ImageBatches(self._loader(split, input_size, batch_size, training, seed), split, batch_size, session)
        try:
            yield batches
        finally:
            batches.close()

    def _loader(
        self, split: Split, input_size: tuple[int, int], batch_size: int, training: bool, seed: int
    ) -> DataLoader[_Sample]:
        return DataLoader(
            _Pictures(split, input_size, random_crop if training else centre_crop),
            batch_size=batch_size,
            shuffle=training,
            drop_last=training,  # a smaller call would be another measurement
            num_workers=self._workers,
            persistent_workers=self._workers > 0,  # starting over must not start processes
            prefetch_factor=self._prefetch_factor if self._workers else None,
            pin_memory=self._pin_memory and torch.cuda.is_available(),
            collate_fn=_collate,
            generator=torch.Generator().manual_seed(seed),
        )


class ImageBatches:
    """Batches of pictures, as long as their folder's context is open.

    Args:
        loader: gives what `_collate` returns.
        split: the pictures.
        batch_size: of a full batch.
        session: the model that takes them.
    """

    constant = False

    def __init__(self, loader: DataLoader[_Sample], split: Split, batch_size: int, session: Session) -> None:
        self.per_epoch: int | None = len(loader)
        self._loader: DataLoader[_Sample] | None = loader
        self._iterator: Iterator[Any] = iter(())
        self._split = split
        self._batch_size = batch_size
        self._session = session

    def next(self) -> Batch:
        """See `Batches`. Always a full one: a smaller call would be another measurement.

        Raises:
            UserError: a picture can't be read.
            Unsupported: there are fewer pictures than a batch has.
            PerfexpError: a worker process died.
        """
        _check_batch(self._split, self._batch_size)
        while True:
            batch = self._load()
            if batch is None:
                self._restart()
            elif len(batch.inputs) == self._batch_size:
                return self._session.place(batch)

    def epoch(self) -> Iterator[Batch]:
        """See `Batches`. In evaluation the last one may be smaller.

        Raises:
            UserError: a picture can't be read.
            PerfexpError: a worker process died.
        """
        self._restart()
        while (batch := self._load()) is not None:
            yield self._session.place(batch)

    def close(self) -> None:
        """End the worker processes: torch does so when nothing holds the iterator any longer."""
        self._iterator = iter(())
        self._loader = None

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
        except (EOFError, OSError) as error:  # it died while its batch was handed over
            died = f"the process ended while its batch was fetched ({type(error).__name__})."
        if died:
            # Until the iterator is gone, torch raises its error again at whatever happens to run when a child ends.
            # The error's traceback would hold the iterator, so it is not this one's cause.
            self.close()
            raise PerfexpError(
                f"A process that loads pictures failed: {died} It may lack memory, or shared memory (in a container: "
                "--shm-size=8g); data.workers=0 needs none."
            )
        if isinstance(loaded, UserError):
            raise loaded
        return None if loaded is None else Batch(inputs=loaded[0], targets=loaded[1])


#: A picture and its class, or why it can't be read: torch would wrap an exception's message into a stack's.
_Sample = tuple[torch.Tensor, int | None] | UserError


class _Pictures(Dataset[_Sample]):
    """The pictures of a split, cut to a size (height, width); a sample's inputs are (3, height, width)."""

    def __init__(
        self, split: Split, size: tuple[int, int], cut: Callable[[Image.Image, tuple[int, int]], Image.Image]
    ) -> None:
        self._split, self._size, self._cut = split, size, cut

    def __len__(self) -> int:
        return len(self._split.files)

    def __getitem__(self, index: int) -> _Sample:
        try:
            picture = read_picture(self._split.files[index])
        except UserError as error:
            return error
        label = None if self._split.labels is None else self._split.labels[index]
        return to_tensor(self._cut(picture, self._size)), label


def _collate(samples: list[_Sample]) -> tuple[torch.Tensor, torch.Tensor | None] | UserError:
    """Samples as inputs and targets on the host; the first error instead, if there is one."""
    pictures, labels = [], []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        pictures.append(sample[0])
        labels.append(sample[1])
    return torch.stack(pictures), None if None in labels else torch.tensor(labels)


def _find_splits(root: Path) -> tuple[Split, Split]:
    """The pictures of training and of evaluation; the same ones where the folder does not part them."""
    if not root.is_dir():
        raise UserError(f"data.root is no folder: {root.absolute()}. Name the one that holds the pictures.")
    try:
        if not ((root / "train").is_dir() and (root / "val").is_dir()):
            split = find_split(root, root)
            return split, split
        train, val = find_split(root / "train", root), find_split(root / "val", root)
    except OSError as error:
        raise UserError(f"{error.filename} can't be read: {error.strerror}.") from error
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(
            f"{root / 'train'} and {root / 'val'} hold different classes: {', '.join(odd[:5])} are in one of them only."
        )
    return train, val


def _check_batch(split: Split, batch_size: int) -> None:
    if len(split.files) < batch_size:
        raise Unsupported(
            f"There are {len(split.files)} pictures, fewer than the {batch_size} of one batch. Use a smaller "
            "batch_size, or more pictures."
        )
