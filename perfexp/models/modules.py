"""Handle a user's module as its author wrote it: its mode, its place, its inputs and its outputs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from perfexp.work.trial import is_stand_in


def train(module: torch.nn.Module, training: bool) -> None:
    """Set the mode of a module by the `train` of its class.

    A class may override it, to keep layers frozen, without returning the module. It may also use the name otherwise,
    for a training loop or an attribute; then the flags of its parts are set.
    """
    method: Any = getattr(module, "train", None)
    if getattr(method, "__func__", None) is not torch.nn.Module.train and _is_switch(method):
        method(training)
        return
    module.training = training
    for child in module.children():
        train(child, training)


def evaluate(module: torch.nn.Module) -> None:
    """Set evaluation mode, by the `eval` of the module's class if that takes no arguments."""
    own = getattr(module, "eval", None)
    is_default = getattr(own, "__func__", None) is torch.nn.Module.eval
    if not is_default and callable(own) and _parameters(own) == []:
        own()
    else:
        train(module, False)


def _is_switch(method: Any) -> bool:
    """Return whether a method can be called as `train(mode)`."""
    if not callable(method) or not (parameters := _parameters(method)):
        return False
    first, *others = parameters
    is_mode = first.name in ("mode", "args") or isinstance(first.default, bool)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return is_mode and all(one.default is not one.empty or one.kind in variable for one in others)


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # of a function that is not Python's
        return None


def place(module: torch.nn.Module, device: Any, dtype: torch.dtype) -> None:
    """Move a module to a device and convert it to a data type in place.

    Only tensors of the type that most parameters have are converted: complex numbers, and a part that its author keeps
    in another precision, stay as they are.
    """
    sizes = Counter[torch.dtype]()
    for tensor in module.parameters():
        if tensor.is_floating_point() and not torch.nn.parameter.is_lazy(tensor):
            sizes[tensor.dtype] += tensor.numel()
    common = sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.dtype == common else None)

    module._apply(placed)  # type: ignore[no-untyped-call]


def missing_inputs(module: torch.nn.Module, inputs: Any) -> str | None:
    """Return why a module's call does not accept one positional argument; None if it does, or nothing is known."""
    try:
        inspect.signature(module.forward).bind(inputs)
    except TypeError as error:
        return f"forward: {error}"
    except ValueError:  # a function of C has no signature
        return None
    return None


def restoring(inputs: Any) -> Callable[[], bool]:
    """Return a function that restores inputs as they are now and returns whether they had changed."""
    if not isinstance(inputs, torch.Tensor) or is_stand_in(inputs):
        return lambda: False
    before = inputs.detach().to("cpu", copy=True)

    def restore() -> bool:
        if torch.equal(inputs.detach().cpu().nan_to_num(), before.nan_to_num()):
            return False
        with torch.no_grad():
            inputs.copy_(before)
        return True

    return restore


def version_of(inputs: Any) -> int | None:
    """Return how often a tensor has been changed in place; None where torch does not count it."""
    if not isinstance(inputs, torch.Tensor) or inputs.is_inference():
        return None
    return inputs._version


def unfinished(outputs: Any) -> str | None:
    """Return the type of an output that computes only when it is used (a generator, a function, …), if there is one."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, (Iterator, Awaitable, Future, torch.futures.Future)) or callable(leaf):
            return type(leaf).__name__
    return None
