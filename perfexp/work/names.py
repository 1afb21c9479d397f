"""Names of modules and operations, and which modules are a row of their own."""

from __future__ import annotations

from typing import Any

import torch

#: Python's names of operators that work from the right or in place.
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")


def original_of(module: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    original = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
    return module if original is None else original


def plain(name: str) -> str:
    """Common name of an operation: `add` for `__iadd__`, `__radd__`, `add_` and `add`."""
    bare = name.strip("_")
    if name.startswith("__") and bare[:1] in ("i", "r") and bare[1:] in _ARITHMETIC:
        bare = bare[1:]
    return bare


def name_of(function: Any) -> str:
    """Name of a torch function, or of the property that it reads or writes."""
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):  # of a property, such as Tensor.T
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return plain(name)


def is_whole(module: torch.nn.Module, is_model: bool) -> bool:
    """Whether a call without inner module calls is one row: torch's own layers, and modules without submodules."""
    if type(module).__module__.startswith("torch.nn"):
        return True
    return not is_model and not module._modules


def path_of(name: str) -> str:
    """Path of a module from its name in `named_modules`, without the wrappers of compiled modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
