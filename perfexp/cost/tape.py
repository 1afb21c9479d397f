"""Record a model call: its module calls, the operations in their code, and the operators they run.

Three levels are intercepted: modules (`Call`), torch functions that a module's code calls, such as
`x + y` (`Operation`), and operators of torch's dispatcher, such as `aten::add` (kernels).
`cost.count` records with a `Tape`. `measuring.layers` records only the names, with its own
`Recorder`, to match times with layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from perfexp.cost import ACCUMULATE, Inconclusive
from perfexp.cost.kernel_calls import KernelWork, kernel_of, of_complex_convolution
from perfexp.cost.tensors import is_number, storage_of, tensors_in

#: Python names of operators that also have right-hand and in-place forms.
_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
)


@dataclass(kw_only=True)
class Operation:
    """A torch function that a module's code called, or an operator outside functions.

    Attributes:
        name: plain name, for example `add`.
        given: positional and keyword arguments.
        returned: result.
        kernels: operators with work that ran in it.
        dispatched: whether any operator ran, including operators that make views.
        number: index among the operations in its call; None until it is numbered.
    """

    name: str
    given: Any = ()
    returned: Any = None
    kernels: list[KernelWork] = field(default_factory=list)
    dispatched: bool = False
    number: int | None = None


@dataclass(kw_only=True)
class Call:
    """A module call.

    Attributes:
        path: dotted path of the module in the model.
        number: index among the calls of this module.
        kind: module class.
        whole: whether it is a single row if it calls no other module.
        given: positional and keyword arguments.
        returned: result.
        functions: torch functions that its code called, in order.
        steps: modules, functions and operators outside functions, in order.
    """

    path: str
    number: int
    kind: str
    whole: bool
    given: Any = ()
    returned: Any = None
    functions: list[Operation] = field(default_factory=list)
    steps: list[Call | Operation] = field(default_factory=list)

    @property
    def is_row(self) -> bool:
        """Return whether the call is a single row of the layer table."""
        return self.whole and not any(isinstance(step, Call) for step in self.steps)


class ModuleNames:
    """Paths of a model's modules, and the number of calls of each so far."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.paths = {module: path_of(name) for name, module in model.named_modules()}
        self._calls: Counter[tuple[torch.nn.Module, bool]] = Counter()

    def next_call(self, module: torch.nn.Module, is_recomputed: bool = False) -> Call:
        """Return a `Call` for a module that is about to be called.

        Without inner module calls, it is a single row for torch's own layers and modules without
        submodules.

        Args:
            is_recomputed: whether the call belongs to a recomputation (activation checkpointing);
                those calls are numbered separately.
        """
        number, kind = self._calls[module, is_recomputed], type(module).__name__
        self._calls[module, is_recomputed] += 1
        is_leaf_call = type(module).__module__.startswith("torch.nn") or not (
            module is self.model or module._modules
        )
        return Call(path=self.paths.get(module, kind), number=number, kind=kind, whole=is_leaf_call)

    def restart(self) -> None:
        """Begin the next model call: numbers start at 0 again."""
        self._calls.clear()


class Recorder:
    """Receives what `recording` intercepts, and builds calls with their steps.

    With `saves_values`, operations hold their arguments and results.
    """

    saves_values = False

    def __init__(self) -> None:
        self._open: list[Call] = []
        self._operation: Operation | None = None

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a module and return its result; subclasses decide whether it is recorded.

        A recorded call goes through `_step_into`, which makes it a step of the open call.
        """
        raise NotImplementedError

    def _step_into(
        self, call: Call, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Run a module as a step of the open call; return its result."""
        if self._open:
            self._open[-1].steps.append(call)
        outer, self._operation = self._operation, None
        self._open.append(call)
        try:
            return module._call_impl(*args, **keywords)
        finally:
            self._open.pop()
            self._operation = outer

    @contextmanager
    def within_function(self, name: str) -> Iterator[Operation]:
        """Open an operation for a torch function; operators that run while entered belong to it.

        The mode for torch functions enters it around each call.
        """
        operation = Operation(name=name)
        if self._open:
            self._open[-1].steps.append(operation)
            self._open[-1].functions.append(operation)
        outer, self._operation = self._operation, operation
        try:
            yield operation
        finally:
            self._operation = outer

    def record_operator(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        returned: Any,
    ) -> Operation:
        """Record an operator that ran; return the operation that it belongs to.

        Outside of torch functions, the operator is an operation itself.
        """
        operation = self._operation
        if operation is None:
            operation = Operation(name=plain(operator._opname))
            if self.saves_values:
                operation.given, operation.returned = (args, keywords), returned
            if self._open:
                self._open[-1].steps.append(operation)
        operation.dispatched = True
        return operation


class Tape(Recorder):
    """Records a model call with the work of each operator; `root` is the model's own call.

    Args:
        weights: storages of parameters and buffers.
    """

    saves_values = True

    def __init__(self, model: torch.nn.Module, weights: Collection[int]) -> None:
        super().__init__()
        self.root: Call | None = None
        self._names = ModuleNames(model)
        self._weights = set(weights)
        # storages are unique by address only while they are alive
        self._alive: list[Any] = []

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call a module (see `Recorder`); a compiled module is replaced by its original."""
        original = original_of(module)
        if original is not module:
            return original(*args, **keywords)
        call = self._names.next_call(module)
        call.given = (args, keywords)
        self.root = self.root or call
        call.returned = self._step_into(call, module, args, keywords)
        return call.returned

    def record_operator(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        returned: Any,
    ) -> Operation:
        """Record an operator with its work; see `Recorder`.

        The mode for operators calls it after each call.
        """
        # autograd numbers a node before its operator runs
        node = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        kernel = kernel_of(operator, args, keywords, returned, self._weights, node)
        self._remember(args, keywords, returned)
        operation = super().record_operator(operator, args, keywords, returned)
        if kernel is not None:
            operation.kernels.append(kernel)
        return operation

    def _remember(self, *values: Any) -> None:
        """Hold references to all storages, and learn which values are computed from weights alone.

        A result belongs to the weights if all numbers that the operator reads do.
        """
        *given, made = values
        read = [tensor for tensor in tensors_in(given) if is_number(tensor)]
        from_weights = bool(read) and all(storage_of(tensor) in self._weights for tensor in read)
        for tensor in tensors_in(values):
            self._alive.append(tensor.untyped_storage())
        if from_weights:
            self._weights.update(storage_of(tensor) for tensor in tensors_in(made))


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Send module calls, torch functions and operators to a recorder while entered.

    Modules are intercepted at `__call__`, so their hooks are part of the call. This needs no global
    hooks, which make compiled modules warn, and no hooks on the modules.
    """

    def call(module: torch.nn.Module, *args: Any, **keywords: Any) -> Any:
        return recorder.call(module, args, keywords)

    with (
        patch.object(torch.nn.Module, "__call__", call),
        _Functions(recorder),
        _Operators(recorder),
    ):
        yield


class _Functions(TorchFunctionMode):
    """Intercepts torch functions; functions that they call are not intercepted."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch function as an operation of the recorder."""
        keywords = kwargs or {}
        with self._recorder.within_function(name_of(func)) as operation:
            returned = func(*args, **keywords)
        is_complex = any(tensor.is_complex() for tensor in tensors_in(args))
        if is_complex and operation.name.startswith("conv"):
            operation.kernels = of_complex_convolution(operation.kernels)
        if self._recorder.saves_values:
            operation.given, operation.returned = (args, keywords), returned
        return returned


class _Operators(TorchDispatchMode):
    """Intercepts operators of the dispatcher.

    Composite operators, which inference mode leaves whole, are decomposed first.
    """

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, or its parts, and record it."""
        keywords = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            if self._recorder.saves_values:
                raise Inconclusive(
                    f"{func._name} calls a function of the model, on which its work depends"
                )
            return func(*args, **keywords)
        if func.namespace == "prim":
            return func(*args, **keywords)
        name = func.name()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            with self:
                parts = func.decompose(*args, **keywords)
            if parts is not NotImplemented:
                return parts
        returned = func(*args, **keywords)
        self._recorder.record_operator(func, args, keywords, returned)
        return returned


def original_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself.

    Work is counted on the original; layers of a compiled module cannot be timed.
    """
    original = None
    if type(module).__name__ == "OptimizedModule":
        original = module._modules.get("_orig_mod")
    if original is None:
        return module
    return original


def plain(name: str) -> str:
    """Return an operation's common name: `add` for `__iadd__`, `__radd__`, `add_` and `add`."""
    bare = name.strip("_")
    if name.startswith("__") and bare[:1] in ("i", "r") and bare[1:] in _ARITHMETIC:
        bare = bare[1:]
    return bare


def name_of(function: Any) -> str:
    """Return the common name of a torch function, such as `conv2d`, or of the property it accesses.

    Operations are named by it. The layer marker names its marks by it as well.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if name in ("__get__", "__set__"):  # a property, such as Tensor.T
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return plain(name)


def path_of(name: str) -> str:
    """Return a module's path from its name in `named_modules`, without compiled wrappers.

    Layer tables and profiles use it as the layer's name.
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def nodes_behind(outputs: Any) -> list[torch.autograd.graph.Node]:
    """Return all autograd nodes behind nested tensors: the backward pass of a loss on them.

    Nodes that accumulate parameter gradients are left out. `measuring.layers.profiling` times the
    backward pass by them, too.
    """
    pending = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    seen: dict[torch.autograd.graph.Node, None] = {}
    while pending:
        node = pending.pop()
        if node not in seen and not node.name().endswith(ACCUMULATE):
            seen[node] = None
            pending += [following for following, _ in node.next_functions if following is not None]
    return list(seen)
