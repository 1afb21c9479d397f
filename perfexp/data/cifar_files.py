"""The files of CIFAR-10 and CIFAR-100, in the two published formats: where they are, and their images and labels.

The binary format is read as it is. The other one consists of pickles, which can run code: a file of it is unpickled
only if it is the published one, by its checksum.
"""

from __future__ import annotations

import hashlib
import os
import pickle  # noqa: TID251 - of published files only
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perfexp.errors import UserError
from perfexp.host.untrusted import read_bytes

Numbers = np.ndarray[Any, np.dtype[Any]]

#: Shape of an image: red, green and blue, each row by row.
SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
#: Limit on a file; the largest, an archive of CIFAR-10, has 170 MB.
MOST_BYTES = 1 << 28
SITE = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True, kw_only=True)
class Format:
    """A published archive, the folder in it, and the files in the folder.

    Attributes:
        md5: checksum on the page of the data set.
        names: file with the names of the classes, and in pickles their key.
        labels: key of the labels in a pickle.
        label_bytes: bytes before each image in binary files, the last one its label; 0 for pickles.
        published: MD5 of each pickle, by torchvision 0.26 (`torchvision/datasets/cifar.py`).
    """

    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: str
    names: tuple[str, str]
    labels: str = ""
    label_bytes: int = 0
    published: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are needed."""
        return (*self.train, self.test, self.names[0])


#: The formats by the number of classes, the downloaded one first.
FORMATS = {
    10: (
        Format(
            archive="cifar-10-binary.tar.gz",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            folder="cifar-10-batches-bin",
            train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            test="test_batch.bin",
            names=("batches.meta.txt", ""),
            label_bytes=1,
        ),
        Format(
            archive="cifar-10-python.tar.gz",
            md5="c58f30108f718f92721af3b95e74349a",
            folder="cifar-10-batches-py",
            train=tuple(f"data_batch_{number}" for number in range(1, 6)),
            test="test_batch",
            names=("batches.meta", "label_names"),
            labels="labels",
            published={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
                "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
            },
        ),
    ),
    100: (
        Format(
            archive="cifar-100-binary.tar.gz",
            md5="03b5dce01913d631647c71ecec9e9cb8",
            folder="cifar-100-binary",
            train=("train.bin",),
            test="test.bin",
            names=("fine_label_names.txt", ""),
            label_bytes=2,
        ),
        Format(
            archive="cifar-100-python.tar.gz",
            md5="eb9058c3a382ffc7106e4002c42a8d85",
            folder="cifar-100-python",
            train=("train",),
            test="test",
            names=("meta", "fine_label_names"),
            labels="fine_labels",
            published={
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                "meta": "7973b15100ade9c7d40fb424638fde48",
            },
        ),
    ),
}


@dataclass(frozen=True)
class Images:
    """Images as uint8 (count, 3, 32, 32), and their labels as int64 (count,)."""

    pixels: Numbers
    labels: Numbers


@dataclass(frozen=True)
class Contents:
    """All images of a folder, with as many classes as it names."""

    classes: list[str]
    train: Images
    test: Images


def find(root: Path, classes: int) -> tuple[Path, Format] | None:
    """The folder with any file of a format, which is `root` or in it; None if there is none."""
    formats = FORMATS[classes]
    for folder, style in [(root / style.folder, style) for style in formats] + [(root, style) for style in formats]:
        if any(os.path.lexists(folder / name) for name in style.files):
            return folder, style
    return None


def is_complete(root: Path, classes: int) -> bool:
    """Whether all files of a format are there."""
    found = find(root, classes)
    return found is not None and not missing(*found)


def missing(folder: Path, style: Format) -> list[str]:
    """The files of a format that a folder lacks."""
    return [name for name in style.files if not os.path.lexists(folder / name)]


def read(root: Path, classes: int) -> Contents:
    """Read all images of CIFAR-10 or CIFAR-100; raises `UserError` if files are missing or not of their format."""
    if (found := find(root, classes)) is None:
        trial = " perfexp make-data cifar10 DIR makes a small set to try out." if classes == 10 else ""
        raise UserError(f"There is no CIFAR-{classes} in {root.absolute()}. {remedy(root, FORMATS[classes][0])}{trial}")
    folder, style = found
    if lacking := missing(folder, style):
        raise UserError(f"{folder} lacks {', '.join(lacking)}. {remedy(folder.parent, style)}")
    names = _class_names(folder / style.names[0], style, classes)
    train = [_images(folder / name, style, len(names)) for name in style.train]
    joined = Images(np.concatenate([part.pixels for part in train]), np.concatenate([part.labels for part in train]))
    return Contents(names, joined, _images(folder / style.test, style, len(names)))


def remedy(root: Path, style: Format) -> str:
    """Where to get an archive, and where to put it."""
    return (
        f"Put {style.archive} (MD5 {style.md5}) from {SITE}{style.archive} into {root.absolute()} and unpack it "
        f"there, as {style.folder}/; data.download=true does both."
    )


def _content(file: Path) -> bytes:
    try:
        return read_bytes(file, MOST_BYTES)
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}. Get it again.") from error


def _unpickled(file: Path, style: Format) -> dict[str, Any]:
    """The fields of a published pickle; raises `UserError` for any other file, which is not unpickled."""
    content = _content(file)
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != style.published[file.name]:
        raise UserError(
            f"{file} is not the published file (MD5 {style.published[file.name]}), and a pickle can run code: nothing "
            f"of it was read. Get it again, or use the binary format."
        )
    fields: dict[str, Any] = pickle.loads(content, encoding="latin-1")
    return fields


def _class_names(file: Path, style: Format, most: int) -> list[str]:
    """The names of the classes, in the order of their labels."""
    if style.published:
        return list(_unpickled(file, style)[style.names[1]])
    names = _content(file).decode("latin-1").split()
    if not 2 <= len(names) <= most:
        raise UserError(f"{file} does not name 2 to {most} classes. Get it again.")
    return names


def _images(file: Path, style: Format, classes: int) -> Images:
    """The images of a file, and their labels below a number of classes."""
    if style.published:
        fields = _unpickled(file, style)
        return Images(fields["data"].reshape(-1, *SHAPE), np.array(fields[style.labels], np.int64))
    record, content = style.label_bytes + _PIXELS, _content(file)
    if not content or len(content) % record:
        raise UserError(f"{file} has {len(content)} bytes, not a multiple of {record}: it is cut off. Get it again.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    pixels, labels = rows[:, style.label_bytes :], rows[:, style.label_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        raise UserError(f"{file} has the label {labels.max()}, and there are {classes} classes. Get it again.")
    return Images(np.array(pixels).reshape(-1, *SHAPE), labels)
