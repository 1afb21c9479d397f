"""Read CIFAR-10 and CIFAR-100 files, and download the published archive.

The native format is binary. The other format consists of pickles, which can run code. A pickle is
read only if its checksum matches the published file. `Cifar` and `perfexp doctor` read through
`read`.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import pickle  # noqa: TID251 - of published files only
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from perfexp.errors import UserError
from perfexp.host import locks
from perfexp.host.files import write_atomically
from perfexp.host.foreign import open_append, open_regular, read_bytes

Numbers = np.ndarray[Any, np.dtype[Any]]

#: Shape of an image: red, green and blue, each row by row.
SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
#: Limit on a file; the largest, an archive of CIFAR-10, has 170 MB.
_MOST_BYTES = 1 << 28
SITE = "https://www.cs.toronto.edu/~kriz/"
_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
#: HTTP status if the answer contains the rest of a file, and if nothing is left.
_PARTIAL, _NOTHING_LEFT = 206, 416


@dataclass(frozen=True)
class LabeledImages:
    """Images as uint8 (count, 3, 32, 32), and labels as int64 (count,)."""

    pixels: Numbers
    labels: Numbers


@dataclass(frozen=True)
class FolderContents:
    """All images in a folder, and its class names by label."""

    classes: list[str]
    train: LabeledImages
    test: LabeledImages


@dataclass(frozen=True, kw_only=True)
class Binary:
    """The native binary format: records of label bytes and an image, and a text with class names.

    Attributes:
        archive: file name of the published archive.
        md5: archive checksum from the data set's page.
        folder: folder that the archive unpacks.
        files: files in the folder: for training, for evaluation (last but one), and with class
            names (last).
        label_bytes: bytes before each image; the last byte is its label.
    """

    archive: str
    md5: str
    folder: str
    files: tuple[str, ...]
    label_bytes: int

    def read(self, folder: Path, most_classes: int) -> FolderContents:
        """Return a folder's contents.

        Args:
            most_classes: largest number of classes to accept, 10 or 100.

        Raises:
            UserError: a file is missing or has another format.
        """
        lines = _content(folder / self.files[-1]).decode("latin-1").splitlines()
        classes = [line.strip() for line in lines if line.strip()]
        if not 2 <= len(classes) <= most_classes:
            raise UserError(
                f"{folder / self.files[-1]} does not name 2 to {most_classes} classes. Get it "
                "again."
            )
        *train, test = [self._images(folder / name, len(classes)) for name in self.files[:-1]]
        return FolderContents(classes, _joined(train), test)

    def _images(self, file: Path, classes: int) -> LabeledImages:
        """Return the images in one file, with their labels.

        Args:
            classes: number of classes; every label is below it.

        Raises:
            UserError: the file is cut off or has a larger label.
        """
        record_bytes, content = self.label_bytes + _IMAGE_BYTES, _content(file)
        if not content or len(content) % record_bytes:
            raise UserError(
                f"{file} has {len(content)} bytes, not a multiple of {record_bytes}: it is cut "
                "off. Get it again."
            )
        rows = np.frombuffer(content, np.uint8).reshape(-1, record_bytes)
        pixels, labels = rows[:, self.label_bytes :], rows[:, self.label_bytes - 1].astype(np.int64)
        if labels.max() >= classes:
            raise UserError(
                f"{file} has the label {labels.max()}, and there are {classes} classes. Get it "
                "again."
            )
        return LabeledImages(np.array(pixels).reshape(-1, *SHAPE), labels)


@dataclass(frozen=True, kw_only=True)
class Pickles:
    """The pickle format. Only published files are read.

    Attributes:
        folder: folder that the archive unpacks.
        labels: key of the labels.
        names: key of the class names.
        published: MD5 of each file, in the same order as in `Binary`, from torchvision 0.26
            (`torchvision/datasets/cifar.py`).
    """

    folder: str
    labels: str
    names: str
    published: Mapping[str, str]

    @property
    def files(self) -> tuple[str, ...]:
        """Return the file names: for training, for evaluation, and with class names."""
        return tuple(self.published)

    def read(self, folder: Path, most_classes: int) -> FolderContents:
        """Return a folder's contents.

        Args:
            most_classes: unused; published files have their number of classes.

        Raises:
            UserError: a file is not the published file.
        """
        *fields, meta = [self._unpickled(folder / name) for name in self.files]
        *train, test = [
            LabeledImages(part["data"].reshape(-1, *SHAPE), np.array(part[self.labels], np.int64))
            for part in fields
        ]
        return FolderContents(meta[self.names], _joined(train), test)

    def _unpickled(self, file: Path) -> dict[str, Any]:
        """Return the fields of a pickle; raise `UserError` if it has another MD5 than published."""
        content, published = _content(file), self.published[file.name]
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != published:
            raise UserError(
                f"{file} is not the published file (MD5 {published}), and a pickle can run code: "
                f"nothing of it was read. Remove {file.parent}, and set data.download=true, which "
                "gets the binary format."
            )
        fields: dict[str, Any] = pickle.loads(content, encoding="latin-1")
        return fields


#: Formats by number of classes.
FORMATS = {
    10: (
        Binary(
            archive="cifar-10-binary.tar.gz",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            folder="cifar-10-batches-bin",
            files=(
                *(f"data_batch_{number}.bin" for number in range(1, 6)),
                "test_batch.bin",
                "batches.meta.txt",
            ),
            label_bytes=1,
        ),
        Pickles(
            folder="cifar-10-batches-py",
            labels="labels",
            names="label_names",
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
        Binary(
            archive="cifar-100-binary.tar.gz",
            md5="03b5dce01913d631647c71ecec9e9cb8",
            folder="cifar-100-binary",
            files=("train.bin", "test.bin", "fine_label_names.txt"),
            label_bytes=2,
        ),
        Pickles(
            folder="cifar-100-python",
            labels="fine_labels",
            names="fine_label_names",
            published={
                "train": "16019d7e3df5f24257cddd939b257f8d",
                "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                "meta": "7973b15100ade9c7d40fb424638fde48",
            },
        ),
    ),
}


def find(root: Path, classes: int) -> tuple[Path, Binary | Pickles, list[str]] | None:
    """Return a folder with files in a known format, the format, and the names of missing files.

    The folder is `root` or a subfolder; one file of the format is enough. None if there is none.
    Missing files are reported by name; a download completes them.

    Args:
        classes: 10 or 100.
    """
    formats = FORMATS[classes]
    places = [(root / style.folder, style) for style in formats]
    places += [(root, style) for style in formats]
    for folder, style in places:
        missing = [name for name in style.files if not os.path.lexists(folder / name)]
        if len(missing) < len(style.files):
            return folder, style, missing
    return None


def read(root: Path, classes: int) -> FolderContents:
    """Read all images of CIFAR-10 or CIFAR-100, in either format.

    Args:
        root: folder of the format, or the folder above it.
        classes: 10 or 100.

    Raises:
        UserError: files are missing or have another format.
    """
    native = FORMATS[classes][0]
    if (location := find(root, classes)) is None:
        text = f"There is no CIFAR-{classes} in {root.absolute()}. {_remedy(root, native)}"
        if classes == 10:
            text += " perfexp make-data cifar10 DIR makes a small set to try out."
        raise UserError(text)
    folder, style, missing = location
    if missing:
        # a download unpacks into a subfolder, so it must start above an incomplete one
        target = folder.parent if style is native else root
        raise UserError(f"{folder} lacks {', '.join(missing)}. {_remedy(target, native)}")
    return style.read(folder, classes)


def _remedy(root: Path, native: Binary) -> str:
    """Return a sentence about where to get an archive and where to put it."""
    return (
        f"Put {native.archive} (MD5 {native.md5}) from {SITE}{native.archive} into "
        f"{root.absolute()} and unpack it there, as {native.folder}/; data.download=true does both."
    )


def _content(file: Path) -> bytes:
    """Return a file's bytes; raise `UserError` if it cannot be read."""
    try:
        return read_bytes(file, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}. Get it again.") from error


def _joined(parts: list[LabeledImages]) -> LabeledImages:
    """Return the images of several files as one."""
    pixels = np.concatenate([part.pixels for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    return LabeledImages(pixels, labels)


def download(root: Path, classes: int) -> None:
    """Create the files of CIFAR-10 or CIFAR-100 from the published archive, unless all exist.

    The archive is downloaded unless it is in the folder. An interrupted download continues where it
    stopped. `Cifar` calls this with data.download=true.

    Raises:
        UserError: the archive is unavailable, has another checksum than published, or lacks a file.
    """
    style = FORMATS[classes][0]
    with locks.opened(f"download-{style.archive}") as lock:
        # only the first of several processes downloads; the others find its files
        fcntl.flock(lock, fcntl.LOCK_EX)
        location = find(root, classes)
        if location and not location[2]:
            return
        archive = root / style.archive
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not archive.exists():
                _download(archive, style)
            _unpack(archive, style)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
        ) as error:
            raise UserError(
                f"{style.archive} could not be downloaded: {getattr(error, 'reason', error)}. "
                "Repeat the command to continue, or get it on another machine. "
                f"{_remedy(root, style)}"
            ) from error
        except OSError as error:
            raise UserError(
                f"{error.filename or archive} can't be used: {error.strerror or error}."
            ) from error


def _download(archive: Path, style: Binary) -> None:
    """Download an archive to a temporary name (`….part`), and rename it once it is complete.

    Raises:
        UserError: the finished file has another checksum; it is removed.
        OSError: the connection or the disk fails; what arrived stays for the next attempt.
    """
    unfinished = archive.with_name(f"{archive.name}.part")
    with open_append(unfinished) as file:
        start = file.seek(0, os.SEEK_END)
        request = urllib.request.Request(SITE + style.archive, headers={"Range": f"bytes={start}-"})
        try:
            with closing(urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)) as answer:
                if answer.status != _PARTIAL:
                    file.truncate(0)
                _save(answer, file)
        except urllib.error.HTTPError as error:
            if error.code != _NOTHING_LEFT:
                raise
        is_whole = _md5(file) == style.md5
    if not is_whole:
        unfinished.unlink()
        raise UserError(
            f"{style.archive} arrived with another MD5 than {style.md5}. Repeat the command."
        )
    unfinished.replace(archive)


def _save(answer: http.client.HTTPResponse, file: BinaryIO) -> None:
    """Append an HTTP answer to a file.

    Raises:
        IncompleteRead: the connection ends early, or the answer is too long.
    """
    left = answer.length if answer.length is not None else _MOST_BYTES
    while piece := answer.read(min(_PIECE_BYTES, left)):
        file.write(piece)
        left -= len(piece)
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


def _md5(file: BinaryIO) -> str:
    """Return a file's MD5, as published, to detect damage.

    It is not a security check: the way files are read makes them harmless.
    """
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _unpack(archive: Path, style: Binary) -> None:
    """Write the files of a format from its archive into its folder.

    Only regular members with the format's names are read. Names, links and modes in the archive
    therefore cannot decide what is written.

    Raises:
        UserError: the archive is damaged, or lacks a file.
    """
    folder = archive.parent / style.folder
    with os.fdopen(open_regular(archive, os.O_RDONLY), "rb") as file:
        if _md5(file) != style.md5:
            raise UserError(
                f"{archive} has another MD5 than {style.md5}. Remove it and repeat the command."
            )
        file.seek(0)
        folder.mkdir(exist_ok=True)
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as members:
                for name in style.files:
                    member = members.getmember(f"{style.folder}/{name}")
                    content = members.extractfile(member) if member.isfile() else None
                    if content is None or member.size > _MOST_BYTES:
                        raise UserError(
                            f"{member.name} in {archive} is not a file of at most "
                            f"{_MOST_BYTES >> 20} MiB."
                        )
                    write_atomically(folder / name, content.read())
        except (KeyError, EOFError, tarfile.TarError, zlib.error) as error:
            raise UserError(f"{archive} can't be unpacked: {error}.") from error
