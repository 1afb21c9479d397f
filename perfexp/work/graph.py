"""Graph: what a backward pass from the outputs of a model gets to."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from perfexp.work.tensors import tensors_in

#: Functions of perfexp's own, whose work is counted with the operator that they stand for.
_COUNTED = "perfexp."
_WRAPPER = "torch::autograd::CopySlices"


def reached(outputs: Any) -> tuple[set[int], list[str]]:
    """Numbers of the nodes behind the outputs, and the names of those whose backward pass is a Python function.

    Args:
        outputs: of a model, nested as they like; all floating-point ones are taken for part of a loss.
    """
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
    # What changes a view in place is wrapped, by the node that autograd makes next, which does not show it.
    return numbers | {node._sequence_nr() - 1 for node in seen if node.name() == _WRAPPER}, foreign
