"""Sync-free versions of mmsegmentation heads and losses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def masks() -> Iterator[None]:
    """While entered, labelled pixels are selected by a mask.

    mmsegmentation indexes them, for the accuracy that goes with each loss and for the labels of its binary cross
    entropy. Their number requires a synchronization with the device.
    """
    from mmseg.models import losses
    from mmseg.models.losses import cross_entropy_loss

    usual: dict[str, Callable[..., Any]] = {
        "accuracy": losses.accuracy,
        "_expand_onehot_labels": cross_entropy_loss._expand_onehot_labels,
    }
    others = {"accuracy": _accuracy_or(losses.accuracy), "_expand_onehot_labels": _one_hot}
    modules = [module for name, module in sys.modules.items() if name.startswith("mmseg.models")]
    with ExitStack() as stack:
        for module in modules:  # each has its own reference
            for name in usual:
                if vars(module).get(name) is usual[name]:
                    stack.enter_context(patch.object(module, name, others[name]))
        yield


def _accuracy_or(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Mmsegmentation's accuracy with its heads' arguments; other calls use the original."""

    def accuracy(
        pred: torch.Tensor, target: torch.Tensor, topk: Any = 1, thresh: Any = None, ignore_index: int | None = None
    ) -> Any:
        """The share of correct labelled pixels, percent, shape (1,)."""
        if topk != 1 or thresh is not None or ignore_index is None or not len(pred):
            return usual(pred, target, topk, thresh, ignore_index)
        labelled = target != ignore_index
        right = pred.topk(1, dim=1)[1].transpose(0, 1).eq(target[None]) & labelled
        least = torch.finfo(torch.float32).eps
        return (right.reshape(-1).float().sum(0, keepdim=True) + least) * 100.0 / (labelled.float().sum() + least)

    return accuracy


def _one_hot(
    labels: torch.Tensor, label_weights: torch.Tensor | None, target_shape: Sequence[int], ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A plane per class, weights and mask, all of `target_shape` (batch, classes, …), from labels (batch, …)."""
    valid = ((labels >= 0) & (labels != ignore_index)).unsqueeze(1)
    classes = labels.clamp(0, target_shape[1] - 1).unsqueeze(1)
    planes = labels.new_zeros(target_shape).scatter_(1, classes, valid.to(labels.dtype))
    mask = valid.expand(target_shape).float()
    weights = mask if label_weights is None else label_weights.unsqueeze(1).expand(target_shape) * mask
    return planes, weights, mask
