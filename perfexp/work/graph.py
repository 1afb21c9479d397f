"""Find the autograd nodes that a backward pass from a model's outputs reaches."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from perfexp.work.tensors import tensors_in

#: perfexp's own functions, whose work is counted with their operator.
_COUNTED = "perfexp."
_WRAPPER = "torch::autograd::CopySlices"


def reached(outputs: Any) -> tuple[set[int], list[str]]:
    """Numbers of the nodes behind a model's outputs, and names of those whose backward pass is a Python function."""
    waiting = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    seen: set[torch.autograd.graph.Node] = set()
    foreign: list[str] = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not type(node).__module__.startswith(_COUNTED):
            foreign.append(node.name())
        waiting += [following for following, _ in node.next_functions if following is not None]
    numbers = {node._sequence_nr() for node in seen}
    # The next node hides and wraps a node that changes a view in place.
    return numbers | {node._sequence_nr() - 1 for node in seen if node.name() == _WRAPPER}, foreign
