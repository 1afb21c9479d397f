"""Replace a model's tensors by tensors without memory for the time of a call."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

#: Types of a module's containers whose content is restored.
_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def with_stand_ins(model: torch.nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """While entered, parameters and buffers are stand-ins; afterwards every attribute of every module is restored.

    Tensors that a forward pass leaves in attributes, lists and dictionaries of a module are removed as well, one level
    deep.
    """
    before = [(module, dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        made: dict[int, torch.Tensor] = {}
        for module, _, _ in before:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = stand_in(tensor, mode)
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]
        for values in (value for module, _, _ in before for value in module.__dict__.values()):
            if type(values) is list:  # such as a recurrent network's second references to its weights
                values[:] = [made.get(id(value), value) for value in values]
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                _refill(container, content)


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor like another one, without memory; the same one for the same tensor, and a parameter for a parameter."""
    if not tensor.is_inference():
        return mode.from_tensor(tensor, static_shapes=True)
    # autograd refuses tensors of inference mode, and so their stand-ins
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def inputs_for(model: torch.nn.Module, inputs: Any, mode: FakeTensorMode) -> Any:
    """Stand-ins for inputs, in the same nesting; other values than tensors are unchanged.

    Where only a shape is given (`torch.Size`), the model's first floating-point parameter sets data type and device.
    """
    first = next((tensor for tensor in model.parameters() if tensor.is_floating_point()), torch.empty(0))

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Size):
            with mode:
                return torch.empty(value, dtype=first.dtype, device=first.device)
        return stand_in(value, mode) if isinstance(value, torch.Tensor) else value

    return tree_map(replaced, inputs, is_leaf=lambda value: isinstance(value, torch.Size))


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the state of Python's, NumPy's and torch's random numbers on the host afterwards."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def _contents(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    return [(value, value.copy()) for value in module.__dict__.values() if type(value) in _CONTAINERS]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    add = container.extend if isinstance(container, list) else container.update
    add(content)
