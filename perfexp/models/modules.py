"""Functions for a user's module as its author wrote it: mode, device, inputs and outputs.

A class may redefine `train`, `to` or `parameters`. These functions call torch's own versions where
an author's version would miss something. `TorchSession` uses them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from perfexp.cost.trial import is_stand_in


def train(module: torch.nn.Module, training: bool) -> None:
    """Set a module's mode with its class's `train`, or by flags where that is not a switch.

    A class may override `train` without returning the module, for example to keep layers frozen. A
    class may also use the name differently, for a training loop or an attribute. In that case the
    flags of the module and its submodules are set.
    """
    method: Any = getattr(module, "train", None)
    if getattr(method, "__func__", None) is not torch.nn.Module.train and _is_switch(method):
        with suppress(NotImplementedError):  # an exported program refuses
            method(training)
        return
    module.training = training
    for child in module.children():
        train(child, training)


def evaluate(module: torch.nn.Module) -> None:
    """Set evaluation mode, with the class's own `eval` if it takes no arguments.

    Another `eval`, for example one that takes a data set, is not called.
    """
    eval_method = getattr(module, "eval", None)
    is_default = getattr(eval_method, "__func__", None) is torch.nn.Module.eval
    if not is_default and callable(eval_method) and _parameters(eval_method) == []:
        with suppress(NotImplementedError):  # an exported program refuses
            eval_method()
    else:
        train(module, False)


def _is_switch(method: Any) -> bool:
    """Return whether a method can be called as `train(mode)` and sets a mode.

    A training loop such as `train(epochs)` is not a switch. Only names, defaults and the names in
    the method's code tell them apart.
    """
    if not callable(method) or not (parameters := _parameters(method)):
        return False
    first, *others = parameters
    code = getattr(getattr(method, "__func__", None), "__code__", None)
    sets_mode = code is None or "training" in code.co_names or "train" in code.co_names
    is_mode = first.name in ("mode", "args") or (isinstance(first.default, bool) and sets_mode)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return is_mode and all(
        parameter.default is not parameter.empty or parameter.kind in variable
        for parameter in others
    )


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return a callable's parameters; None if it has no signature.

    `_is_switch` and `evaluate` decide by them.
    """
    try:
        return list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # functions in C may have no signature
        return None


def place(module: torch.nn.Module, device: Any, dtype: torch.dtype) -> None:
    """Move a module to a device and convert it to a data type in place.

    An overridden `to` is called as well. Only tensors in the most common parameter type are
    converted. Complex tensors and submodules in another precision keep their type; tensors on the
    meta device are left alone.
    """
    elements = Counter[torch.dtype]()
    for tensor in parameters_of(module):
        if tensor.is_floating_point() and not torch.nn.parameter.is_lazy(tensor):
            elements[tensor.dtype] += tensor.numel()
    common = elements.most_common(1)[0][0] if elements else torch.get_default_dtype()

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        return tensor.to(device, dtype if tensor.dtype == common else None)

    module._apply(placed)
    if type(module).to is not torch.nn.Module.to:
        module.to(device)
        if dtype != common:
            module.to(dtype)


def parameters_of(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Return all parameters, even if the class redefines `parameters`."""
    return torch.nn.Module.parameters(module)


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, even if the class redefines `state_dict`.

    Lazy tensors and meta tensors have no values and are left out. A session saves them before
    training, and `restore` copies them back.
    """
    named = (*torch.nn.Module.named_parameters(module), *torch.nn.Module.named_buffers(module))
    return {
        name: tensor.detach()
        for name, tensor in named
        if not torch.nn.parameter.is_lazy(tensor) and not tensor.is_meta
    }


@torch.no_grad()
def restore(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors from `tensors_of` back into a module.

    Tensors that the module has made or reshaped since then stay as they are.
    """
    for name, tensor in tensors_of(module).items():
        if name in state and state[name].shape == tensor.shape:
            with torch.inference_mode(tensor.is_inference()):
                tensor.copy_(state[name])


def has_extra_state(module: torch.nn.Module) -> bool:
    """Return whether a module's class keeps more than tensors in its state dict.

    Such a class defines `get_extra_state`.
    """
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def called(module: Callable[..., Any], inputs: Any) -> Any:
    """Call a module and return its outputs.

    Args:
        inputs: one positional argument, a tuple of them, or a dictionary of named arguments.
    """
    if isinstance(inputs, tuple):
        return module(*inputs)
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def missing_inputs(module: torch.nn.Module, inputs: Any) -> str | None:
    """Return why `forward` cannot be called with these inputs, such as a missing argument.

    None if it can be called, or if its signature is unknown.
    """
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a function in C has no signature
        return None
    try:
        called(signature.bind, inputs)
    except TypeError as error:
        return f"forward: {error}"
    return None


def restoring(inputs: Any) -> Callable[[], bool]:
    """Return a function that restores the current inputs and returns whether they had changed.

    A session calls it around the first call, to find models that write into their inputs. It copies
    the tensors to the host.
    """
    restores = [
        _restoring(leaf)
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and not is_stand_in(leaf)
    ]
    return lambda: any([restore() for restore in restores])  # noqa: C419 - restore all


def _restoring(inputs: torch.Tensor) -> Callable[[], bool]:
    """Return the function that `restoring` describes, for one tensor.

    A counted change counts even if the values are the same again.
    """
    before = inputs.detach().to("cpu", copy=True)
    version, strides = version_of(inputs), inputs.stride()

    def restore() -> bool:
        """Restore the tensor's shape and values; return whether it had changed."""
        is_same_shape = (inputs.shape, inputs.stride()) == (before.shape, strides)
        if is_same_shape and torch.equal(inputs.detach().cpu().nan_to_num(), before.nan_to_num()):
            return version_of(inputs) != version
        with torch.no_grad():
            if is_same_shape:
                inputs.copy_(before)
            else:  # the call reshaped the tensor in place
                inputs.data = before.to(inputs.device)
        return True

    return restore


def version_of(inputs: Any) -> list[int | None]:
    """Return how often each tensor in `inputs` was changed in place, in order.

    An entry is None if torch does not count, as for inference tensors.
    """
    tensors = (tensor for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor))
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def unfinished(outputs: Any) -> str | None:
    """Return the type name of an output that computes only when it is used, such as a generator.

    None if all outputs are finished. Fields of dataclasses are checked, too.
    """
    for leaf in tree_leaves(outputs):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaf = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
            if name := next(filter(None, map(_unfinished_kind, leaf)), None):
                return name
        elif name := _unfinished_kind(leaf):
            return name
    return None


def _unfinished_kind(leaf: Any) -> str | None:
    """Return the type name of an iterator, awaitable, future or callable; None for other values."""
    computes_later = (Iterator, Awaitable, Future, torch.futures.Future)
    if isinstance(leaf, computes_later) or callable(leaf):
        return type(leaf).__name__
    return None
