"""A user's own torch module as a model, returned by `_target_` in the configuration.

The worker passes what a `model` node built to `adapt`. The Python API passes objects of the user's
process to `live_model`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch

from perfexp.devices import Device
from perfexp.errors import UserError, did_you_mean
from perfexp.models import Execution, Model, Precision
from perfexp.models.kinds import ByOutput, own_classes
from perfexp.models.session import TorchSession


class ModuleModel:
    """A module, or a partial that makes one, as a model.

    Without `inputs` it gets images. Its outputs determine its kind. With a partial (`_partial_:
    true` in YAML), random weights follow the run's seed. The module may have:

    - `sample_shape(input_size)`: the shape of one sample for a height and width,
    - `loss(outputs, targets)`: the scalar to minimize,
    - `num_classes`: an integer attribute.

    Args:
        inputs: fixed inputs for every call: a tensor, a tuple of positional arguments or a
            dictionary of named arguments; None for inputs from the data.
    """

    def __init__(
        self,
        module: torch.nn.Module | functools.partial[torch.nn.Module],
        *,
        name: str,
        inputs: Any = None,
    ) -> None:
        self.name = name
        self._module, self._inputs = module, inputs

    def open(
        self,
        *,
        device: Device,
        precision: Precision,
        execution: Execution,
        num_classes: int | None,
        seed: int,
    ) -> TorchSession:
        """Return a session for the module, which is moved to the device and converted in place.

        Raises `UserError` if the partial makes no module, or the data has more classes than the
        module.
        """
        torch.manual_seed(seed)
        module = self._module() if isinstance(self._module, functools.partial) else self._module
        if not isinstance(module, torch.nn.Module):
            raise UserError(
                f"model={self.name} made a {type(module).__name__}; a torch.nn.Module is expected."
            )
        classes = own_classes(module)
        if classes is not None and num_classes is not None and num_classes > classes:
            raise UserError(f"The data has {num_classes} classes, {self.name} has {classes}.")
        return TorchSession(
            module,
            kind=ByOutput(module, self._inputs),
            name=self.name,
            device=device,
            precision=precision,
            execution=execution,
            facts={"weights": "as the module has them"},
        )


def adapt(built: object, name: str, inputs: Any = None) -> Model:
    """Return the object built from a `model` node as a model; raise `UserError` if impossible.

    Args:
        built: a model, a torch module, or a partial that makes either.
        name: name for the record and messages.
        inputs: fixed inputs for a module; see `ModuleModel`.
    """
    if isinstance(built, functools.partial):
        _check_arguments(built, name)
        if _is_model(built.func):
            built = built()
    # a module may have its own method `open`
    if isinstance(built, (torch.nn.Module, functools.partial)):
        return ModuleModel(built, name=name, inputs=inputs)
    if hasattr(built, "open") and inputs is None:
        return cast(Model, built)
    raise UserError(
        f"model={name} built a {type(built).__name__}. Its _target_ has to name a "
        "torch.nn.Module, a function that "
        "returns one, or a class with the method open of perfexp.models.Model."
    )


def _check_arguments(factory: functools.partial[Any], name: str) -> None:
    """Raise `UserError` if a class or function cannot be called with the model's keys."""
    try:
        signature = inspect.signature(factory.func)
    except (TypeError, ValueError):  # a function in C has no signature
        return
    try:
        signature.bind(*factory.args, **factory.keywords)
    except TypeError as error:
        unknown = [key for key in factory.keywords if key not in signature.parameters]
        if not unknown:
            raise UserError(f"model={name}: {error}; set it as model.KEY=VALUE.") from error
        raise UserError(
            f"model.{unknown[0]}: {name} has no argument '{unknown[0]}'. "
            f"{did_you_mean(unknown[0], signature.parameters)}".rstrip()
        ) from error


def _is_model(made_by: Any) -> bool:
    """Return whether a class makes models, not modules with a method `open`."""
    is_module = isinstance(made_by, type) and issubclass(made_by, torch.nn.Module)
    return hasattr(made_by, "open") and not is_module


class LiveModule:
    """Placeholder in a plan for an object in the measuring process.

    No other process can build it.
    """

    def __init__(self) -> None:
        raise UserError("This model was an object of a Python process: measure it there again.")


class _Called(torch.nn.Module):
    """A function of a batch as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._function(*inputs, **named)


def live_model(source: Callable[..., Any], name: str, inputs: Any = None) -> Model:
    """Return a torch module, a torch module class, or a function of a batch as a model.

    `perfexp.measure` accepts these objects of the user's process.

    Args:
        source: the object. A class is built with the run's seed.
        inputs: fixed inputs for every call; None for inputs from the data.
    """
    if isinstance(source, type):
        return adapt(functools.partial(source), name, inputs)
    is_module = isinstance(source, torch.nn.Module) or hasattr(source, "open")
    return adapt(source if is_module else _Called(source), name, inputs)
