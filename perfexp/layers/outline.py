"""Record in one rehearsal which modules a model calls, and which operations their code calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from perfexp.work.names import is_whole, original_of, path_of
from perfexp.work.tape import recording


class Opaque(Exception):
    """Raised for a model whose modules cannot be distinguished while it runs; the text is the reason."""


@dataclass
class Operation:
    """A torch function that a module's code called, and its result during the call.

    Its number among the module's operations is None where no operator ran, as for the shape of a tensor.
    """

    name: str
    number: int | None = None
    returned: Any = None


@dataclass
class ModuleCall:
    """A call of a module.

    Attributes:
        whole: whether it is one row if no other module is called in it.
        functions: torch functions that its code called, in order.
        steps: modules, functions and operators outside of functions, in order.
    """

    path: str
    number: int
    whole: bool
    functions: list[Operation] = field(default_factory=list)
    steps: list[ModuleCall | Operation] = field(default_factory=list)

    @property
    def is_row(self) -> bool:
        """Whether it is one row."""
        return self.whole and not any(isinstance(step, ModuleCall) for step in self.steps)


Outline = dict[tuple[str, int], ModuleCall]


def outline_of(call: Callable[[], object], model: torch.nn.Module) -> Outline:
    """The module calls in one call of a model, by path and number, the model's own first.

    The call runs once, with the interception of functions and operators of `perfexp.work`, so that rows have the same
    numbers. Raises `Opaque` if the model is compiled or scripted, or its code does not run (a captured graph).
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise Opaque("the model is scripted: its modules are not called one by one")
    for module in model.modules():
        _refuse_compiled(module)
    recorder: Any = _Recorder(model)
    with recording(recorder):
        call()
    if not recorder.calls:
        raise Opaque("no module of the model is called: its code does not run (a captured graph?)")
    calls: Outline = recorder.calls
    for module_call in calls.values():
        numbered = [step for step in module_call.steps if isinstance(step, Operation) and step.number is not None]
        for number, step in enumerate(numbered):
            step.number = number
    return calls


def _refuse_compiled(module: torch.nn.Module) -> None:
    """Raise `Opaque` if a compiler runs a module in place of its code."""
    if original_of(module) is not module or getattr(module, "_compiled_call_impl", None) is not None:
        raise Opaque("the model is compiled: a kernel may belong to several layers")


class ModuleNames:
    """Paths and call numbers of the model's modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._paths = {module: path_of(name) for name, module in model.named_modules()}
        self._calls: Counter[tuple[torch.nn.Module, bool]] = Counter()
        self._depth = 0

    @contextmanager
    def entered(self, module: torch.nn.Module) -> Iterator[ModuleCall | None]:
        """Enter a call of a module; yields None for a call outside of the model, raises `Opaque` if it is compiled.

        A module that a backward pass calls is recomputed, and its calls are numbered separately.
        """
        _refuse_compiled(module)
        again = computes_again()
        if not (self._depth or again or module is self._model) or (again and module not in self._paths):
            yield None
            return
        number = self._calls[module, again]
        self._calls[module, again] += 1
        self._depth += 1
        try:
            path = self._paths.get(module, type(module).__name__)
            yield ModuleCall(path, number, is_whole(module, module is self._model))
        finally:
            self._depth -= 1

    def restart(self) -> None:
        """Begin the next call of the model."""
        self._calls.clear()


def computes_again() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


class _Recorder:
    """Receiver of `recording` that saves no tensors, in place of a `perfexp.work.tape.Tape`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: Outline = {}
        self._names = ModuleNames(model)
        self._open: list[ModuleCall] = []
        self._operation: Operation | None = None
        self._last = Operation("")

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        with self._names.entered(module) as call:
            if call is None or computes_again():
                return module._call_impl(*args, **keywords)  # type: ignore[no-untyped-call]
            self.calls[call.path, call.number] = call
            if self._open:
                self._open[-1].steps.append(call)
            outer, self._operation = self._operation, None
            self._open.append(call)
            try:
                return module._call_impl(*args, **keywords)  # type: ignore[no-untyped-call]
            finally:
                self._open.pop()
                self._operation = outer
                self._last.returned = None

    @contextmanager
    def operating(self, name: str, given: Any) -> Iterator[Operation]:
        operation = Operation(name)
        if self._open:
            self._open[-1].steps.append(operation)
            self._open[-1].functions.append(operation)
        outer, self._operation = self._operation, operation
        try:
            yield operation  # its return value is read once more after this
        finally:
            self._operation = outer
            self._last.returned, self._last = None, operation

    def ran(self, operator: Any, args: Any, keywords: Any, returned: Any) -> None:
        if self._operation is not None:
            self._operation.number = 0
        elif self._open:
            self._open[-1].steps.append(Operation(operator._opname, number=0))
