"""Constants: small tensors that algorithms use in every call (transforms, indices), made once for each device."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

_made: dict[Hashable, torch.Tensor] = {}


def constant(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` returns, from the second time on without making it.

    A compiler that traces the call sees how it is made, and decides for itself what to do beforehand.

    Args:
        key: what it is, with its data type and device.
        make: makes it.
    """
    if torch.compiler.is_compiling():
        return make()
    tensor = _made.get(key)
    if tensor is None:
        with torch.inference_mode(False):  # what inference leaves here, training can't use
            tensor = make()
        if type(tensor) is torch.Tensor:  # and nothing can use the fake tensors of a trial
            _made[key] = tensor
    return tensor


def clear() -> None:
    """Give back the memory of all of them; they are made again where they are needed."""
    _made.clear()
