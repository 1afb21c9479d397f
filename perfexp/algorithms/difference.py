"""Difference: by how much what a model returns differs from what it should."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def relative_error(found: Any, reference: Any) -> float | None:
    """Relative L2 error over all floating-point numbers; None where one is not finite, or the reference is all zero.

    Args:
        found: a tensor, or tensors in lists, tuples and mappings.
        reference: likewise, of the same structure.
    """
    pairs = list(zip(_tensors(found), _tensors(reference), strict=True))
    apart = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    length = sum(float(other.double().square().sum()) for _, other in pairs)
    return math.sqrt(apart / length) if length and math.isfinite(apart) and math.isfinite(length) else None


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, Mapping):
        for each in outputs.values():
            yield from _tensors(each)
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors(each)
