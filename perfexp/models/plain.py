"""A model's outputs in fp32, as a reference for faster ways to compute them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from perfexp.models import modules, tf32


def outputs_in_fp32(module: torch.nn.Module, inputs: Any) -> Any:
    """The outputs of a copy in fp32, in the usual layout, without TF32 and compiler."""
    copy = deepcopy(module).float()
    for parameter in copy.parameters():
        parameter.data = parameter.data.contiguous()

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().contiguous() if tensor.is_floating_point() else tensor

    with tf32.off():
        return modules.called(copy, tree_map_only(torch.Tensor, plain, inputs))
