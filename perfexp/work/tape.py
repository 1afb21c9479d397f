"""Record which modules are called, which operations their code calls, and which operators run in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from perfexp.work.kernel_calls import Kernel, kernel_of
from perfexp.work.names import is_whole, original_of, path_of, plain
from perfexp.work.tensors import storage_of, tensors_in


@dataclass(kw_only=True)
class Operation:
    """A torch function that a module's code called.

    Attributes:
        dispatched: whether any operator ran, including one that makes a view.
    """

    name: str
    given: Any = ()
    returned: Any = None
    kernels: list[Kernel] = field(default_factory=list)
    dispatched: bool = False


@dataclass(kw_only=True)
class Call:
    """A call of a module.

    Attributes:
        whole: whether it is one row if no other module is called in it.
    """

    path: str
    number: int
    kind: str
    whole: bool
    given: Any = ()
    returned: Any = None
    steps: list[Call | Operation] = field(default_factory=list)


class Tape:
    """Records a call of a model.

    Args:
        weights: storages of the model's parameters and buffers.

    Attributes:
        root: call of the model itself, once it has been called.
    """

    def __init__(self, model: torch.nn.Module, weights: Collection[int]) -> None:
        self.root: Call | None = None
        self._model = model
        self._paths = {module: path_of(name) for name, module in model.named_modules()}
        self._weights = set(weights)
        self._calls: Counter[torch.nn.Module] = Counter()
        self._open: list[Call] = []
        self._operation: Operation | None = None
        # storages are unique by address only while they are alive
        self._alive: list[Any] = []

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call and record a module; the original of a compiled module is called in its place."""
        original = original_of(module)
        if original is not module:
            return original(*args, **keywords)
        call = Call(
            path=self._paths.get(module, type(module).__name__),
            number=self._calls[module],
            kind=type(module).__name__,
            whole=is_whole(module, module is self._model),
            given=(args, keywords),
        )
        self._calls[module] += 1
        if self._open:
            self._open[-1].steps.append(call)
        elif self.root is None:
            self.root = call
        outer, self._operation = self._operation, None
        self._open.append(call)
        try:
            call.returned = module._call_impl(*args, **keywords)  # type: ignore[no-untyped-call]
        finally:
            self._open.pop()
            self._operation = outer
        return call.returned

    @contextmanager
    def operating(self, name: str, given: Any) -> Iterator[Operation]:
        """While entered, operators belong to an operation."""
        operation = Operation(name=name, given=given)
        if self._open:
            self._open[-1].steps.append(operation)
        outer, self._operation = self._operation, operation
        try:
            yield operation
        finally:
            self._operation = outer

    def ran(
        self, operator: torch._ops.OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any], returned: Any
    ) -> None:
        """Record an operator that ran."""
        # autograd numbers a node before its operator runs
        node = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        kernel = kernel_of(operator, args, keywords, returned, self._weights, node)
        self._remember(args, keywords, returned)
        operation = self._operation
        if operation is None:
            operation = Operation(name=plain(operator._opname), given=(args, keywords), returned=returned)
            if self._open:
                self._open[-1].steps.append(operation)
        operation.dispatched = True
        if kernel is not None:
            operation.kernels.append(kernel)

    def _remember(self, *values: Any) -> None:
        """Hold references to storages, and add those that come from weights alone to the weights."""
        *given, made = values
        read = [tensor for tensor in tensors_in(given) if tensor.is_floating_point()]
        from_weights = bool(read) and all(storage_of(tensor) in self._weights for tensor in read)
        for tensor in tensors_in(values):
            self._alive.append(tensor.untyped_storage())
        if from_weights:
            self._weights.update(storage_of(tensor) for tensor in tensors_in(made))
