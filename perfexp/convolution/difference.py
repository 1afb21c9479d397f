"""Relative error between a model's outputs and reference outputs.

The correctness check compares faster convolutions with torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from perfexp.cost.tensors import tensors_in


def relative_error(outputs: Any, reference: Any) -> float | None:
    """Return the relative L2 error over nested floating-point tensors.

    Errors of algorithms and of reduced precisions are measured with it.

    Returns:
        None if a number is not finite or the reference is all zero.
    """
    error = norm = 0.0
    for output, expected in zip(_tensors(outputs), _tensors(reference), strict=True):
        error += float((output.double() - expected.double()).square().sum())
        norm += float(expected.double().square().sum())
    if not norm or not math.isfinite(error) or not math.isfinite(norm):
        return None
    return math.sqrt(error / norm)


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested outputs, in order."""
    return [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]


@contextmanager
def with_statistics(module: torch.nn.Module, run: Callable[[], object]) -> Iterator[None]:
    """Give a model's untrained batch norms the activation statistics of a call, while entered.

    Without statistics, a deep model with random weights is a poor test. Its outputs hardly depend
    on inputs (ResNet-152: by 1 %, GoogLeNet: by 0.001 %) or numerical errors, or are not finite. A
    call that fails in training mode (a single number per channel) changes nothing.
    """
    norms = [
        norm for norm in module.modules() if isinstance(norm, _BatchNorm) and _is_untrained(norm)
    ]
    before: list[tuple[dict[str, torch.Tensor], float | None]] = []
    for norm in norms:
        buffers = {name: value.clone() for name, value in norm.named_buffers()}
        before.append((buffers, norm.momentum))
    try:
        for norm in norms:
            norm.train()
            norm.momentum = 1.0  # the call's statistics replace the earlier ones
        try:
            if norms:
                run()
            _restore(norms, before, buffers=False)
        except ValueError:
            _restore(norms, before, buffers=True)
        yield
    finally:
        _restore(norms, before, buffers=True)


def _is_untrained(norm: _BatchNorm) -> bool:
    """Return whether a batch norm still has its initial statistics, mean 0 and variance 1."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        return False
    return not mean.any() and bool((variance == 1).all())


def _restore(
    norms: list[_BatchNorm],
    before: list[tuple[dict[str, torch.Tensor], float | None]],
    *,
    buffers: bool,
) -> None:
    """Set batch norms to evaluation mode with their earlier momentum.

    `with_statistics` calls it before the comparison and at its end.

    Args:
        buffers: whether to restore the statistics as well.
    """
    for norm, (values, momentum) in zip(norms, before, strict=True):
        norm.eval()
        norm.momentum = momentum
        if buffers:
            for name, value in values.items():
                norm.get_buffer(name).copy_(value)
