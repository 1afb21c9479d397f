"""Ranges: the names by which a profile tells calls, phases, modules and operations apart."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

#: No operator of the namespace `perfexp` begins so.
_PREFIX = "perfexp/"


class Scope(StrEnum):
    """What a range is around."""

    call = "call"
    phase = "phase"
    module = "module"
    operation = "operation"
    parameter = "parameter"


class Mark(NamedTuple):
    """A range.

    Attributes:
        scope: what it is around.
        number: of the call; of a module's call; of an operation in it. 0 for others.
        whole: whether a module is one row as long as no other module is called in it.
        kind: class of a module, name of an operation or of a phase.
        path: of a module, or of a parameter's module.
    """

    scope: Scope
    number: int = 0
    whole: bool = False
    kind: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        """The text that `parse` reads; a path stands last since it may hold any character."""
        return f"{_PREFIX}{self.scope}:{self.number}:{int(self.whole)}:{self.kind}:{self.path}"


def parse(name: str) -> Mark | None:
    """The range of a name; None for a name that is none of ours.

    Args:
        name: of an event.
    """
    if not name.startswith(_PREFIX):
        return None
    scope, number, whole, kind, path = name[len(_PREFIX) :].split(":", 4)
    return Mark(Scope(scope), int(number), whole == "1", kind, path)
