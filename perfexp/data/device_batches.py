"""Batches cut on the device from images stored there, without host data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch.nn.functional import pad

from perfexp.data.loading import check_batch
from perfexp.errors import Unsupported
from perfexp.models import Batch, Session
from perfexp.models.cuda_graphs import captures

#: Black pixels on each side of an image. A random crop has the image's original size.
#: Source: He et al., "Deep Residual Learning for Image Recognition", section 4.2.
PADDING = 4


class Augmentation:
    """Random crops, mirrored half of the time, and normalization, equal on host and device.

    Args:
        mean: pixel mean by channel, from 0 to 255.
        std: pixel standard deviation by channel, from 0 to 255.
    """

    def __init__(
        self,
        mean: torch.Tensor,
        std: torch.Tensor,
        size: tuple[int, int],
        device: torch.device | None = None,
    ) -> None:
        self._height, self._width = size
        self._factor, self._shift = (
            one.float().view(-1, 1, 1).to(device) for one in (1 / std, -mean / std)
        )
        self._channels = torch.arange(len(mean), device=device).view(-1, 1, 1)
        self._down = torch.arange(self._height, device=device).view(-1, 1)
        self._across = torch.arange(self._width, device=device)

    def normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return uint8 images (count, channels, height, width) as float32, standardized."""
        return torch.addcmul(self._shift, pixels.float(), self._factor)

    def cropped(
        self, padded: torch.Tensor, rows: torch.Tensor, draws: torch.Tensor
    ) -> torch.Tensor:
        """Return crops of the selected images, in the size without padding.

        Args:
            padded: all images, see `padded`.
            rows: image numbers, int64 (batch,).
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
    """Return images with a black border."""
    return pad(pixels, (PADDING,) * 4)


def draw(draws: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Fill an int64 tensor (3, count) with crop positions and mirror flags."""
    draws[:2].random_(0, 2 * PADDING + 1, generator=generator)
    draws[2].random_(0, 2, generator=generator)
    return draws


class DeviceBatches:
    """Numbered batches of images on the device, normalized there; cropped and mirrored in training.

    Each pass draws its order, crops and mirror flags on the device, into tensors with fixed
    addresses. The position in the order is such a tensor too, and each batch advances it. On a CUDA
    device a full batch is therefore a single CUDA graph launch, into tensors that the next batch
    overwrites.

    Args:
        pixels: uint8 (count, channels, height, width), on the host.
        labels: int64 (count,).
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
        self._count, self._full_batches, self._left = count, count // batch_size, 0
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
        """See `Batches`. The batch is always full.

        Raises `Unsupported` for fewer images than in a batch.
        """
        check_batch(self._count, self._batch_size)
        if self._left <= 0:
            self._begin()
        return self._full()

    def epoch(self) -> Iterator[Batch]:
        """See `Batches`. In evaluation the last batch may be smaller."""
        self._begin()
        while self._left:
            yield self._full()
        if len(self._rest):
            yield self._cut(self._rest)

    def _begin(self) -> None:
        """Begin a pass; in training, draw a new order and new crops."""
        self._left = self._full_batches
        self._upcoming.copy_(self._first)
        if self._draws is not None:
            torch.randperm(self._count, generator=self._generator, out=self._order)
            draw(self._draws, self._generator)

    def _full(self) -> Batch:
        """Return the next full batch.

        The device's position wraps from the last batch to the first.
        """
        if self._can_capture:
            self._capture()
        self._left -= 1
        (self._launch or self._make)()
        assert self._made is not None
        return self._made

    def _make(self) -> None:
        self._made = self._cut(self._upcoming)
        self._upcoming.add_(self._batch_size).remainder_(self._full_batches * self._batch_size)

    def _capture(self) -> None:
        """Capture the batch creation once.

        Without a graph, a batch is created operation by operation.
        """
        self._can_capture, place = False, self._upcoming.clone()
        with suppress(Unsupported):
            self._launch = captures(self._session.device)(self._make)
        self._upcoming.copy_(place)

    def _cut(self, places: torch.Tensor) -> Batch:
        """Return the batch at these positions in the pass's order."""
        inputs, targets = self._drawn(places)
        return self._session.place(Batch(inputs=inputs, targets=targets))

    def _draw(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels at these positions in the pass's order."""
        rows = self._order[places]
        if self._draws is None:
            pixels = self._images[rows]
        else:
            pixels = self._augmentation.cropped(self._images, rows, self._draws[:, places])
        return self._augmentation.normalized(pixels), self._labels[rows]
