"""A model's outputs in fp32, as a reference for faster ways to compute them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from perfexp.models import tf32


def outputs_in_fp32(module: torch.nn.Module, inputs: Any) -> Any:
    """The outputs of a copy in fp32, in the usual layout, without TF32 and compiler."""
    copy = deepcopy(module).float()
    for parameter in copy.parameters():
        parameter.data = parameter.data.contiguous()
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        inputs = inputs.float().contiguous()
    with tf32.off():
        return copy(inputs)
