"""Marking: mark a model's module and operation calls by profiler ranges or clock readings.

A rehearsal (`outline_of`) first records the modules that a model calls, and the operations in their
code. During the measured calls, `marking` then intercepts the same modules and torch functions and
opens a range with their name around each. What opens the ranges is a `CallObserver`: profiler
ranges here, clock readings (`profiling.Stamps`), or another profiler's marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from perfexp.cost.tape import (
    Call,
    ModuleNames,
    Operation,
    Recorder,
    name_of,
    original_of,
    path_of,
    recording,
)
from perfexp.measuring.layers.events import RangeMark, Scope

#: A profiler range, used as a context, with little cost on the host and none on the device.
_Range: Any = torch._C._profiler._RecordFunctionFast


def ranged(scope: Scope, number: int = 0, kind: str = "") -> Any:
    """Return a process-wide profiler range: a `call` with its index, or a `phase` with its name."""
    return _Range(RangeMark(scope, number, kind=kind).name)


class Opaque(Exception):
    """Raised if a running model's modules cannot be distinguished; the text is the reason."""


#: Module calls in a model call, by path and number of the call.
Outline = dict[tuple[str, int], Call]


def outline_of(call: Callable[[], object], model: torch.nn.Module) -> Outline:
    """Return the module calls in a model call, by path and number, the model's own first.

    The call runs once. It is observed as in `perfexp.cost`: times and FLOPs of a module call get
    the same path and number, and so share a row in the layer table.

    Raises:
        Opaque: the model is compiled or scripted, or its code does not run (e.g. a captured graph).
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
        dispatched = (
            step for step in module_call.steps if isinstance(step, Operation) and step.dispatched
        )
        for number, operation in enumerate(dispatched):
            operation.number = number
    return recorder.calls


def _refuse_compiled(module: torch.nn.Module) -> None:
    """Raise `Opaque` if a compiler runs a module instead of its code."""
    if (
        original_of(module) is not module
        or getattr(module, "_compiled_call_impl", None) is not None
    ):
        raise Opaque("the model is compiled: a kernel may belong to several layers")


class _CallNumbering(ModuleNames):
    """Paths and numbers of module calls, as long as they are inside a call of the model."""

    #: Number of module calls that are open.
    _depth = 0

    @contextmanager
    def entered(self, module: torch.nn.Module) -> Iterator[Call | None]:
        """Enter a module call; yield None for a call outside the model.

        A module called by a backward pass is recomputed, and its calls are numbered separately.

        Raises:
            Opaque: the module is compiled.
        """
        _refuse_compiled(module)
        is_recomputed = is_in_backward()
        is_inside = self._depth > 0 or is_recomputed or module is self.model
        if not is_inside or (is_recomputed and module not in self.paths):
            yield None
            return
        self._depth += 1
        try:
            yield self.next_call(module, is_recomputed)
        finally:
            self._depth -= 1


def is_in_backward() -> bool:
    """Return whether a backward pass is running in this thread; modules are recomputed in it."""
    return torch._C._current_graph_task_id() != -1


class _Outliner(Recorder):
    """Recorder for a model's module calls that saves no tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.calls: Outline = {}
        self._names = _CallNumbering(model)

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a module, and record the call with the operations in its code."""
        with self._names.entered(module) as call:
            if call is None or is_in_backward():
                return module._call_impl(*args, **keywords)
            self.calls[call.path, call.number] = call
            return self._step_into(call, module, args, keywords)


class CallObserver(Protocol):
    """Opens something around each call of a marked model; the default ignores the marker's work."""

    def begin_overhead(self) -> None:
        """Note that the marker's own work begins."""
        return

    def end_overhead(self) -> None:
        """Note that the marker's own work has ended."""
        return

    def around(self, mark: RangeMark | None) -> AbstractContextManager[Any]:
        """Return a context for a call with its time credited to the mark.

        The marker enters and leaves it between `begin_overhead` and `end_overhead`: inside, no
        overhead runs. Without a mark the time belongs to the enclosing row.
        """


class Ranges(CallObserver):
    """Opens ranges of torch's profiler, which separates the marker's own work itself."""

    def around(self, mark: RangeMark | None) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nullcontext() if mark is None else _Range(mark.name)
        return context


class Marker(TorchFunctionMode):
    """Marks a model's calls, and intercepts the torch functions that a module's code calls.

    Attributes:
        strayed: how the model's calls deviated from the outline, so that rows cannot be
            distinguished; None if they did not.
        restart: to be called before each call of the model: module calls count from 0 again.

    Args:
        outline: module calls from the rehearsal.
        watch: opens something around each call.
    """

    def __init__(self, model: torch.nn.Module, outline: Outline, watch: CallObserver) -> None:
        super().__init__()
        self.strayed: str | None = None
        self._watch = watch
        self._outline = outline
        self._names = _CallNumbering(model)
        self.restart = self._names.restart
        #: The module calls that are open, each with the functions that its code has yet to call.
        self._open: list[tuple[Call, Iterator[Any]]] = []

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a module inside its mark; `marking` puts this in place of `Module.__call__`.

        Raises:
            Opaque: the module is compiled.
        """
        self._watch.begin_overhead()
        try:
            with self._names.entered(module) as call:
                run = partial(module._call_impl, *args, **keywords)
                if call is not None:
                    return self._run_marked(call, module, run)
                with self._watch.around(None):
                    return run()
        finally:
            self._watch.end_overhead()

    def _run_marked(self, call: Call, module: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """Run a module call inside its mark; intercept its functions if they are rows.

        Args:
            call: path and number of the call.
            run: makes the call.
        """
        planned = self._outline.get((call.path, call.number))
        is_recomputed = is_in_backward()
        # recomputation in a backward pass is not in the outline
        if planned is None and not is_recomputed:
            self.strayed = (
                self.strayed or f"{call.path or 'the model'} is called more often than before"
            )
        # the module's operations are rows, unless the module as a whole is a row
        has_operations = planned is not None and not planned.is_row and not is_recomputed
        mark = RangeMark(Scope.module, call.number, call.whole, call.kind, call.path)
        self._open.append((call, iter(planned.functions if planned and has_operations else ())))
        # interception slows down some of torch's own modules
        is_of_torch = type(module).__module__.startswith("torch.nn")
        listening = self._listening(has_operations and not is_of_torch)
        try:
            with listening, self._watch.around(mark):
                return run()
        finally:
            self._open.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, inside a mark if the outline has a number for it.

        torch calls this for each of its functions while this mode is entered.
        """
        name = name_of(func)
        self._watch.begin_overhead()
        try:
            mark = None if is_in_backward() else self._next_operation(name)
            with self._watch.around(mark):
                return func(*args, **(kwargs or {}))
        finally:
            self._watch.end_overhead()

    def _next_operation(self, name: str) -> RangeMark | None:
        """Return the mark for the next function in the outline; None if it is not a row.

        Another function than in the outline sets `strayed`.
        """
        if not self._open:
            return None
        call, functions = self._open[-1]
        planned = next(functions, None)
        if planned is None or planned.name != name:
            self.strayed = (
                self.strayed
                or f"{call.path or 'the model'} calls other operations than before ({name})"
            )
            return None
        if planned.number is None:
            return None
        return RangeMark(Scope.operation, planned.number, kind=name)

    @contextmanager
    def _listening(self, should_listen: bool) -> Iterator[None]:
        """Intercept torch functions while entered, or stop it if not `should_listen`."""
        is_listening = _get_current_function_mode() is self
        with ExitStack() as stack:
            if should_listen and not is_listening:
                stack.enter_context(self)
            elif is_listening and not should_listen:
                stack.enter_context(_pop_mode_temporarily())
            yield


@contextmanager
def marking(model: torch.nn.Module, outline: Outline, watch: CallObserver) -> Iterator[Marker]:
    """Report an uncompiled model's module and operation calls to an observer while entered.

    Yield the marker: call its `restart` before each call of the model, and check `strayed` after.

    Modules are intercepted at `__call__`, as in `perfexp.cost`, so their own hooks are part of the
    call. When a parameter's gradient is accumulated, a profiler range names the parameter.
    """
    marker = Marker(model, outline, watch)

    def call(module: torch.nn.Module, *args: Any, **keywords: Any) -> Any:
        return marker.call(module, args, keywords)

    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf and not parameter.is_inference():
                mark = RangeMark(Scope.parameter, path=path_of(name.rpartition(".")[0]))
                hook = partial(_leave_range, mark.name)
                handle = parameter.register_post_accumulate_grad_hook(hook)
                stack.callback(handle.remove)
        stack.enter_context(patch.object(torch.nn.Module, "__call__", call))
        yield marker


def _leave_range(name: str, _: torch.Tensor) -> None:
    """Leave an empty range in the profile; the hook after a parameter's gradient."""
    with _Range(name):
        pass
