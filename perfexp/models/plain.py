"""A model's fp32 outputs, as a reference for faster computations.

The correctness check of `measuring` compares the measured outputs with them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from perfexp.models import modules, tf32


def outputs_in_fp32(module: torch.nn.Module, inputs: Any) -> Any:
    """Return the outputs of an fp32 copy in the default layout, without TF32 or compiler.

    The copy needs memory for a second set of weights.
    """
    copy = deepcopy(module).float()
    for parameter in copy.parameters():
        parameter.data = parameter.data.contiguous()

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().contiguous() if tensor.is_floating_point() else tensor

    with tf32.off():
        return modules.called(copy, tree_map_only(torch.Tensor, plain, inputs))
