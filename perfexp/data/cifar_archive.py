"""Download and unpack a published archive of CIFAR-10 or CIFAR-100, where data.download=true asks for it."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
import zlib
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

from perfexp.data import cifar_files
from perfexp.data.cifar_files import MOST_BYTES, Format
from perfexp.errors import UserError
from perfexp.host import locks
from perfexp.host.files import write_atomically
from perfexp.host.untrusted import open_append, open_regular

_PIECE_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
#: HTTP status of an answer with the rest of a file, and of one where nothing is left.
_PARTIAL, _NOTHING_LEFT = 206, 416


def ensure(root: Path, classes: int) -> None:
    """Make the files of CIFAR-10 or CIFAR-100 from the published archive, unless all are there.

    The archive is downloaded unless it lies in the folder; an interrupted download continues where it ended. Raises
    `UserError` if it cannot be had, has another checksum than published, or lacks a file.
    """
    style = cifar_files.FORMATS[classes][0]
    with locks.opened(f"download-{style.archive}") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one downloads, and the others find its files
        if cifar_files.is_complete(root, classes):
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
                f"continue, or get it on another machine. {cifar_files.remedy(root, style)}"
            ) from error
        except OSError as error:
            raise UserError(f"{error.filename or archive} can't be used: {error.strerror or error}.") from error


def _download(archive: Path, style: Format) -> None:
    """Download an archive beside its place, and put it there once it is whole."""
    unfinished = archive.with_name(f"{archive.name}.part")
    with open_append(unfinished) as file:
        start = file.seek(0, os.SEEK_END)
        request = urllib.request.Request(cifar_files.SITE + style.archive, headers={"Range": f"bytes={start}-"})
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
    left = answer.length if answer.length is not None else MOST_BYTES
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
                    if content is None or member.size > MOST_BYTES:
                        raise UserError(f"{member.name} in {archive} is not a file of at most {MOST_BYTES >> 20} MiB.")
                    write_atomically(folder / name, content.read())
        except (KeyError, EOFError, tarfile.TarError, zlib.error) as error:
            raise UserError(f"{archive} can't be unpacked: {error}.") from error
