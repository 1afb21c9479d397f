"""Images from a folder, by class in subfolders, through torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset

from perfexp.data.image_files import Split, centre_crop, find_split, random_crop, read_picture, to_tensor
from perfexp.data.loading import LoadedBatches, Loading, check_batch
from perfexp.errors import UserError
from perfexp.models import Session


class Images:
    """A folder with one subfolder of images per class; or `train` and `val`, each such a folder; or just images.

    Training images are shuffled, cropped at random and mirrored; in evaluation they keep their order and their center.

    Args:
        workers: number of processes that load images; 0 loads them between the model's calls.
        pin_memory: whether batches are in pinned memory, for asynchronous copies.
        prefetch_factor: batches that each worker loads ahead.

    Raises:
        UserError: the folder cannot be read, or holds no images.
    """

    def __init__(self, *, root: str, workers: int = 2, pin_memory: bool = False, prefetch_factor: int = 2) -> None:
        self._root = Path(root).expanduser()
        self.workers = workers
        self._loading = Loading(workers=workers, pin_memory=pin_memory, prefetch_factor=prefetch_factor)
        self._train, self._val = _find_splits(self._root)
        self.labelled = self._train.labels is not None
        self.num_classes = len(self._train.classes) if self.labelled else None
        self.num_samples: int | None = len(self._train.files)
        self.held_out = self._val is not self._train

    @contextmanager
    def open(
        self, *, session: Session, input_size: tuple[int, int], batch_size: int, training: bool, seed: int
    ) -> Iterator[LoadedBatches]:
        split = self._train if training else self._val
        if training and not self.labelled:
            raise UserError(
                f"The pictures in {self._root} have no classes to learn. Put them into a subfolder for each class, or "
                "use mode=inference."
            )
        count = len(split.files)
        if training:
            check_batch(count, batch_size)
        pictures = _Pictures(split, input_size, random_crop if training else centre_crop)
        loader = self._loading.loader(pictures, batch_size, _collate, training=training, seed=seed)
        batches = LoadedBatches(loader, count, batch_size, session)
        try:
            yield batches
        finally:
            batches.close()


#: An image and its class, or an error, since torch would wrap an exception's message in a stack trace.
_Sample = tuple[torch.Tensor, int | None] | UserError


class _Pictures(Dataset[_Sample]):
    """The images of a split, cropped to a size (height, width); a sample's inputs are (3, height, width)."""

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
    """Samples as inputs and targets on the host, or the first error."""
    pictures, labels = [], []
    for sample in samples:
        if isinstance(sample, UserError):
            return sample
        pictures.append(sample[0])
        labels.append(sample[1])
    return torch.stack(pictures), None if None in labels else torch.tensor(labels)


def _find_splits(root: Path) -> tuple[Split, Split]:
    """The images of training and of evaluation; the same ones where the folder has no splits."""
    if not root.is_dir():
        raise UserError(f"data.root is not a folder: {root.absolute()}. Set it to the folder of the images.")
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
