"""Small data sets in the published formats of CIFAR-10 and CIFAR-100, written by the tests themselves."""

from __future__ import annotations

import hashlib
import pickle  # noqa: TID251 - writes files as published
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfexp.data.cifar_files import FORMATS, Binary, Pickles

Format = Binary | Pickles

#: Images of each file.
COUNT = 6
STYLES = [style for styles in FORMATS.values() for style in styles]
BINARY, PICKLED = FORMATS[10]

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def images(style: Format, file: str) -> tuple[Pixels, list[int]]:
    """Images (count, 3, 32, 32) and labels of a file, always the same."""
    random = np.random.default_rng(list(file.encode()))
    classes = 100 if "100" in style.folder else 10
    return random.integers(0, 256, (COUNT, 3, 32, 32), dtype=np.uint8), random.integers(
        0, classes, COUNT
    ).tolist()


def fields(style: Format, file: str) -> dict[str, Any]:
    """The dictionary of a pickled file, as published."""
    pixels, labels = images(style, file)
    rest = {
        "batch_label": f"part {file}",
        "filenames": [f"{number}.png" for number in range(COUNT)],
    }
    return {"data": pixels.reshape(COUNT, -1), style.labels: labels, **rest}


def content(style: Format, file: str) -> bytes:
    names = [
        f"class {number}" if isinstance(style, Pickles) else f"class-{number}"
        for number in range(100 if "100" in style.folder else 10)
    ]
    if file == style.files[-1]:
        if isinstance(style, Binary):
            return "\n".join([*names, "", ""]).encode()
        return pickle.dumps({"num_vis": 3072, style.names: names}, 2)
    if isinstance(style, Pickles):
        return pickle.dumps(fields(style, file), 2)
    pixels, labels = images(style, file)
    coarse = np.full((COUNT, style.label_bytes - 1), 7, np.uint8)  # of CIFAR-100, before the label
    return np.concatenate(
        [coarse, np.array(labels, np.uint8)[:, None], pixels.reshape(COUNT, -1)], axis=1
    ).tobytes()


def write(root: Path, style: Format) -> Path:
    """Write all files of a format into its folder in `root`, which is returned."""
    folder = root / style.folder
    folder.mkdir(parents=True)
    for file in style.files:
        (folder / file).write_bytes(content(style, file))
    return folder


def publish(monkeypatch: pytest.MonkeyPatch, style: Format, folder: Path) -> None:
    """Have the pickles in a folder be the published ones."""
    for file in style.published if isinstance(style, Pickles) else ():
        digest = hashlib.md5((folder / file).read_bytes(), usedforsecurity=False).hexdigest()
        monkeypatch.setitem(style.published, file, digest)  # type: ignore[arg-type]


def python2(style: Format, file: str) -> bytes:
    """A file as Python 2 pickled it, byte by byte, which is how the archives have it."""

    def text(value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return (
            b"U" + bytes([len(data)]) + data
            if len(data) < 256
            else b"T" + len(data).to_bytes(4, "little") + data
        )

    pixels, labels = images(style, file)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85"
        + text("b")
        + b"\x87Rq\x04"
    )
    array += (
        b"(K\x01K"
        + bytes([COUNT])
        + b"M\x00\x0c\x86cnumpy\ndtype\nq\x05"
        + text("u1")
        + b"K\x00K\x01\x87Rq\x06"
    )
    array += (
        b"(K\x03"
        + text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + text(pixels.tobytes())
        + b"tb"
    )
    listed = b"]q\x07(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}q\x01(" + text("data") + array + text(style.labels) + listed + b"u."
