"""Find, decode and crop image files, safely and with messages for the user.

Links may not lead out of the data set's root, and only common image formats are decoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from perfexp.errors import UserError

#: Allowed Pillow decoders, whatever the file name. Others start programs (EPS: Ghostscript).
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
#: Image extensions, in lower case.
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"})
#: Sentence for messages about folders without images.
LOOKED_FOR = f"Looked for: {', '.join(sorted(EXTENSIONS))}."


@dataclass(frozen=True)
class Split:
    """Images for training or evaluation.

    Attributes:
        items: files with their class numbers; None without classes.
        classes: class names, by class number.
    """

    items: list[tuple[Path, int | None]]
    classes: list[str]


def find_split(folder: Path, root: Path) -> Split:
    """Return a folder's images: by class if it has subfolders, otherwise without labels.

    Hidden files and links to places outside the root are ignored. `Images` reads its folder by it.

    Raises:
        UserError: the folder or a class has no images.
    """
    classes = sorted(entry.name for entry in visible_entries(folder, root) if entry.is_dir())
    items: list[tuple[Path, int | None]] = []
    for label, name in enumerate(classes):
        images = sorted(find_images(folder / name, root))
        if not images:
            raise UserError(
                f"The class folder {folder / name} holds no images. Fill it or remove it: a folder "
                f"is a class. {LOOKED_FOR}"
            )
        items += [(image, label) for image in images]
    if not classes:
        items = [(image, None) for image in sorted(find_images(folder, root))]
    if not items:
        raise UserError(f"There are no images in {folder}. {LOOKED_FOR}")
    return Split(items, classes)


def folder_of(root: str, content: str, trial: str = "") -> Path:
    """Return a data set's folder from data.root; raise `UserError` if it is not a folder.

    Data sets call it when they are built.

    Args:
        content: kind of its files, in the plural.
        trial: sentence about a small set for trials.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"data.root is not a folder: {folder.absolute()}. Set it to the folder of the "
            f"{content}. {trial}"
        )
    return folder


@contextmanager
def listing() -> Iterator[None]:
    """Turn an unreadable folder inside the context into a `UserError`.

    Data sets search their folders inside it.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename} can't be read: {error.strerror}.") from error


@contextmanager
def decoding(file: Path, kind: str, advice: str) -> Iterator[Image.Image]:
    """Open an image file; failures to decode it inside the context become a `UserError`.

    `read_image` and masks are read inside it.

    Args:
        kind: noun for the message, such as `a mask`.
        advice: sentence about what to do.
    """
    try:
        with Image.open(file, formats=_FORMATS) as image:
            yield image
    except MemoryError:
        raise
    except Exception as error:  # each of PIL's decoders has its own errors
        raise UserError(f"{file} can't be read as {kind}: {error}. {advice}") from error


def read_image(file: Path, advice: str = "Repair it, or take it out of the folder.") -> Image.Image:
    """Return an RGB image; raise `UserError`, with advice, if it cannot be decoded."""
    with decoding(file, "an image", advice) as image:
        return image.convert("RGB")


def find_images(folder: Path, root: Path) -> Iterator[Path]:
    """Yield the images in and below a folder, in any order; see also `visible_entries`.

    Folders with classes are searched class by class.
    """
    for entry in visible_entries(folder, root):
        if entry.is_dir():
            # a link upwards would never end
            if not entry.is_symlink():
                yield from find_images(Path(entry.path), root)
        elif Path(entry.name).suffix.lower() in EXTENSIONS and entry.is_file():
            yield Path(entry.path)


def visible_entries(folder: Path, root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield a folder's entries, without hidden files and links to places outside the root.

    Unlike `Path.iterdir`, `os.scandir` identifies links and folders without a file-system call for
    each of a million files. All data sets find their files through it.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_symlink() and not Path(entry.path).resolve().is_relative_to(root.resolve()):
                continue
            yield entry


def center_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image so that it just covers a height and width (`size`), and crop its center."""
    return ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BILINEAR)
