"""Attribution: assign a kernel to its row, pass and call.

A row is a module's call or an operation in it (`Key`). A kernel belongs to the row that was running
on the host when the kernel was launched. Backward kernels are launched by autograd's engine,
outside any module; they belong to the row of the forward operator that made the autograd node.
"Around"
means: among the ranges and operators that were open at that moment, from the inside outwards.
"""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import msgspec

from perfexp.cost import ACCUMULATE
from perfexp.measuring.layers import Key, Pass
from perfexp.measuring.layers.events import EVALUATE, Host, ProfilerEvent, Scope

_BACKWARD = "backward"
#: Operators that the engine uses to sum gradients that meet. Its other operators (e.g. sums over
#: broadcast dimensions) belong to the node.
_SUMS = ("aten::add", "aten::add_")
#: Pass of a kernel outside all modules, by the phase of its launch.
_PASSES = {
    "data": Pass.data,
    "forward": Pass.forward,
    "loss": Pass.loss,
    _BACKWARD: Pass.backward,
    "optimizer": Pass.optimizer_step,
}


class Attributed(NamedTuple):
    """A kernel with its call index and row key; each is None if unknown."""

    kernel: ProfilerEvent
    call: int | None
    key: Key | None


def attribute(host: Host, kernel: ProfilerEvent) -> Attributed:
    """Find a kernel's call and row; kernels launched outside any call have neither."""
    moment = host.launched_ns(kernel)
    call = None if moment is None else host.call_at(moment)
    if moment is None or call is None:
        return Attributed(kernel, None, None)
    return Attributed(kernel, call, _key_at(host, host.operator_of(kernel), moment))


def _key_at(host: Host, index: int | None, moment_ns: int) -> Key | None:
    """Return the row for kernels that an operator launches at a moment; None if unknown.

    Args:
        index: index of the operator in `host.events`; None outside all operators.
        moment_ns: launch time, which lies in a phase such as `optimizer`.
    """
    row = _row_around(host, index)
    if isinstance(row, int):  # an autograd node comes before any module
        return _key_of_node(host, row, index)
    phase = host.phase_at(moment_ns)
    if row is None:
        return key_outside_modules(phase)
    # a module that runs in the backward pass is recomputed
    is_recomputed = phase == _BACKWARD or any(host.is_node(outer) for outer in host.upwards(index))
    return msgspec.structs.replace(row, which=Pass.backward) if is_recomputed else row


def _key_of_node(host: Host, node: int, index: int | None) -> Key | None:
    """Return the row with the gradient that an autograd node, or the engine around it, computes.

    None if the node's forward operator is unknown.

    Args:
        node: index of the node, or of the engine's work for it, in `host.events`.
        index: index of the operator that launches the kernel.
    """
    event = host.events[node]
    if event.name.endswith(ACCUMULATE):
        path = host.parameters.get(node)
        return Key(path=path, call=0, operation=None, kind=ACCUMULATE, which=Pass.accumulation)
    forward = host.forward_of(node)
    if forward is None:
        return None
    pass_type = Pass.backward
    if event.name.startswith(EVALUATE) and _sums_gradients(host, node, index):
        pass_type = Pass.accumulation
    row = _row_around(host, forward)
    if isinstance(row, int):  # the forward operator is itself part of a backward pass
        return _key_of_node(host, row, forward)
    if row is None:
        return key_outside_modules(host.phase_at(host.events[forward].start_ns), pass_type)
    return msgspec.structs.replace(row, which=pass_type)


def _sums_gradients(host: Host, node: int, index: int | None) -> bool:
    """Return whether an operator in the engine's work for a node adds gradients that meet."""
    inside = takewhile(lambda outer: outer != node, host.upwards(index))
    return any(host.events[outer].name in _SUMS for outer in inside)


def _row_around(host: Host, index: int | None) -> Key | int | None:
    """Return the forward row around an operator.

    If an autograd node comes first, return its index instead. Outside all modules, return None.

    Args:
        index: index of the operator in `host.events`; None outside all operators.
    """
    operation: int | None = None
    kind: str | None = None
    for outer in host.upwards(index):
        mark = host.marks[outer]
        if mark is None:
            if host.is_node(outer):
                return outer
        elif mark.scope is Scope.operation and kind is None:
            operation, kind = mark.number, mark.kind
        elif mark.scope is Scope.module:
            # a module of torch's own that calls no other module is a single row
            if mark.whole and outer not in host.outer:
                operation, kind = None, mark.kind
            return Key(
                path=mark.path,
                call=mark.number,
                operation=operation,
                kind=kind or mark.kind,
                which=Pass.forward,
            )
    return None


def key_outside_modules(phase: str | None, pass_type: Pass | None = None) -> Key:
    """Return the row for work outside the model's modules, such as the loss or the optimizer.

    Args:
        phase: part of the call, for example `optimizer`; None outside all parts.
        pass_type: pass of the row; None for the phase's usual pass.
    """
    if pass_type is None:
        pass_type = _PASSES.get(phase or "", Pass.other)
    return Key(path=None, call=0, operation=None, kind=phase or str(Pass.other), which=pass_type)
