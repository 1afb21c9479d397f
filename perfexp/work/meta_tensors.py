"""Stand-ins: tensors with a shape and no memory, in place of a model's own for the time of a call."""

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

#: Containers of a module whose content is restored.
_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def with_stand_ins(model: torch.nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """While entered, parameters and buffers are stand-ins; then every attribute of every module is what it was.

    A forward pass may leave tensors behind in attributes, or in lists and dictionaries of a module: these are restored
    too, one level deep.

    Args:
        model: its modules are changed in place.
        mode: whose tensors they are.
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
            if type(values) is list:  # such as the weights of a recurrent network, which it keeps a second time
                values[:] = [made.get(id(value), value) for value in values]
        yield
    finally:
        for module, attributes, contents in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                _refill(container, content)


def stand_in(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor like another one, without memory; the same one for the same tensor, and a parameter for a parameter.

    Args:
        tensor: real.
        mode: whose tensor it is.
    """
    if not tensor.is_inference():
        return mode.from_tensor(tensor, static_shapes=True)
    # Autograd refuses tensors of inference mode, and so their stand-ins.
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def inputs_for(model: torch.nn.Module, inputs: Any, mode: FakeTensorMode) -> Any:
    """Stand-ins for inputs, in the same nesting.

    Args:
        model: whose first floating-point parameter says data type and device where only a shape is given.
        inputs: real tensors, `torch.Size` for shapes, and anything else, which stays what it is.
        mode: whose tensors they are.
    """
    first = next((tensor for tensor in model.parameters() if tensor.is_floating_point()), torch.empty(0))

    def each(value: Any) -> Any:
        if isinstance(value, torch.Size):
            with mode:
                return torch.empty(value, dtype=first.dtype, device=first.device)
        return stand_in(value, mode) if isinstance(value, torch.Tensor) else value

    return tree_map(each, inputs, is_leaf=lambda value: isinstance(value, torch.Size))


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Python's, NumPy's and torch's random numbers on the host go on afterwards as if nothing had been drawn."""
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
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
