"""Images from a folder, by class in subfolders (data=images).

The transformations are those of ImageNet training: a random part of an image, resized and mirrored,
or in evaluation the center.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image, ImageOps

from perfexp.data.image_files import Split, center_crop, find_split, folder_of, listing, read_image
from perfexp.data.loading import Loading, Sample, Samples, to_tensor
from perfexp.errors import UserError
from perfexp.models import Session

#: Ranges of a random crop's image share and aspect ratio (width over height) before resizing.
#: Sources: Szegedy et al., "Going Deeper with Convolutions";
#: torchvision.transforms.RandomResizedCrop.
CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)


@dataclass(kw_only=True, eq=False)
class Images(Loading):
    """A folder of images.

    It has a subfolder per class, or `train` and `val` with such subfolders, or just images.
    Training images are shuffled, cropped at random and mirrored. In evaluation they keep their
    order and center. Raises `UserError` if the folder cannot be read or has no images.
    """

    root: str

    def __post_init__(self) -> None:
        """Find all images and their classes."""
        super().__post_init__()
        trial = "perfexp make-data images DIR makes a small set to try out."
        self._root = folder_of(self.root, "images", trial)
        self._train, self._val = _find_splits(self._root)
        self.labelled = bool(self._train.classes)
        self.num_classes = len(self._train.classes) or None
        self.num_samples: int | None = len(self._train.items)
        self.held_out = self._val is not self._train

    def samples(
        self, session: Session, input_size: tuple[int, int], *, training: bool, seed: int
    ) -> Samples:
        """Return the images of one split; see `Loading`. Training needs classes."""
        items = (self._train if training else self._val).items
        if training and not self.labelled:
            raise UserError(
                f"The images in {self._root} have no classes to learn. Put them into a subfolder "
                "for each class, or use mode=inference."
            )
        return Samples(
            items, partial(_cropped, size=input_size, crop=random_crop if training else center_crop)
        )


_Crop = Callable[[Image.Image, tuple[int, int]], Image.Image]


def _cropped(item: tuple[Path, int | None], *, size: tuple[int, int], crop: _Crop) -> Sample:
    """Load one image, float32 (3, height, width), and its label; None without a class."""
    file, label = item
    return to_tensor(crop(read_image(file), size)), None if label is None else torch.tensor(label)


def random_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Crop a random part, resize it to `size` (height, width), and mirror it half of the time.

    The random numbers come from torch's generator.
    """
    area_draw, aspect_draw, across, down, flip = torch.rand(5).tolist()  # each from 0 to 1
    area = image.width * image.height * (CROP_AREA[0] + area_draw * (CROP_AREA[1] - CROP_AREA[0]))
    # the logarithm of the aspect ratio is uniform, so that tall and wide parts are equally likely
    aspect = math.exp(
        math.log(CROP_RATIO[0]) + aspect_draw * math.log(CROP_RATIO[1] / CROP_RATIO[0])
    )
    width = min(math.sqrt(area * aspect), image.width)
    height = min(math.sqrt(area / aspect), image.height)
    left, top = across * (image.width - width), down * (image.height - height)
    box = (left, top, left + width, top + height)
    cut = image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box)
    if flip < 0.5:
        return ImageOps.mirror(cut)
    return cut


def _find_splits(root: Path) -> tuple[Split, Split]:
    """Return the images for training and for evaluation; the same without `train` and `val`.

    Raises:
        UserError: `train` and `val` have different classes, or there are no images.
    """
    with listing():
        if not ((root / "train").is_dir() and (root / "val").is_dir()):
            split = find_split(root, root)
            return split, split
        train, val = find_split(root / "train", root), find_split(root / "val", root)
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(
            f"{root / 'train'} and {root / 'val'} hold different classes: {', '.join(odd[:5])} are "
            "in one of them only."
        )
    return train, val
