"""The files of CIFAR-10 and CIFAR-100: their images and labels, and how the published archive is downloaded.

The binary format is the native one. The other one consists of pickles, which can run code: a file of it is unpickled
only if it is the published one, by its checksum.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from perfexp.errors import UserError
from perfexp.host import locks
from perfexp.host.files import write_atomically
from perfexp.host.untrusted import open_append, open_regular, read_bytes

Numbers = np.ndarray[Any, np.dtype[Any]]

#: Shape of an image: red, green and blue, each row by row.
SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
#: Limit on a file; the largest, an archive of CIFAR-10, has 170 MB.
_MOST_BYTES = 1 << 28
SITE = "https://www.cs.toronto.edu/~kriz/"
_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
#: HTTP status of an answer with the rest of a file, and of one where nothing is left.
_PARTIAL, _NOTHING_LEFT = 206, 416


@dataclass(frozen=True, kw_only=True)
class Format:
    """A published archive, and the folder in it.

    Attributes:
        md5: checksum on the page of the data set.
        files: files in the folder: those of training, the one of evaluation, and the one with the names of classes.
        label_bytes: bytes before each image in binary files, the last one its label; 0 for pickles.
        keys: keys of the labels and of the names in pickles.
        published: MD5 of each pickle, by torchvision 0.26 (`torchvision/datasets/cifar.py`).
    """

    archive: str
    md5: str
    folder: str
    files: tuple[str, ...]
    label_bytes: int = 0
    keys: tuple[str, str] = ("", "")
    published: Mapping[str, str] = field(default_factory=dict)


#: MD5 of the pickles of CIFAR-10 and CIFAR-100.
_PUBLISHED_10 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
}
_PUBLISHED_100 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
#: The formats by the number of classes, the native one first.
FORMATS = {
    10: (
        Format(
            archive="cifar-10-binary.tar.gz",
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            folder="cifar-10-batches-bin",
            files=(*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin", "batches.meta.txt"),
            label_bytes=1,
        ),
        Format(
            archive="cifar-10-python.tar.gz",
            md5="c58f30108f718f92721af3b95e74349a",
            folder="cifar-10-batches-py",
            files=tuple(_PUBLISHED_10),
            keys=("labels", "label_names"),
            published=_PUBLISHED_10,
        ),
    ),
    100: (
        Format(
            archive="cifar-100-binary.tar.gz",
            md5="03b5dce01913d631647c71ecec9e9cb8",
            folder="cifar-100-binary",
            files=("train.bin", "test.bin", "fine_label_names.txt"),
            label_bytes=2,
        ),
        Format(
            archive="cifar-100-python.tar.gz",
            md5="eb9058c3a382ffc7106e4002c42a8d85",
            folder="cifar-100-python",
            files=tuple(_PUBLISHED_100),
            keys=("fine_labels", "fine_label_names"),
            published=_PUBLISHED_100,
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


def find(root: Path, classes: int) -> tuple[Path, Format, list[str]] | None:
    """The folder with any file of a format, `root` or one in it, and the files that it lacks; None if there is none."""
    formats = FORMATS[classes]
    for folder, style in [(root / style.folder, style) for style in formats] + [(root, style) for style in formats]:
        missing = [name for name in style.files if not os.path.lexists(folder / name)]
        if len(missing) < len(style.files):
            return folder, style, missing
    return None


def read(root: Path, classes: int) -> Contents:
    """Read all images of CIFAR-10 or CIFAR-100; raises `UserError` if files are missing or not of their format."""
    if (found := find(root, classes)) is None:
        trial = " perfexp make-data cifar10 DIR makes a small set to try out." if classes == 10 else ""
        raise UserError(
            f"There is no CIFAR-{classes} in {root.absolute()}. {_remedy(root, FORMATS[classes][0])}{trial}"
        )
    folder, style, missing = found
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing)}. {_remedy(folder.parent, style)}")
    *train, test, names = [_content(folder / name, style) for name in style.files]
    if style.published:
        return _of_pickles(style, train, test, names)
    listed = names.decode("latin-1").split()
    if not 2 <= len(listed) <= classes:
        raise UserError(f"{folder / style.files[-1]} does not name 2 to {classes} classes. Get it again.")
    *parts, last = [
        _binary(folder / name, content, style.label_bytes, len(listed))
        for name, content in zip(style.files, [*train, test], strict=False)
    ]
    return Contents(listed, _joined(parts), last)


def _remedy(root: Path, style: Format) -> str:
    """Where to get an archive, and where to put it."""
    return (
        f"Put {style.archive} (MD5 {style.md5}) from {SITE}{style.archive} into {root.absolute()} and unpack it "
        f"there, as {style.folder}/; data.download=true does both."
    )


def _content(file: Path, style: Format) -> bytes:
    """The content of a file; raises `UserError` for a pickle that is not the published one."""
    try:
        content = read_bytes(file, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}. Get it again.") from error
    if style.published and hashlib.md5(content, usedforsecurity=False).hexdigest() != style.published[file.name]:
        raise UserError(
            f"{file} is not the published file (MD5 {style.published[file.name]}), and a pickle can run code: nothing "
            f"of it was read. Remove {file.parent}, and set data.download=true, which gets the binary format."
        )
    return content


def _of_pickles(style: Format, train: list[bytes], test: bytes, names: bytes) -> Contents:
    """The content of published pickles."""
    labels, listed = style.keys

    def images(content: bytes) -> Images:
        fields = pickle.loads(content, encoding="latin-1")
        return Images(fields["data"].reshape(-1, *SHAPE), np.array(fields[labels], np.int64))

    classes = pickle.loads(names, encoding="latin-1")[listed]
    return Contents(classes, _joined([images(content) for content in train]), images(test))


def _binary(file: Path, content: bytes, label_bytes: int, classes: int) -> Images:
    """The images of a binary file, and their labels below a number of classes."""
    record = label_bytes + _PIXELS
    if not content or len(content) % record:
        raise UserError(f"{file} has {len(content)} bytes, not a multiple of {record}: it is cut off. Get it again.")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    pixels, labels = rows[:, label_bytes:], rows[:, label_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        raise UserError(f"{file} has the label {labels.max()}, and there are {classes} classes. Get it again.")
    return Images(np.array(pixels).reshape(-1, *SHAPE), labels)


def _joined(parts: list[Images]) -> Images:
    return Images(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))


def download(root: Path, classes: int) -> None:
    """Make the files of CIFAR-10 or CIFAR-100 from the published archive, unless all are there.

    The archive is downloaded unless it lies in the folder; an interrupted download continues where it ended. Raises
    `UserError` if it cannot be had, has another checksum than published, or lacks a file.
    """
    style = FORMATS[classes][0]
    with locks.opened(f"download-{style.archive}") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one downloads, and the others find its files
        found = find(root, classes)
        if found and not found[2]:
            return
        archive = root / style.archive
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not archive.exists():
                _download(archive, style)
            _unpack(archive, style)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            raise UserError(
                f"{style.archive} could not be downloaded: {getattr(error, 'reason', error)}. Repeat the command to "
                f"continue, or get it on another machine. {_remedy(root, style)}"
            ) from error
        except OSError as error:
            raise UserError(f"{error.filename or archive} can't be used: {error.strerror or error}.") from error


def _download(archive: Path, style: Format) -> None:
    """Download an archive beside its place, and put it there once it is whole."""
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
        raise UserError(f"{style.archive} arrived with another MD5 than {style.md5}. Repeat the command.")
    unfinished.replace(archive)


def _save(answer: http.client.HTTPResponse, file: BinaryIO) -> None:
    """Append an answer to a file; raises `IncompleteRead` if the connection ends early, or it never ends."""
    left = answer.length if answer.length is not None else _MOST_BYTES
    while piece := answer.read(min(_PIECE_BYTES, left)):
        file.write(piece)
        left -= len(piece)
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


def _md5(file: BinaryIO) -> str:
    """The published checksum: it finds damage; that a file is harmless follows from how it is read."""
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _unpack(archive: Path, style: Format) -> None:
    """Write the files of a format into its folder.

    Only members with the names of the format are read, and only regular ones. So no name, link or mode of the archive
    decides what is written.
    """
    folder = archive.parent / style.folder
    with os.fdopen(open_regular(archive, os.O_RDONLY), "rb") as file:
        if _md5(file) != style.md5:
            raise UserError(f"{archive} has another MD5 than {style.md5}. Remove it and repeat the command.")
        file.seek(0)
        folder.mkdir(exist_ok=True)
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as members:
                for name in style.files:
                    member = members.getmember(f"{style.folder}/{name}")
                    content = members.extractfile(member) if member.isfile() else None
                    if content is None or member.size > _MOST_BYTES:
                        raise UserError(f"{member.name} in {archive} is not a file of at most {_MOST_BYTES >> 20} MiB.")
                    write_atomically(folder / name, content.read())
        except (KeyError, EOFError, tarfile.TarError, zlib.error) as error:
            raise UserError(f"{archive} can't be unpacked: {error}.") from error
