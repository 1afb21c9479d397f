"""Names of the profiler ranges that mark calls, phases, modules and operations."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

#: Prefix of the names, which no operator of the namespace `perfexp` has.
_PREFIX = "perfexp/"


class Scope(StrEnum):
    """Subject of a range."""

    call = "call"
    phase = "phase"
    module = "module"
    operation = "operation"
    parameter = "parameter"


class Mark(NamedTuple):
    """A range.

    Attributes:
        number: index of the call, of a module's call, or of an operation in it; 0 for other scopes.
        whole: whether a module is one row if no other module is called in it.
        kind: class of a module, or name of an operation or phase.
        path: path of a module, or of a parameter's module.
    """

    scope: Scope
    number: int = 0
    whole: bool = False
    kind: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        """The text that `parse` reads; the path is last since it may hold any character."""
        return f"{_PREFIX}{self.scope}:{self.number}:{int(self.whole)}:{self.kind}:{self.path}"


def parse(name: str) -> Mark | None:
    """The mark of an event name; None for other names."""
    if not name.startswith(_PREFIX):
        return None
    scope, number, whole, kind, path = name[len(_PREFIX) :].split(":", 4)
    return Mark(Scope(scope), int(number), whole == "1", kind, path)
