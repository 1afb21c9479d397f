"""Kinds of models, by their task and the structure of their outputs, never by their name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.functional import cross_entropy

from perfexp.errors import UserError
from perfexp.work.trial import MODULE_ERRORS, Inconclusive, trial_outputs

#: Label of pixels that belong to no class (Pascal VOC, Cityscapes, torchvision's references).
VOID = 255

#: Weight of an auxiliary classifier (Szegedy et al., "Going Deeper with Convolutions", section 5).
CLASSIFIER_AUXILIARY_WEIGHT = 0.3

#: Weight of a segmentation model's auxiliary head (pytorch/vision, references/segmentation/train.py).
SEGMENTATION_AUXILIARY_WEIGHT = 0.5


class Kind(Protocol):
    """Inputs, targets and loss of a model.

    Attributes:
        num_classes: number of classes that the model distinguishes, or None if unknown.
        target_dims: dimensions of a batch of targets, or None for any.
    """

    name: str
    num_classes: int | None
    target_dims: int | None

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        """Shape of one sample, without the batch, from height and width in pixels."""

    def random_targets(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> torch.Tensor | None:
        """Class indices for `loss`, on the host, for height and width in pixels; None where there are none."""

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The scalar to minimize, for the module's outputs and class indices (batch,) or (batch, height, width)."""


class Classification:
    """One class per image."""

    name = "classification"
    target_dims: int | None = 1

    def __init__(self, num_classes: int) -> None:
        self.num_classes: int | None = num_classes
        self._classes = num_classes

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        """(3, height, width)."""
        return (3, *input_size)

    def random_targets(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> torch.Tensor | None:
        """(batch,)."""
        return torch.randint(self._classes, (batch_size,), generator=generator)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Cross-entropy."""
        return weighted_cross_entropy(outputs, targets)


class VideoClassification(Classification):
    """One class per clip of a number of frames."""

    name = "video classification"

    def __init__(self, num_classes: int, *, frames: int) -> None:
        super().__init__(num_classes)
        self._frames = frames

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        """(3, frames, height, width)."""
        return (3, self._frames, *input_size)


class Segmentation(Classification):
    """One class per pixel of an image."""

    name = "segmentation"
    target_dims: int | None = 3

    def random_targets(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> torch.Tensor | None:
        """(batch, height, width)."""
        return torch.randint(self._classes, (batch_size, *input_size), generator=generator)


class ByOutput:
    """Kind by the outputs' shape: (batch, classes) is classification, (batch, classes, h, w) segmentation.

    The shape comes from a trial on fake tensors, so that nothing runs on the device before the first call.

    Args:
        sample_shape: maps an input size to the shape of one sample.
    """

    name = "by output shape"
    target_dims: int | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        sample_shape: Callable[[tuple[int, int]], tuple[int, ...]],
        loss: Callable[[Any, Any], torch.Tensor] | None,
        num_classes: int | None,
    ) -> None:
        self.num_classes = num_classes
        self._module = module
        self._sample_shape = sample_shape
        self._loss = loss or weighted_cross_entropy

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        return tuple(self._sample_shape(input_size))

    def random_targets(
        self, input_size: tuple[int, int], batch_size: int, generator: torch.Generator
    ) -> torch.Tensor | None:
        """(batch,) or (batch, h, w) at the outputs' size; None for outputs of other shapes."""
        shape = (batch_size, *self.sample_shape(input_size))
        like = next(self._module.parameters(), torch.empty(0))
        try:
            outputs = main_output(trial_outputs(self._module, shape, like.dtype, like.device))
        except (Inconclusive, UserError, *MODULE_ERRORS):
            return None  # the first forward pass raises the error, if any
        if outputs.ndim not in (2, 4):
            return None
        return torch.randint(outputs.shape[1], (batch_size, *outputs.shape[2:]), generator=generator)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """The module's own loss, or cross-entropy."""
        return self._loss(outputs, targets)


def main_output(outputs: Any) -> torch.Tensor:
    """The class scores among a module's outputs, (batch, classes, …); raises `UserError` without any."""
    return next(_weighted(outputs))[1]


def weighted_cross_entropy(outputs: Any, targets: Any) -> torch.Tensor:
    """Cross-entropy of the main output and, weighted, of the auxiliary ones.

    Args:
        outputs: a tensor; a mapping with `out` and perhaps `aux`; or a named tuple with `logits` and `aux_logits…`.
        targets: class indices, (batch,) or (batch, height, width).

    Raises:
        UserError: the outputs have another structure, or there are no targets.
    """
    if targets is None:
        raise UserError(
            "There are no targets to learn from: the model's outputs are neither (batch, classes) nor (batch, classes, "
            "height, width). Infer with it, or give the module a method loss(outputs, targets)."
        )
    ignored = _ignored_label(targets)
    losses = (weight * cross_entropy(scores, targets, ignore_index=ignored) for weight, scores in _weighted(outputs))
    return sum(losses, start=next(losses))


def correct(outputs: Any, targets: torch.Tensor) -> tuple[int, int]:
    """Number of largest scores at the target's class, and number of targets; void pixels do not count."""
    counted = targets != _ignored_label(targets)
    right = (main_output(outputs).argmax(1) == targets) & counted
    return int(right.sum()), int(counted.sum())


def _ignored_label(targets: torch.Tensor) -> int:
    """The void label: only pixels can be void, since 255 may be an image's class. -100 is torch's default."""
    return VOID if targets.ndim == 3 else -100


def _weighted(outputs: Any) -> Iterator[tuple[float, torch.Tensor]]:
    """The scores in a module's outputs with their weights in the loss, the main ones first."""
    if isinstance(outputs, torch.Tensor):
        yield 1.0, outputs
    elif isinstance(outputs, Mapping) and "out" in outputs:
        yield 1.0, outputs["out"]
        if "aux" in outputs:
            yield SEGMENTATION_AUXILIARY_WEIGHT, outputs["aux"]
    elif hasattr(outputs, "logits"):
        yield 1.0, outputs.logits
        for name in getattr(outputs, "_fields", ()):
            if name.startswith("aux_logits") and getattr(outputs, name) is not None:
                yield CLASSIFIER_AUXILIARY_WEIGHT, getattr(outputs, name)
    else:
        raise UserError(
            f"The model returns a {type(outputs).__name__}; its class scores are looked for in a tensor, a mapping "
            "with 'out', or a tuple with 'logits'. Infer with it, or give the module a method loss(outputs, targets)."
        )
