"""Small constant tensors of the algorithms (transforms, indices), cached per device."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

_made: dict[Hashable, torch.Tensor] = {}


def constant(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The cached result of `make`; the key includes data type and device.

    A compiler that traces the call sees how the tensor is made and does its own constant folding.
    """
    if torch.compiler.is_compiling():
        return make()
    tensor = _made.get(key)
    if tensor is None:
        with torch.inference_mode(False):  # training cannot use inference tensors
            tensor = make()
        if type(tensor) is torch.Tensor:  # no call can use the fake tensors of a trial
            _made[key] = tensor
    return tensor


def clear() -> None:
    """Free all cached tensors; they are made again on demand."""
    _made.clear()
