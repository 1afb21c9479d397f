"""CIFAR-10 and CIFAR-100: small labeled images (data=cifar10, data=cifar100).

With `pipeline=loader`, processes prepare the batches on the host, as for other data sets
(`perfexp.data.loading`). With `pipeline=device`, all images stay on the device and `DeviceBatches`
cuts batches there, which takes the host out of the training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import pad
from torch.utils.data import TensorDataset

from perfexp.data import Batches, cifar_files
from perfexp.data.loading import Loading, Sample, Samples, check_batch, stacked
from perfexp.devices import Pipeline
from perfexp.errors import Unsupported, UserError
from perfexp.models import Batch, Session
from perfexp.models.cuda_graphs import captures

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
        """Read all images into memory; download them first if the user wants that."""
        super().__post_init__()
        if self.classes not in cifar_files.FORMATS:
            raise UserError(
                f"data.classes={self.classes}: set 10 or 100, which data=cifar10 and data=cifar100 "
                "do."
            )
        folder = Path(self.root).expanduser()
        self.pipeline = Pipeline(self.pipeline)  # a plan contains the pipeline's name
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
        """Open batches on the device or from the loader's processes; see `perfexp.data.Data`."""
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
        """Return the images of one split, joined to batches by `_augmented`; see `Loading`."""
        augmentation = Augmentation(*self._mean_and_std, _SIZE)
        join = partial(_augmented, augmentation=augmentation, training=training)
        return Samples(TensorDataset(*(self._train if training else self._test)), join=join)


def _augmented(
    samples: Sequence[Sample], *, augmentation: Augmentation, training: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Join samples to a batch on the host: float32 (batch, 3, 32, 32) and labels.

    In training, images are cropped and mirrored with torch's generator.
    """
    pixels, labels = stacked(samples)
    if training:
        draws = draw(torch.empty(3, len(pixels), dtype=torch.int64))
        pixels = augmentation.cropped(padded(pixels), torch.arange(len(pixels)), draws)
    return augmentation.normalized(pixels), labels


def _tensors(images: cifar_files.LabeledImages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels, uint8 (count, 3, 32, 32), and labels, int64 (count,)."""
    return torch.from_numpy(images.pixels), torch.from_numpy(images.labels)


def _mean_and_std(images: cifar_files.LabeledImages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels' mean and standard deviation by channel, float64 (3,), from 0 to 255."""
    channels = (torch.from_numpy(channel).flatten() for channel in images.pixels.swapaxes(0, 1))
    counts = torch.stack([torch.bincount(channel, minlength=256) for channel in channels])
    values = torch.arange(256, dtype=torch.float64)
    shares = counts.double() / counts.sum(dim=1, keepdim=True)
    mean = shares @ values
    return mean, (shares @ values**2 - mean**2).sqrt()


#: Black pixels on each side of an image. A random crop has the image's original size.
#: Source: He et al., "Deep Residual Learning for Image Recognition", section 4.2.
PADDING = 4


class Augmentation:
    """Normalization, random crops and mirroring, with equal results on host and device.

    Args:
        mean: pixel mean by channel, from 0 to 255.
        std: pixel standard deviation by channel, from 0 to 255.
        size: height and width of an image without its border.
        device: device of the images.
    """

    def __init__(
        self,
        mean: torch.Tensor,
        std: torch.Tensor,
        size: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        self._height, self._width = size
        # (pixels - mean) / std is pixels × factor + shift; all three are (channels, 1, 1)
        self._factor, self._shift = (
            values.float().view(-1, 1, 1).to(device) for values in (1 / std, -mean / std)
        )
        self._channels = torch.arange(len(mean), device=device).view(-1, 1, 1)
        self._down = torch.arange(self._height, device=device).view(-1, 1)
        self._across = torch.arange(self._width, device=device)

    def normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return uint8 images (count, channels, height, width) as standardized float32."""
        return torch.addcmul(self._shift, pixels.float(), self._factor)

    def cropped(
        self, padded: torch.Tensor, rows: torch.Tensor, draws: torch.Tensor
    ) -> torch.Tensor:
        """Return crops of the selected images, uint8 (batch, channels, height, width).

        Args:
            padded: all images with their border, see `padded`.
            rows: numbers of the selected images, int64 (batch,).
            draws: int64 (3, batch), see `draw`: pixels left out at the top and the left, and 1 for
                a mirrored crop.
        """
        top, left, mirrored = draws.view(3, -1, 1, 1)
        columns = torch.where(mirrored == 1, self._width - 1 - self._across, self._across) + left
        return padded[
            rows.view(-1, 1, 1, 1),
            self._channels,
            self._down + top.unsqueeze(1),
            columns.unsqueeze(1),
        ]


def padded(pixels: torch.Tensor) -> torch.Tensor:
    """Return images with a black border of `PADDING` pixels on each side."""
    return pad(pixels, (PADDING,) * 4)


def draw(draws: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fill an int64 tensor (3, count) at random, and return it.

    Its rows are: pixels left out at the top and at the left (0 to 8), and mirror flags (0 or 1).
    """
    draws[:2].random_(0, 2 * PADDING + 1, generator=generator)
    draws[2].random_(0, 2, generator=generator)
    return draws


class DeviceBatches:
    """Batches that are cut and normalized on the device; in training also cropped and mirrored.

    Each pass draws its order, crops and mirror flags on the device, into tensors with fixed
    addresses. The position in the order is such a tensor too, and each batch advances it. On a CUDA
    device a full batch is therefore a single CUDA graph launch, into tensors that the next batch
    overwrites.

    Args:
        pixels: uint8 (count, channels, height, width), on the host.
        labels: int64 (count,).
        mean_and_std: pixel mean and standard deviation by channel, from 0 to 255.
        session: the open model, which places the images on its device.
    """

    constant = False
    on_device = True

    def __init__(
        self,
        pixels: torch.Tensor,
        labels: torch.Tensor,
        mean_and_std: tuple[torch.Tensor, torch.Tensor],
        *,
        session: Session,
        batch_size: int,
        training: bool,
        seed: int,
    ) -> None:
        count = len(labels)
        if training:
            check_batch(count, batch_size)
        stored = session.place(Batch(inputs=padded(pixels) if training else pixels, targets=labels))
        device = stored.inputs.device
        self._images, self._labels, self._session, self._batch_size = (
            stored.inputs,
            stored.targets,
            session,
            batch_size,
        )
        self._augmentation = Augmentation(*mean_and_std, (pixels.shape[2], pixels.shape[3]), device)
        self._count, self._full_batches, self._batches_left = count, count // batch_size, 0
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order, self._first = (
            torch.arange(count, device=device),
            torch.arange(batch_size, device=device),
        )
        self._rest = self._order[:0] if training else self._order[self._full_batches * batch_size :]
        self.per_epoch: int | None = self._full_batches + bool(len(self._rest))
        self._draws = torch.zeros(3, count, dtype=torch.int64, device=device) if training else None
        self._upcoming = self._first.clone()
        self._drawn = session.compiled(self._draw) if training else self._draw
        self._can_capture = self._images.is_cuda
        self._launch: Callable[[], object] | None = None
        self._made: Batch | None = None

    def next(self) -> Batch:
        """Return the next batch (see `Batches`), always a full one.

        Raises:
            Unsupported: there are fewer images than in a batch.
        """
        check_batch(self._count, self._batch_size)
        if self._batches_left <= 0:
            self._begin()
        return self._full()

    def epoch(self) -> Iterator[Batch]:
        """Yield one whole pass (see `Batches`). In evaluation the last batch may be smaller."""
        self._begin()
        while self._batches_left:
            yield self._full()
        if len(self._rest):
            yield self._cut(self._rest)

    def _begin(self) -> None:
        """Begin a pass; in training, draw a new order and new crops."""
        self._batches_left = self._full_batches
        self._upcoming.copy_(self._first)
        if self._draws is not None:
            torch.randperm(self._count, generator=self._generator, out=self._order)
            draw(self._draws, self._generator)

    def _full(self) -> Batch:
        """Return the next full batch, by its graph if there is one.

        The position on the device wraps from the last batch to the first.
        """
        if self._can_capture:
            self._capture()
        self._batches_left -= 1
        (self._launch or self._make)()
        assert self._made is not None
        return self._made

    def _make(self) -> None:
        """Cut the batch at the device's position, and advance the position."""
        self._made = self._cut(self._upcoming)
        self._upcoming.add_(self._batch_size).remainder_(self._full_batches * self._batch_size)

    def _capture(self) -> None:
        """Capture the creation of a batch as a CUDA graph, once.

        If that is impossible, each batch is created operation by operation. The position is
        restored, since capturing advances it.
        """
        self._can_capture, upcoming = False, self._upcoming.clone()
        with suppress(Unsupported):
            self._launch = captures(self._session.device)(self._make)
        self._upcoming.copy_(upcoming)

    def _cut(self, places: torch.Tensor) -> Batch:
        """Return the batch at these positions in the pass's order, int64 (batch,)."""
        inputs, targets = self._drawn(places)
        return self._session.place(Batch(inputs=inputs, targets=targets))

    def _draw(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels at these positions in the pass's order.

        In training `torch.compile` may compile it, if the session compiles.
        """
        rows = self._order[places]
        if self._draws is None:
            pixels = self._images[rows]
        else:
            pixels = self._augmentation.cropped(self._images, rows, self._draws[:, places])
        return self._augmentation.normalized(pixels), self._labels[rows]
