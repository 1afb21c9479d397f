"""Difference: by how much what a model returns differs from what it should."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


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


@contextmanager
def with_statistics_of(module: torch.nn.Module, run: Callable[[], object]) -> Iterator[bool]:
    """While entered, batch norms hold the statistics of what a call gives them; false if there are none to set.

    A deep model with random weights and no statistics grows or shrinks what passes through it until nothing is left
    that could be compared.

    Args:
        module: of which they are part.
        run: the call.
    """
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    before = [({name: value.clone() for name, value in each.named_buffers()}, each.momentum) for each in norms]
    try:
        for norm in norms:
            norm.train()
            norm.momentum = 1.0
        if norms:
            run()
        for norm in norms:
            norm.eval()
        yield bool(norms)
    finally:
        for norm, (buffers, momentum) in zip(norms, before, strict=True):
            norm.eval()
            norm.momentum = momentum
            for name, value in buffers.items():
                norm.get_buffer(name).copy_(value)
