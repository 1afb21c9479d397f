"""Prepare images and masks by a configuration of mmsegmentation, at the size of a point."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sized
from typing import Any

import torch

from perfexp.data.cityscapes_folder import Pair, check_picture
from perfexp.data.cityscapes_masks import VOID, read_mask, train_ids
from perfexp.errors import UserError
from perfexp.models.mmseg import Pictures

#: Keys of a pipeline in a configuration, first that of the loader, which mmengine runs.
_TRAIN = ("train_dataloader", "train_pipeline")
_TEST = ("test_dataloader", "val_dataloader", "test_pipeline")


class Pipeline:
    """The training or test pipeline of a configuration, unchanged but for the sizes.

    Random crops have the size of the point; without them, and in tests, images are resized to it. An image that is
    smaller than its crop is padded, with void in its mask. In tests a mask keeps its own size.

    Raises:
        UserError: the configuration has no such pipeline, or it cannot be built.
    """

    def __init__(self, config: Any, size: tuple[int, int], *, training: bool, classes: int) -> None:
        from mmengine.dataset import Compose
        from mmengine.registry import DefaultScope

        importlib.import_module("cv2").setNumThreads(0)  # as in mmengine: parallelism comes from the loader's processes
        self._size, self._training = size, training
        described = _sized(_described(config, training=training), size, training=training)
        if not any(_name(step) == "LoadAnnotations" for step in described):
            raise UserError(f"The {self._of} loads no masks (LoadAnnotations), which data=cityscapes is about.")
        try:
            import mmseg.datasets  # noqa: F401 - registers the transforms

            with DefaultScope.overwrite_default_scope("mmseg"):
                self._run = Compose(_with_check(described, _Labels(classes)))
        except (ImportError, KeyError, TypeError, ValueError, AssertionError) as error:
            raise UserError(f"The {self._of} can't be built: {error}") from error

    @property
    def _of(self) -> str:
        return f"configuration's {'training' if self._training else 'test'} pipeline"

    def __call__(self, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Preparation`: uint8 (3, height, width), and int64 (height, width)."""
        try:
            packed = self._run(
                {
                    "img_path": str(pair.picture),
                    "seg_map_path": str(pair.mask),
                    "label_map": None,
                    "reduce_zero_label": False,
                    "seg_fields": [],
                    "pair": pair,
                }
            )
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a transform is arbitrary code
            check_picture(pair.picture)
            read_mask(pair.mask)
            raise UserError(f"The {self._of} fails at {pair.picture}: {type(error).__name__}: {error}") from error
        if packed is None:
            raise UserError(f"The {self._of} leaves nothing of {pair.picture}.")
        picture, mask = packed["inputs"], packed["data_samples"].gt_sem_seg.data[0]
        self._check(picture, pair)
        return picture, _padded(mask, self._size) if self._training else mask

    def collate(self, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Sized, torch.Tensor]:
        masks = [mask for _, mask in samples]
        if len({mask.shape for mask in masks}) > 1:
            raise UserError(
                "The pictures of one batch have different sizes, and so have their masks, which a test leaves as they "
                "are: use batch_size=1, or pictures of one size."
            )
        return Pictures([picture for picture, _ in samples], self._size, self._training), torch.stack(masks)

    def _check(self, picture: torch.Tensor, pair: Pair) -> None:
        """Check that the image has the point's size, or in training a smaller one, which is padded on the device."""
        made = tuple(picture.shape[-2:])
        if made != self._size and not (self._training and made[0] <= self._size[0] and made[1] <= self._size[1]):
            raise UserError(
                f"The {self._of} makes {made[0]} × {made[1]} pixels of {pair.picture}, the point is "
                f"{self._size[0]} × {self._size[1]}: it needs a {'RandomCrop' if self._training else 'Resize'}."
            )


class _Labels:
    """A transform that converts a loaded mask to train ids of the model's classes."""

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def __call__(self, results: dict[str, Any]) -> dict[str, Any]:
        mask, size = results["gt_seg_map"], tuple(results["ori_shape"][:2])
        results["gt_seg_map"] = train_ids(mask, results["pair"].mask, size=size, classes=self._classes)
        return results


def _described(config: Any, *, training: bool) -> list[dict[str, Any]]:
    """A pipeline of a configuration as plain data; raises `UserError` if there is none."""
    for key in _TRAIN if training else _TEST:
        node = config.get(key)
        while isinstance(node, Mapping):  # a loader, its data set, the one that this repeats, …
            inner = node.get("pipeline", node.get("dataset", (node.get("datasets") or [None])[0]))
            node = inner
        if node:
            return [copy.deepcopy(dict(step)) for step in node]
    raise UserError(f"The configuration has no {(_TRAIN if training else _TEST)[-1]} to prepare pictures by.")


def _sized(described: list[dict[str, Any]], size: tuple[int, int], *, training: bool) -> list[dict[str, Any]]:
    """The same pipeline for images of a height and width."""
    crops = training and any(_name(step) == "RandomCrop" for step in described)
    for step in described:
        scale = step.get("scale")
        if isinstance(scale, list) and not any(isinstance(number, list | tuple) for number in scale):
            step["scale"] = tuple(scale)  # a list, which YAML gives, would be a choice of scales
        if _name(step) == "RandomCrop":
            step["crop_size"] = size
        elif _name(step) == "Resize" and not crops:
            step.pop("scale_factor", None)
            step.update(scale=(size[1], size[0]), keep_ratio=False)
        elif _name(step) == "LoadAnnotations":
            step.pop("reduce_zero_label", None)  # meant for other data: here 0 is a class
    return described


def _with_check(described: list[dict[str, Any]], check: _Labels) -> list[Any]:
    steps: list[Any] = []
    for step in described:
        steps += [step, check] if _name(step) == "LoadAnnotations" else [step]
    return steps


def _name(described: Mapping[str, Any]) -> str:
    kind = described.get("type")
    return kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", "")


def _padded(mask: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The mask padded with void to the right and below, where the images are padded."""
    height, width = mask.shape
    if (height, width) == size:
        return mask
    whole = torch.full(size, VOID, dtype=mask.dtype)
    whole[:height, :width] = mask
    return whole
