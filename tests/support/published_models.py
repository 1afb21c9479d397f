"""Models of torchvision without their initial numbers, and how far their published figures may differ."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

#: Largest relative difference that is agreement, and half of the last digit of `_ops`.
TOLERANCE, ROUNDING = 0.01, 0.0005
#: What a builder sets with published weights: googlenet's have no auxiliary classifiers, inception_v3's have.
SETTINGS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"init_weights": False},
}


@contextmanager
def without_initial_numbers() -> Iterator[None]:
    """While entered, parameters are made and not filled, so that their memory is never touched."""
    with ExitStack() as stack:
        for name, _ in inspect.getmembers(torch.nn.init, inspect.isfunction):
            if name.endswith("_") and not name.startswith("_"):
                stack.enter_context(
                    patch.object(torch.nn.init, name, lambda tensor, *_, **__: tensor)
                )
        yield


def build(models: Any, name: str, size: int) -> torch.nn.Module:
    """The model that a set of weights is for.

    Args:
        models: torchvision.models.
        name: of the builder.
        size: of the pictures.
    """
    settings = dict(SETTINGS.get(name, {}))
    if name.startswith("vit_"):
        settings["image_size"] = size
    with without_initial_numbers():
        module = models.get_model(name, weights=None, **settings)
    assert isinstance(module, torch.nn.Module)
    return module.eval()


def size_of(weights: Any) -> int:
    """Height and width of the pictures that a set of weights is evaluated at."""
    return int(weights.transforms().crop_size[0])
