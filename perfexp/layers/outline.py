"""Record in one rehearsal which modules a model calls, and which operations their code calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfexp.work.tape import Call, Operation, Recorder, is_whole, original_of, path_of, recording


class Opaque(Exception):
    """Raised for a model whose modules cannot be distinguished while it runs; the text is the reason."""


Outline = dict[tuple[str, int], Call]


def outline_of(call: Callable[[], object], model: torch.nn.Module) -> Outline:
    """The module calls in one call of a model, by path and number, the model's own first.

    The call runs once, with the interception of functions and operators of `perfexp.work`, so that rows have the same
    numbers. Raises `Opaque` if the model is compiled or scripted, or its code does not run (a captured graph).
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise Opaque("the model is scripted: its modules are not called one by one")
    for module in model.modules():
        _refuse_compiled(module)
    recorder = _Outliner(model)
    with recording(recorder):
        call()
    if not recorder.calls:
        raise Opaque("no module of the model is called: its code does not run (a captured graph?)")
    for module_call in recorder.calls.values():
        dispatched = (step for step in module_call.steps if isinstance(step, Operation) and step.dispatched)
        for number, operation in enumerate(dispatched):
            operation.number = number
    return recorder.calls


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
    def entered(self, module: torch.nn.Module) -> Iterator[Call | None]:
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
            kind, whole = type(module).__name__, is_whole(module, module is self._model)
            yield Call(path=self._paths.get(module, kind), number=number, kind=kind, whole=whole)
        finally:
            self._depth -= 1

    def restart(self) -> None:
        """Begin the next call of the model."""
        self._calls.clear()


def computes_again() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


class _Outliner(Recorder):
    """Recorder of a model's module calls that saves no tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.calls: Outline = {}
        self._names = ModuleNames(model)

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        with self._names.entered(module) as call:
            if call is None or computes_again():
                return module._call_impl(*args, **keywords)  # type: ignore[no-untyped-call]
            self.calls[call.path, call.number] = call
            return self._step_into(call, module, args, keywords)
