"""Relative error between a model's outputs and reference outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from perfexp.cost.tensors import tensors_in


def relative_error(found: Any, reference: Any) -> float | None:
    """Return the relative L2 error over nested floating-point tensors.

    Returns:
        None if a number is not finite or the reference is all zero.
    """
    pairs = list(zip(_tensors(found), _tensors(reference), strict=True))
    apart = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    length = sum(float(other.double().square().sum()) for _, other in pairs)
    return (
        math.sqrt(apart / length)
        if length and math.isfinite(apart) and math.isfinite(length)
        else None
    )


def _tensors(outputs: Any) -> list[torch.Tensor]:
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
    before = [
        ({name: value.clone() for name, value in norm.named_buffers()}, norm.momentum)
        for norm in norms
    ]
    try:
        for norm in norms:
            norm.train()
            norm.momentum = 1.0
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
    mean, variance = norm.running_mean, norm.running_var
    return (
        mean is not None and variance is not None and not mean.any() and bool((variance == 1).all())
    )


def _restore(
    norms: list[_BatchNorm],
    before: list[tuple[dict[str, torch.Tensor], float | None]],
    *,
    buffers: bool,
) -> None:
    for norm, (values, momentum) in zip(norms, before, strict=True):
        norm.eval()
        norm.momentum = momentum
        for name, value in values.items() if buffers else ():
            norm.get_buffer(name).copy_(value)
