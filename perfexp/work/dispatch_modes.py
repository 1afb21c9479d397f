"""Intercept torch's functions and operators while a model is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from perfexp.work.names import name_of
from perfexp.work.tape import Tape


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """While entered, calls of modules, torch functions and operators are recorded.

    Modules are seen by their `__call__`, so that their hooks are within the call, without global hooks (which make
    compiled modules warn) or hooks on the modules.
    """

    def call(module: torch.nn.Module, *args: Any, **keywords: Any) -> Any:
        return tape.call(module, args, keywords)

    with patch.object(torch.nn.Module, "__call__", call), _Functions(tape), _Operators(tape):
        yield


class _Functions(TorchFunctionMode):
    """Intercepts torch functions, outermost ones only."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        with self._tape.operating(name_of(func), (args, keywords)) as operation:
            operation.returned = func(*args, **keywords)
        return operation.returned


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts operators. Composite operators, which inference mode leaves whole, are decomposed."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **keywords)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                parts = func.decompose(*args, **keywords)
            if parts is not NotImplemented:
                return parts
        returned = func(*args, **keywords)
        self._tape.ran(func, args, keywords, returned)
        return returned
