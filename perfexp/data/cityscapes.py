"""Cityscapes: images of streets with a class per pixel, from a folder, through torch's DataLoader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset, Sampler

from perfexp.data.cityscapes_folder import MADE, Pair, find_pairs
from perfexp.data.cityscapes_masks import CLASSES, read_mask, train_ids
from perfexp.data.image_files import read_picture, to_tensor
from perfexp.data.loading import LoadedBatches, Loading, check_batch
from perfexp.data.mmseg_pipeline import Pipeline
from perfexp.errors import UserError
from perfexp.models import Batch, Session

#: Range of a random crop's magnification (pytorch/vision, references/segmentation/presets.py, and the pipelines of
#: mmsegmentation).
_SCALES = (0.5, 2.0)

#: A prepared image and the train ids of its pixels, or an error.
Sample = tuple[torch.Tensor, torch.Tensor] | UserError


class Preparation(Protocol):
    """Preparation of a pair in the loader's processes."""

    def __call__(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare a sample; raises `UserError` if its files cannot be used."""

    def collate(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Sized, torch.Tensor]:
        """Inputs and targets of a batch, on the host; raises `UserError` if the samples do not form a batch."""


@runtime_checkable
class Configured(Protocol):
    """A session whose model has a configuration of mmsegmentation, and so pipelines for its images."""

    @property
    def config(self) -> Any:
        """The mmengine configuration."""


class Cityscapes:
    """A folder with images leftImg8bit/{train,val}/CITY/*_leftImg8bit.png and masks gtFine/{train,val}/CITY/….

    A mask holds train ids (*_gtFine_labelTrainIds.png) or label ids (*_gtFine_labelIds.png). A model of mmsegmentation
    gets its images from the pipelines of its configuration, other models from random crops, or whole images in
    evaluation.

    Args:
        workers: number of processes that load images; 0 loads them between the model's calls.
        pin_memory: whether batches are in pinned memory, for asynchronous copies.
        prefetch_factor: batches that each worker loads ahead.

    Raises:
        UserError: the folder is incomplete.
    """

    def __init__(self, *, root: str, workers: int = 2, pin_memory: bool = False, prefetch_factor: int = 2) -> None:
        self._root = Path(root).expanduser()
        self.workers = workers
        self._loading = Loading(workers=workers, pin_memory=pin_memory, prefetch_factor=prefetch_factor)
        self._train, self._val = find_pairs(self._root, "train"), find_pairs(self._root, "val")
        self.labelled = not (self._root / MADE).is_file()  # an accuracy on made masks would mean nothing
        self.num_classes: int | None = len(CLASSES)
        self.num_samples: int | None = len(self._train)
        self.held_out = True

    @contextmanager
    def open(
        self, *, session: Session, input_size: tuple[int, int], batch_size: int, training: bool, seed: int
    ) -> Iterator[StreetBatches]:
        pairs = self._train if training else self._val
        if training:
            check_batch(len(pairs), batch_size)
        order = _Order(len(pairs), seed if training else None)
        preparation = _preparation(session, input_size, training=training)
        if not self._loading.workers:  # mmsegmentation's pipelines use these generators; torch seeds its workers'
            random.seed(seed)
            np.random.seed(seed % 2**32)
        streets, collate = _Streets(pairs, preparation), _Collate(preparation.collate)
        loader = self._loading.loader(streets, batch_size, collate, training=training, seed=seed, order=order)
        batches = StreetBatches(loader, order, batch_size, session)
        try:
            yield batches
        finally:
            batches.close()


class StreetBatches(LoadedBatches):
    """Endless batches of images, so that no pass over the data begins with a wait."""

    def __init__(self, loader: DataLoader[Any], order: _Order, batch_size: int, session: Session) -> None:
        super().__init__(loader, len(order), batch_size, session)
        self._order = order

    def epoch(self) -> Iterator[Batch]:
        """See `Batches`. In evaluation the last one may be smaller.

        Raises:
            UserError: an image or a mask cannot be used.
            PerfexpError: a worker process died.
        """
        self._order.endless = False
        try:
            yield from super().epoch()
        finally:
            self._order.endless = True


class Crops:
    """Preparation for any model: random crops, half of them mirrored, in training; whole images in evaluation.

    A crop enlarges the image 0.5 to 2 times, or by as much more as it takes to fill the crop.
    """

    def __init__(self, size: tuple[int, int], *, training: bool, classes: int) -> None:
        self._size, self._training, self._classes = size, training, classes

    def __call__(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Preparation`: float32 (3, height, width), normalized, and int64 (height, width)."""
        picture = read_picture(pair.picture)
        whole = (picture.height, picture.width)
        mask = Image.fromarray(train_ids(read_mask(pair.mask), pair.mask, size=whole, classes=self._classes))
        box = self._random_box(whole) if self._training else (0, 0, picture.width, picture.height)
        shape = (self._size[1], self._size[0])
        picture = picture.resize(shape, Image.Resampling.BILINEAR, box=box)
        mask = mask.resize(shape, Image.Resampling.NEAREST, box=box)
        if self._training and torch.rand(()) < 0.5:
            picture, mask = ImageOps.mirror(picture), ImageOps.mirror(mask)
        return to_tensor(picture), torch.from_numpy(np.array(mask)).long()

    def collate(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Sized, torch.Tensor]:
        return torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])

    def _random_box(self, whole: tuple[int, int]) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of a random part of an image of this height and width, by torch's generator."""
        fraction, across, down = torch.rand(3).tolist()
        filling = max(self._size[0] / whole[0], self._size[1] / whole[1])
        scale = max(_SCALES[0] + fraction * (_SCALES[1] - _SCALES[0]), filling)
        height, width = min(self._size[0] / scale, whole[0]), min(self._size[1] / scale, whole[1])
        left, top = across * (whole[1] - width), down * (whole[0] - height)
        return left, top, min(left + width, whole[1]), min(top + height, whole[0])


def _preparation(session: Session, size: tuple[int, int], *, training: bool) -> Preparation:
    classes = min(len(CLASSES), session.num_classes or len(CLASSES))
    if isinstance(session, Configured):
        return Pipeline(session.config, size, training=training, classes=classes)
    return Crops(size, training=training, classes=classes)


class _Order(Sampler[int]):
    """The order of samples, one pass after the other, in a new random order per pass if there is a seed.

    An iteration continues after a pass if `endless` was set when it began.
    """

    def __init__(self, count: int, seed: int | None) -> None:
        self._count = count
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.endless = True

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        endless = self.endless
        while True:
            if self._generator is None:
                yield from range(self._count)
            else:
                yield from torch.randperm(self._count, generator=self._generator).tolist()
            if not endless:
                return


class _Streets(Dataset[Sample]):
    """The prepared pairs of a split. An error is a sample, since torch would wrap its message in a stack trace."""

    def __init__(self, pairs: list[Pair], preparation: Preparation) -> None:
        self._pairs, self._preparation = pairs, preparation

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Sample:
        try:
            return self._preparation(self._pairs[index])
        except UserError as error:
            return error


class _Collate:
    """Samples as a batch on the host, or the first error."""

    def __init__(
        self, together: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], tuple[Sized, torch.Tensor]]
    ) -> None:
        self._together = together

    def __call__(self, samples: list[Sample]) -> tuple[Sized, torch.Tensor] | UserError:
        good = []
        for sample in samples:
            if isinstance(sample, UserError):
                return sample
            good.append(sample)
        try:
            return self._together(good)
        except UserError as error:
            return error
