"""CLIP gesture classifier: compares skeleton movements or video frames with gesture names.

Texts such as "a person doing elbow flexion left" describe the classes. The class whose text is most
similar to the input wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import cross_entropy

from perfexp.devices import Device
from perfexp.errors import UserError
from perfexp.models import Backbone, ClipSize, Execution, Precision
from perfexp.models.gestures import GESTURES, PROMPT
from perfexp.models.kinds import Classification
from perfexp.models.session import TorchSession
from perfexp.models.torchvision_import import import_torchvision
from perfexp.models.transformer import (
    ClipClassifier,
    FrameEncoder,
    SequenceEncoder,
    TextEncoder,
    info_nce,
)
from perfexp.models.weight_files import find_weights
from perfexp.models.weights import load_weights

#: Coordinates per joint.
_COORDINATES = 3


@dataclass(frozen=True)
class _Shape:
    """Width, layers and heads of the sequence and text encoders, and the embedding length."""

    sequence: tuple[int, int, int]
    text: tuple[int, int, int]
    embedding: int


#: 0.5, 1.5, 4, 11, 20 and 35 million parameters, each within 10 %.
_SHAPES = {
    ClipSize.tiny: _Shape((96, 3, 4), (64, 2, 2), 64),
    ClipSize.small: _Shape((160, 4, 4), (96, 2, 2), 128),
    ClipSize.medium: _Shape((256, 4, 4), (128, 3, 4), 128),
    ClipSize.large: _Shape((384, 5, 6), (192, 4, 4), 192),
    ClipSize.xlarge: _Shape((512, 5, 8), (256, 4, 4), 256),
    ClipSize.xxlarge: _Shape((640, 6, 10), (320, 4, 5), 256),
}


@dataclass(kw_only=True, eq=False)
class ClipGesture:
    """A classifier with cosines between a movement and the gesture prompts as scores.

    Its fields are the keys of the `model` node; `plan/key_descriptions.yaml` describes them.
    """

    name: str = "clip_gesture"
    size: ClipSize = ClipSize.tiny
    backbone: Backbone = Backbone.skeleton
    joints: int = 25
    frames: int = 10
    gestures: Sequence[str] | None = None
    temperature: float = 0.05
    contrastive_weight: float = 0.6
    dropout: float = 0.1
    weights: str | None = None
    weights_dir: str | None = None

    def __post_init__(self) -> None:
        """Convert names to enum members, and raise `UserError` for an impossible setting."""
        # a plan contains names instead of enum members
        self.size, self.backbone = ClipSize(self.size), Backbone(self.backbone)
        self._names = names = list(self.gestures or GESTURES)
        for key, is_possible, allowed in (
            ("joints", self.joints >= 1, "1 joint or more"),
            ("frames", self.frames >= 1, "1 frame or more"),
            ("gestures", len(set(names)) == len(names) > 1, "two names or more, all different"),
            ("temperature", self.temperature > 0, "a positive number"),
            ("contrastive_weight", 0 <= self.contrastive_weight <= 1, "a number from 0 to 1"),
            ("dropout", 0 <= self.dropout < 1, "a number from 0, below 1"),
        ):
            if not is_possible:
                raise UserError(f"model.{key}={getattr(self, key)}: set {allowed}.")

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> ClipSession:
        """Build the classifier, load its weights, and return its session.

        Raises `UserError` if the data has more classes than there are gestures, or the weights do
        not fit.
        """
        classes = len(self._names)
        if num_classes is not None and num_classes > classes:
            raise UserError(
                f"The data has {num_classes} classes, and model.gestures names {classes}: name "
                "them all."
            )
        file = find_weights(self.name, self.weights, self.weights_dir)
        torch.manual_seed(seed)
        module = self._build()
        if file is not None:
            load_weights(module, file)
        is_clip = self.backbone is Backbone.image
        frames = self.frames if is_clip else None
        return ClipSession(
            module,
            kind=Gesture(classes, frames=frames, contrastive_weight=self.contrastive_weight),
            name=self.name,
            device=device,
            precision=precision,
            execution=execution,
            facts={"weights": str(file or f"random, seed {seed}"), "size": self.size.value},
        )

    def _build(self) -> ClipClassifier:
        """Return the classifier for the configured size and inputs, with random weights."""
        shape = _SHAPES[self.size]
        texts = TextEncoder(
            [PROMPT.format(name) for name in self._names], *shape.text, shape.embedding
        )
        inputs: torch.nn.Module
        if self.backbone is Backbone.image:
            inputs = FrameEncoder(import_torchvision().models.vit_b_32(num_classes=shape.embedding))
        else:
            inputs = SequenceEncoder(
                _COORDINATES * self.joints, *shape.sequence, self.dropout, shape.embedding
            )
        return ClipClassifier(
            inputs, texts, num_classes=len(self._names), temperature=self.temperature
        )


class Gesture(Classification):
    """One gesture per movement or per clip.

    A movement has the shape (frames, columns), given by the input size. A clip has a fixed number
    of frames.
    """

    name = "gesture classification"

    def __init__(self, num_classes: int, *, frames: int | None, contrastive_weight: float) -> None:
        super().__init__(num_classes)
        self._frames, self._contrastive_weight = frames, contrastive_weight

    def sample_shape(self, input_size: tuple[int, int]) -> tuple[int, ...]:
        """Return (frames, columns) for a movement, (3, frames, height, width) for a clip."""
        return tuple(input_size) if self._frames is None else (3, self._frames, *input_size)

    def loss(self, outputs: Any, targets: Any, label_smoothing: float = 0.0) -> torch.Tensor:
        """Return InfoNCE plus cross-entropy, weighted.

        InfoNCE compares each input with the texts for the batch's own targets. Cross-entropy
        compares it with the texts for all classes.
        """
        weight = self._contrastive_weight
        contrastive = info_nce(outputs.index_select(1, targets))  # column i: text for input i
        classifying = cross_entropy(outputs, targets, label_smoothing=label_smoothing)
        return weight * contrastive + (1 - weight) * classifying


class ClipSession(TorchSession):
    """A session that encodes the class texts once per series of inferences."""

    @contextmanager
    def inferring(self) -> Iterator[None]:
        """Set evaluation mode inside the context.

        The class texts are encoded first, once with the current weights.
        """
        with super().inferring():
            with self._autocast():
                cast(ClipClassifier, self.module).encode_texts()
            yield
