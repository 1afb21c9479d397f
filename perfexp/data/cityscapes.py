"""Cityscapes: street images with a class per pixel, from a folder (data=cityscapes).

Models of mmsegmentation bring their own preparation of images, `SamplePipeline`. Other models get
plain crops, `cropped`. Both run in the loader's processes (`perfexp.data.loading`).
"""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn.functional import pad

from perfexp.data.cityscapes_folder import (
    CLASSES,
    MADE,
    REPAIR_ADVICE,
    VOID,
    Pair,
    find_pairs,
    read_mask,
    train_ids,
)
from perfexp.data.image_files import read_image
from perfexp.data.loading import Loading, Samples, to_tensor
from perfexp.errors import UserError
from perfexp.models import Session
from perfexp.models.mmseg_config import HostImages

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
        """Find all pairs of image and mask."""
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
        """Return the pairs of one split, prepared as the model needs them; see `Loading`."""
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
    image_size, shape = (image.height, image.width), (size[1], size[0])
    mask = Image.fromarray(
        train_ids(read_mask(pair.mask), pair.mask, size=image_size, classes=classes)
    )
    box = _random_box(image_size, size) if training else (0, 0, image.width, image.height)
    image = image.resize(shape, Image.Resampling.BILINEAR, box=box)
    mask = mask.resize(shape, Image.Resampling.NEAREST, box=box)
    if training and torch.rand(()) < 0.5:
        image, mask = ImageOps.mirror(image), ImageOps.mirror(mask)
    return to_tensor(image), torch.from_numpy(np.array(mask)).long()


def _random_box(
    image_size: tuple[int, int], size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a random part of an image, from torch's generator.

    Args:
        image_size: height and width of the image.
        size: height and width of the crop that the part is resized to.
    """
    fraction, across, down = torch.rand(3).tolist()
    # the image just fills the crop
    least_scale = max(size[0] / image_size[0], size[1] / image_size[1])
    scale = max(_SCALES[0] + fraction * (_SCALES[1] - _SCALES[0]), least_scale)
    height, width = min(size[0] / scale, image_size[0]), min(size[1] / scale, image_size[1])
    left, top = across * (image_size[1] - width), down * (image_size[0] - height)
    return left, top, min(left + width, image_size[1]), min(top + height, image_size[0])


#: Keys under which a configuration may have a pipeline. mmengine itself uses that of the loader,
#: which comes first.
_TRAIN = ("train_dataloader", "train_pipeline")
_TEST = ("test_dataloader", "val_dataloader", "test_pipeline")


class SamplePipeline:
    """The training or test pipeline of an mmsegmentation configuration, with a point's image size.

    A pipeline is a list of steps, such as `LoadAnnotations` or `RandomCrop`. Random crops get the
    point's size. Without them, and in tests, images are resized to it. An image smaller than its
    crop is padded, with void in its mask. In tests a mask keeps its own size. Raises `UserError` if
    the configuration has no such pipeline or it cannot be built.

    Args:
        config: the session's mmengine configuration.
        size: height and width in pixels.
        classes: number of classes that masks may contain.
    """

    def __init__(
        self, config: Any, size: tuple[int, int], *, training: bool, classes: int, seed: int
    ) -> None:
        from mmengine.dataset import Compose
        from mmengine.registry import DefaultScope

        # without loader processes, transforms use these generators; torch seeds loader processes
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # as in mmengine: parallelism comes from the loader's processes
        importlib.import_module("cv2").setNumThreads(0)
        self._size, self._training = size, training
        steps: list[Any] = _steps(config, training=training)
        _set_sizes(steps, size, training=training)
        loading = [number for number, step in enumerate(steps) if _name(step) == "LoadAnnotations"]
        if not loading:
            raise UserError(
                f"The {self._of} loads no masks (LoadAnnotations), which data=cityscapes is about."
            )
        for number in reversed(loading):  # from the end, so that earlier numbers stay
            steps.insert(number + 1, _ToTrainIds(classes))
        try:
            import mmseg.datasets  # noqa: F401 - registers the transforms

            with DefaultScope.overwrite_default_scope("mmseg"):
                self._run = Compose(steps)
        except (ImportError, KeyError, TypeError, ValueError, AssertionError) as error:
            raise UserError(f"The {self._of} can't be built: {error}") from error

    @property
    def _of(self) -> str:
        """Return the pipeline's name for messages."""
        return f"configuration's {'training' if self._training else 'test'} pipeline"

    def prepare(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image, uint8 (3, height, width), and its mask, int64 (height, width).

        Raises:
            UserError: a file is damaged, or the pipeline fails or makes images of another size.
        """
        try:
            paths = {"img_path": str(pair.image), "seg_map_path": str(pair.mask), "pair": pair}
            packed = self._run(
                {**paths, "label_map": None, "reduce_zero_label": False, "seg_fields": []}
            )
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a transform is arbitrary code
            read_image(pair.image, REPAIR_ADVICE)
            read_mask(pair.mask)
            raise UserError(
                f"The {self._of} fails at {pair.image}: {type(error).__name__}: {error}"
            ) from error
        if packed is None:
            raise UserError(f"The {self._of} leaves nothing of {pair.image}.")
        image, mask = packed["inputs"], packed["data_samples"].gt_sem_seg.data[0]
        self._check(image, pair)
        # the image is padded on the device
        if self._training and mask.shape != self._size:
            mask = pad(
                mask,
                (0, self._size[1] - mask.shape[1], 0, self._size[0] - mask.shape[0]),
                value=VOID,
            )
        return image, mask

    def join(
        self, samples: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[Any, torch.Tensor]:
        """Return a batch on the host: images of any sizes, and masks (batch, height, width).

        Raises:
            UserError: mask sizes differ, for example in tests with images of several sizes.
        """
        masks = [mask for _, mask in samples]
        if len({mask.shape for mask in masks}) > 1:
            raise UserError(
                "The masks of one batch have different sizes, and inference does not resize masks: "
                "use batch_size=1, or images of one size."
            )
        return HostImages([image for image, _ in samples], self._size, self._training), torch.stack(
            masks
        )

    def _check(self, image: torch.Tensor, pair: Pair) -> None:
        """Raise `UserError` unless the image has the point's size.

        In training it may be smaller, because it is padded on the device.
        """
        height, width = image.shape[-2:]
        is_padded = self._training and height <= self._size[0] and width <= self._size[1]
        if (height, width) != self._size and not is_padded:
            raise UserError(
                f"The {self._of} makes {height} × {width} pixels of {pair.image}, the point is "
                f"{self._size[0]} × {self._size[1]}: it needs a "
                f"{'RandomCrop' if self._training else 'Resize'}."
            )


class _ToTrainIds:
    """Pipeline step after `LoadAnnotations` that checks a mask and converts it to train ids."""

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        """Convert the mask in a sample, which mmsegmentation passes from step to step."""
        mask, size = results["gt_seg_map"], tuple(results["ori_shape"][:2])
        results["gt_seg_map"] = train_ids(
            mask, results["pair"].mask, size=size, classes=self._classes
        )
        return results


def _steps(config: Any, *, training: bool) -> list[dict[str, Any]]:
    """Return a copy of the steps in a configuration's pipeline; raise `UserError` without one."""
    for key in _TRAIN if training else _TEST:
        node = config.get(key)
        while isinstance(node, Mapping):  # loader, data set, repeated data set, …
            node = node.get("pipeline", node.get("dataset", (node.get("datasets") or [None])[0]))
        if node:
            return [copy.deepcopy(dict(step)) for step in node]
    raise UserError(
        f"The configuration has no {(_TRAIN if training else _TEST)[-1]} to prepare images by."
    )


def _set_sizes(steps: list[dict[str, Any]], size: tuple[int, int], *, training: bool) -> None:
    """Change the steps so that images have this size (height, width).

    In training, a crop sets the size if there is one.
    """
    crops = training and any(_name(step) == "RandomCrop" for step in steps)
    for step in steps:
        scale = step.get("scale")
        if isinstance(scale, list) and not any(
            isinstance(number, list | tuple) for number in scale
        ):
            # a list, as from YAML, would be a choice of scales
            step["scale"] = tuple(scale)
        if _name(step) == "RandomCrop":
            step["crop_size"] = size
        elif _name(step) == "Resize" and not crops:
            step.pop("scale_factor", None)
            step.update(scale=(size[1], size[0]), keep_ratio=False)
        elif _name(step) == "LoadAnnotations":
            # meant for other data; here 0 is a class
            step.pop("reduce_zero_label", None)


def _name(step: Mapping[str, Any]) -> str:
    """Return the class name of a step; its type may be a class or its dotted name."""
    kind = step.get("type")
    if isinstance(kind, str):
        return kind.rpartition(".")[2]
    return getattr(kind, "__name__", "")
