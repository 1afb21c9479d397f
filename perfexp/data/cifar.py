"""CIFAR-10 and CIFAR-100: small labeled images, prepared by workers or kept on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from perfexp.data import Batches, cifar_files
from perfexp.data.device_batches import Augmentation, DeviceBatches, draw, padded
from perfexp.data.loading import Loading, Sample, Samples, stacked
from perfexp.devices import Pipeline
from perfexp.errors import UserError
from perfexp.models import Session

_SIZE = cifar_files.SHAPE[1:]


@dataclass(kw_only=True, eq=False)
class Cifar(Loading):
    """Images from CIFAR-10, CIFAR-100 or files in their format, with a class each.

    Training images are shuffled, cropped with a border of four black pixels and mirrored at random.
    All images are normalized with the training images' mean and standard deviation. Raises
    `UserError` if files are missing or have another format.
    """

    labelled = True
    held_out = True

    root: str
    classes: int = 10
    pipeline: Pipeline = Pipeline.loader
    download: bool = False
    pin_memory: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes not in cifar_files.FORMATS:
            raise UserError(
                f"data.classes={self.classes}: set 10 or 100, which data=cifar10 and data=cifar100 "
                "do."
            )
        # a plan contains the pipeline's name
        folder, self.pipeline = (
            Path(self.root).expanduser(),
            Pipeline(self.pipeline),
        )
        self.workers = self.workers if self.pipeline is Pipeline.loader else 0
        if self.download:
            cifar_files.download(folder, self.classes)
        contents = cifar_files.read(folder, self.classes)
        self.num_classes: int | None = len(contents.classes)
        self.num_samples: int | None = len(contents.train.labels)
        self._train, self._test = _tensors(contents.train), _tensors(contents.test)
        self._mean_and_std = _mean_and_std(contents.train)

    def open(
        self,
        *,
        session: Session,
        input_size: tuple[int, int],
        batch_size: int,
        training: bool,
        seed: int,
    ) -> AbstractContextManager[Batches]:
        if tuple(input_size) != _SIZE:
            raise UserError(
                f"CIFAR's images are 32 × 32, not {' × '.join(map(str, input_size))}: leave "
                "input_size out, or set 32."
            )
        pixels, labels = self._train if training else self._test
        if self.pipeline is Pipeline.device:
            return nullcontext(
                DeviceBatches(
                    pixels,
                    labels,
                    self._mean_and_std,
                    session=session,
                    batch_size=batch_size,
                    training=training,
                    seed=seed,
                )
            )
        return super().open(
            session=session,
            input_size=input_size,
            batch_size=batch_size,
            training=training,
            seed=seed,
        )

    def samples(
        self, session: Session, input_size: tuple[int, int], *, training: bool, seed: int
    ) -> Samples:
        augmentation = Augmentation(*self._mean_and_std, _SIZE)
        join = partial(_augmented, augmentation=augmentation, training=training)
        return Samples(TensorDataset(*(self._train if training else self._test)), join=join)


def _augmented(
    samples: Sequence[Sample], *, augmentation: Augmentation, training: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a batch; in training, crop and mirror it with torch's generator."""
    pixels, labels = stacked(samples)
    if training:
        draws = draw(torch.empty(3, len(pixels), dtype=torch.int64))
        pixels = augmentation.cropped(padded(pixels), torch.arange(len(pixels)), draws)
    return augmentation.normalized(pixels), labels


def _tensors(images: cifar_files.LabeledImages) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(images.pixels), torch.from_numpy(images.labels)


def _mean_and_std(images: cifar_files.LabeledImages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixel mean and standard deviation by channel, from 0 to 255."""
    channels = (torch.from_numpy(channel).flatten() for channel in images.pixels.swapaxes(0, 1))
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in channels])
    values = torch.arange(256, dtype=torch.float64)
    shares = counts.double() / counts.sum(dim=1, keepdim=True)
    mean = shares @ values
    return mean, (shares @ values**2 - mean**2).sqrt()
