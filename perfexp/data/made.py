"""Common parts of data sets from `perfexp make-data`: an empty folder, a note, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from perfexp.data.image_files import EXTENSIONS, LOOKED_FOR, read_image
from perfexp.errors import UserError
from perfexp.host.files import write_atomically

#: File that marks a made data set.
MADE = "made.json"
Photograph = tuple[str, Image.Image]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A data set to make. Equal arguments give equal files.

    Attributes:
        about: facts for `MADE`, for example the seed.
        files: paths in the folder with their contents, which are created on demand.
        count: number of files.
        contents: one-line description for the user.
        remark: limitation for the user.
        command: command that uses the data set, without its folder.
    """

    about: dict[str, Any]
    files: Iterable[tuple[str, bytes | Image.Image]]
    count: int
    contents: str
    remark: str = ""
    command: str

    def write(self, root: Path, progress: Callable[[str], None]) -> None:
        """Write the data set into an empty or new folder.

        Args:
            progress: called with the number of files so far.

        Raises:
            UserError: the folder is not empty or cannot be written.
        """
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise UserError(
                f"{root} is not empty. Name a folder that is, or that is not there yet."
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            # written first, so that even an incomplete data set is marked
            write_atomically(root / MADE, json.dumps(self.about, indent=1).encode() + b"\n")
            for number, (name, content) in enumerate(self.files, 1):
                file = root / name
                file.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    write_atomically(file, content)
                else:
                    content.save(file)
                progress(f"{number} of {self.count} files")
        except OSError as error:
            raise UserError(
                f"{error.filename or root} can't be written: {error.strerror or error}."
            ) from error


def photographs_in(folder: Path | None) -> list[Photograph]:
    """Return photographs with their names, from a folder or, for None, from scikit-learn.

    scikit-learn has two. Raises `UserError` if there are none, if a photograph cannot be read, or
    if scikit-learn is not installed.
    """
    if folder is None:
        return _public_photographs()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}. Name one that holds photographs.")
    files = sorted(
        file for file in folder.iterdir() if file.suffix.lower() in EXTENSIONS and file.is_file()
    )
    if not files:
        raise UserError(f"There are no photographs in {folder}. {LOOKED_FOR}")
    return [(file.name, read_image(file)) for file in files]


def _public_photographs() -> list[Photograph]:
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise UserError(
            "Without --photographs FOLDER the two of scikit-learn are taken, which is not "
            "installed. pip install scikit-learn"
        ) from error
    shipped = load_sample_images()
    return [
        (f"scikit-learn: {Path(name).name}", Image.fromarray(pixels))
        for name, pixels in zip(shipped.filenames, shipped.images, strict=True)
    ]
