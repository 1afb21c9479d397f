"""Cityscapes: street images with a class per pixel, from a folder, through torch's DataLoader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from perfexp.data.cityscapes_folder import CLASSES, Pair, find_pairs, read_mask, train_ids
from perfexp.data.image_files import read_image
from perfexp.data.loading import Loading, Samples, to_tensor
from perfexp.data.made import MADE
from perfexp.data.mmseg_pipeline import SamplePipeline
from perfexp.models import Session

#: Range of a random crop's magnification. Sources: pytorch/vision,
#: references/segmentation/presets.py, and mmsegmentation's pipelines.
_SCALES = (0.5, 2.0)


@dataclass(kw_only=True, eq=False)
class Cityscapes(Loading):
    """A folder with images leftImg8bit/{train,val}/CITY/*_leftImg8bit.png and masks gtFine/….

    A mask holds train ids (*_gtFine_labelTrainIds.png) or label ids (*_gtFine_labelIds.png). An
    mmsegmentation model gets its images from the pipelines in its configuration. Other models get
    random crops, or whole images in evaluation. See `perfexp.data.images.Images` for the arguments.
    Raises `UserError` if the folder is incomplete.
    """

    root: str

    def __post_init__(self) -> None:
        super().__post_init__()
        folder = Path(self.root).expanduser()
        self._train, self._val = find_pairs(folder, "train"), find_pairs(folder, "val")
        # accuracy on made masks is meaningless
        self.labelled = not (folder / MADE).is_file()
        self.num_classes: int | None = len(CLASSES)
        self.num_samples: int | None = len(self._train)
        self.held_out = True

    def samples(
        self, session: Session, input_size: tuple[int, int], *, training: bool, seed: int
    ) -> Samples:
        pairs = self._train if training else self._val
        classes = min(len(CLASSES), session.num_classes or len(CLASSES))
        # mmsegmentation's sessions have pipelines for their images
        if (config := getattr(session, "config", None)) is not None:
            pipeline = SamplePipeline(
                config, input_size, training=training, classes=classes, seed=seed
            )
            return Samples(pairs, pipeline.prepare, pipeline.join)
        return Samples(pairs, partial(cropped, size=input_size, training=training, classes=classes))


def cropped(
    pair: Pair, *, size: tuple[int, int], training: bool, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an image, normalized float32 (3, height, width), and its mask, int64 (height, width).

    In training they are a random crop, mirrored half of the time. The image is scaled 0.5 to 2
    times before, or more if needed to fill the crop. In evaluation the whole image is resized.

    Args:
        size: height and width in pixels.
        classes: number of classes; a mask with others raises `UserError`.
    """
    image = read_image(pair.image)
    whole, shape = (image.height, image.width), (size[1], size[0])
    mask = Image.fromarray(train_ids(read_mask(pair.mask), pair.mask, size=whole, classes=classes))
    box = _random_box(whole, size) if training else (0, 0, image.width, image.height)
    image = image.resize(shape, Image.Resampling.BILINEAR, box=box)
    mask = mask.resize(shape, Image.Resampling.NEAREST, box=box)
    if training and torch.rand(()) < 0.5:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    return to_tensor(image), torch.from_numpy(np.array(mask)).long()


def _random_box(whole: tuple[int, int], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a random part of an image, from torch's generator."""
    fraction, across, down = torch.rand(3).tolist()
    filling = max(size[0] / whole[0], size[1] / whole[1])
    scale = max(_SCALES[0] + fraction * (_SCALES[1] - _SCALES[0]), filling)
    height, width = min(size[0] / scale, whole[0]), min(size[1] / scale, whole[1])
    left, top = across * (whole[1] - width), down * (whole[0] - height)
    return left, top, min(left + width, whole[1]), min(top + height, whole[0])
