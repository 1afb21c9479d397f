"""Image and mask preparation by an mmsegmentation configuration, at a point's size."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from perfexp.data.cityscapes_folder import AGAIN, VOID, Pair, read_mask, train_ids
from perfexp.data.image_files import read_image
from perfexp.errors import UserError
from perfexp.models.mmseg import HostImages

#: Keys of a pipeline in a configuration. The loader, which mmengine runs, comes first.
_TRAIN = ("train_dataloader", "train_pipeline")
_TEST = ("test_dataloader", "val_dataloader", "test_pipeline")


class SamplePipeline:
    """A configuration's training or test pipeline, unchanged but for the sizes.

    Random crops have the point's size. Without them, and in tests, images are resized to it. An
    image smaller than its crop is padded, with void in its mask. In tests a mask keeps its own
    size. Raises `UserError` if the configuration has no such pipeline or it cannot be built.
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
        described: list[Any] = _sized(
            _described(config, training=training), size, training=training
        )
        loading = [
            number for number, step in enumerate(described) if _name(step) == "LoadAnnotations"
        ]
        if not loading:
            raise UserError(
                f"The {self._of} loads no masks (LoadAnnotations), which data=cityscapes is about."
            )
        for number in reversed(loading):
            described.insert(number + 1, _Labels(classes))
        try:
            import mmseg.datasets  # noqa: F401 - registers the transforms

            with DefaultScope.overwrite_default_scope("mmseg"):
                self._run = Compose(described)
        except (ImportError, KeyError, TypeError, ValueError, AssertionError) as error:
            raise UserError(f"The {self._of} can't be built: {error}") from error

    @property
    def _of(self) -> str:
        return f"configuration's {'training' if self._training else 'test'} pipeline"

    def prepare(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8 (3, height, width) and int64 (height, width)."""
        try:
            paths = {"img_path": str(pair.image), "seg_map_path": str(pair.mask), "pair": pair}
            packed = self._run(
                {**paths, "label_map": None, "reduce_zero_label": False, "seg_fields": []}
            )
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a transform is arbitrary code
            read_image(pair.image, AGAIN)
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
        """Return a batch on the host.

        Raise `UserError` if mask sizes differ, for example in tests.
        """
        masks = [mask for _, mask in samples]
        if len({mask.shape for mask in masks}) > 1:
            raise UserError(
                "The images of one batch have different sizes, and so have their masks, which a "
                "test leaves as they are: use batch_size=1, or images of one size."
            )
        return HostImages([image for image, _ in samples], self._size, self._training), torch.stack(
            masks
        )

    def _check(self, image: torch.Tensor, pair: Pair) -> None:
        """Raise `UserError` unless the image has the point's size.

        In training it may be smaller, because it is padded on the device.
        """
        made = tuple(image.shape[-2:])
        if made != self._size and not (
            self._training and made[0] <= self._size[0] and made[1] <= self._size[1]
        ):
            raise UserError(
                f"The {self._of} makes {made[0]} × {made[1]} pixels of {pair.image}, the point is "
                f"{self._size[0]} × {self._size[1]}: it needs a "
                f"{'RandomCrop' if self._training else 'Resize'}."
            )


class _Labels:
    def __init__(self, classes: int) -> None:
        self._classes = classes

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        mask, size = results["gt_seg_map"], tuple(results["ori_shape"][:2])
        results["gt_seg_map"] = train_ids(
            mask, results["pair"].mask, size=size, classes=self._classes
        )
        return results


def _described(config: Any, *, training: bool) -> list[dict[str, Any]]:
    for key in _TRAIN if training else _TEST:
        node = config.get(key)
        while isinstance(node, Mapping):  # loader, data set, repeated data set, …
            node = node.get("pipeline", node.get("dataset", (node.get("datasets") or [None])[0]))
        if node:
            return [copy.deepcopy(dict(step)) for step in node]
    raise UserError(
        f"The configuration has no {(_TRAIN if training else _TEST)[-1]} to prepare images by."
    )


def _sized(
    described: list[dict[str, Any]], size: tuple[int, int], *, training: bool
) -> list[dict[str, Any]]:
    """Change the steps so that images have this size (height, width).

    In training, a crop sets the size if there is one.
    """
    crops = training and any(_name(step) == "RandomCrop" for step in described)
    for step in described:
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
    return described


def _name(described: Mapping[str, Any]) -> str:
    kind = described.get("type")
    if isinstance(kind, str):
        return kind.rpartition(".")[2]
    return getattr(kind, "__name__", "")
