"""Attribution: assign a kernel to its row, pass and call."""

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
    """Return a kernel with its call and row."""
    moment = host.launched_ns(kernel)
    if moment is None:
        return Attributed(kernel, None, None)
    call = host.call_at(moment)
    return Attributed(
        kernel, call, None if call is None else _key_at(host, host.operator_of(kernel), moment)
    )


def _key_at(host: Host, index: int | None, moment_ns: int) -> Key | None:
    """Return the row for kernels that an operator launches at a moment."""
    row = _row_around(host, index)
    if isinstance(row, int):  # an autograd node comes before any module
        return _key_of_node(host, row, index)
    phase = host.phase_at(moment_ns)
    if row is None:
        return in_no_module(phase)
    again = phase == _BACKWARD or any(host.is_node(outer) for outer in host.upwards(index))
    return msgspec.structs.replace(row, which=Pass.backward) if again else row


def _key_of_node(host: Host, node: int, index: int | None) -> Key | None:
    """Return the row with the gradient that a node, or the engine around it, computes."""
    event = host.events[node]
    if event.name.endswith(ACCUMULATE):
        path = host.parameters.get(node)
        return Key(path=path, call=0, operation=None, kind=ACCUMULATE, which=Pass.accumulation)
    forward = host.forward_of(node)
    if forward is None:
        return None
    which = (
        Pass.accumulation
        if event.name.startswith(EVALUATE) and _sums(host, node, index)
        else Pass.backward
    )
    row = _row_around(host, forward)
    if isinstance(row, int):  # the forward operator is itself part of a backward pass
        return _key_of_node(host, row, forward)
    if row is None:
        return in_no_module(host.phase_at(host.events[forward].start_ns), which)
    return msgspec.structs.replace(row, which=which)


def _sums(host: Host, node: int, index: int | None) -> bool:
    """Return whether an engine call next to a node sums gradients."""
    inside = takewhile(lambda outer: outer != node, host.upwards(index))
    return any(host.events[outer].name in _SUMS for outer in inside)


def _row_around(host: Host, index: int | None) -> Key | int | None:
    """Return the forward row around an operator.

    If an autograd node comes first, return its index instead. Outside all modules, return None.
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


def in_no_module(phase: str | None, which: Pass | None = None) -> Key:
    """Return the row for work outside the model's modules.

    Args:
        which: pass of the row; None for the phase's usual pass.
    """
    if which is None:
        which = _PASSES.get(phase or "", Pass.other)
    return Key(path=None, call=0, operation=None, kind=phase or str(Pass.other), which=which)
