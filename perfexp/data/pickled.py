"""Read plain values and uint8 arrays from a pickle as data: no object of the file is imported, built or called.

`pickletools.genops` of the standard library splits a pickle into operations and runs none of them. The few that data
sets use are interpreted here. The name of a function is a text; the functions below, which numpy writes into its
pickles, stand for their known results, and every other name ends the reading. So a file chooses among these values
only, whatever numpy's own functions for unpickling would do with its contents.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from perfexp.host.untrusted import printable

#: Operations that push their own argument: integers, texts and bytes in all protocols.
_CONSTANTS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "SHORT_BINSTRING", "BINSTRING"),
    *(
        "UNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
    ),
)
_VALUES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = ("PROTO", "FRAME", "STOP")
#: Far above every data set: CIFAR-100's labels and names of files take 0.2 million.
_MOST_OPERATIONS = 2_000_000


class Refused(ValueError):
    """The file is not a pickle, or one that needs more than plain values and uint8 arrays."""


@dataclass(frozen=True)
class _Name:
    name: str


@dataclass
class _Array:
    """An array as numpy pickles it: made empty, then given its state."""

    state: Any = None

    @classmethod
    def of_buffer(cls, content: Any, kind: Any, shape: Any, order: Any) -> _Array:
        return cls((1, shape, kind, order != "C", content))

    def value(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        _version, shape, kind, is_fortran, content = self.state
        content = content.encode("latin-1") if isinstance(content, str) else content
        if kind != _Name("dtype u1") or is_fortran:
            raise Refused("it has an array of another kind than uint8 in rows")
        return np.frombuffer(content, np.uint8).reshape(shape)


#: What a call of each function stands for, by its arguments; numpy 2 writes `numpy._core`.
_CALLS: dict[str, Callable[..., Any]] = {
    "_codecs encode": lambda text, encoding: text.encode("latin-1"),
    "numpy dtype": lambda name, *_: _Name("dtype " + name),
    "numpy.core.multiarray _reconstruct": lambda *_: _Array(),
    "numpy._core.multiarray _reconstruct": lambda *_: _Array(),
    "numpy.core.numeric _frombuffer": lambda *state: _Array.of_buffer(*state),
    "numpy._core.numeric _frombuffer": lambda *state: _Array.of_buffer(*state),
}


def read(content: bytes) -> Any:
    """The value of a pickle, arrays of uint8 included; raises `Refused` with the reason."""
    reading = _Reading()
    try:
        for number, (operation, argument, _position) in enumerate(pickletools.genops(content)):
            if number > _MOST_OPERATIONS:
                raise Refused(f"it has more than {_MOST_OPERATIONS:,} operations")
            reading.take(operation.name, argument)
        return _finished(reading.stack.pop())
    except Refused:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise Refused(f"it is not a pickle of plain values ({printable(str(error)[:80])})") from error


class _Reading:
    """The stack of a pickle's operations, one stack per mark around it, and their memory."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memory: dict[int, Any] = {}

    def take(self, name: str, argument: Any) -> None:
        """Interpret one operation."""
        stack = self.stack
        if name in _CONSTANTS:
            stack.append(argument)
        elif name in _VALUES:
            stack.append(_VALUES[name]())
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memory[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memory[len(self._memory)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memory[argument])
        elif name == "GLOBAL":
            stack.append(_Name(argument))
        elif name in _METHODS:
            _METHODS[name](self)
        elif name not in _IGNORED:
            _refuse(f"the operation {name}")

    def mark(self) -> None:
        self._outer.append(self.stack)
        self.stack = []

    def _marked(self) -> list[Any]:
        """Remove and return the values since the last mark."""
        values, self.stack = self.stack, self._outer.pop()
        return values

    def new_tuple(self) -> None:
        values = self._marked()
        self.stack.append(tuple(values))

    def new_list(self) -> None:
        values = self._marked()
        self.stack.append(values)

    def new_dict(self) -> None:
        values = self._marked()
        self.stack.append({})
        self._put(values)

    def append(self) -> None:
        value = self.stack.pop()
        self.stack[-1].append(value)

    def extend(self) -> None:
        values = self._marked()
        self.stack[-1].extend(values)

    def set_item(self) -> None:
        values = [self.stack.pop(), self.stack.pop()]
        self._put(values[::-1])

    def set_items(self) -> None:
        self._put(self._marked())

    def _put(self, values: list[Any]) -> None:
        """Add keys, each followed by its value, to the last dictionary."""
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | bytes) for key in values[::2]):
            raise Refused("it has a key that is not a text")  # Python overruns its stack hashing deeply nested keys
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_Name(" ".join((module, name))))

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        name = function.name
        if name not in _CALLS:
            _refuse(name.replace(" ", "."))
        self.stack.append(_CALLS[name](*arguments))

    def set_state(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], _Array):  # the state of a data type only repeats its byte order
            self.stack[-1].state = state


_METHODS: dict[str, Callable[[_Reading], None]] = {
    "MARK": _Reading.mark,
    "TUPLE": _Reading.new_tuple,
    "LIST": _Reading.new_list,
    "DICT": _Reading.new_dict,
    "APPEND": _Reading.append,
    "APPENDS": _Reading.extend,
    "STACK_GLOBAL": _Reading.name,
    "SETITEM": _Reading.set_item,
    "SETITEMS": _Reading.set_items,
    "REDUCE": _Reading.call,
    "BUILD": _Reading.set_state,
}


def _refuse(name: str) -> NoReturn:
    raise Refused(f"it asks for {printable(name[:80])}, which plain values do not need; nothing of it was run")


def _finished(value: Any) -> Any:
    """A value with its arrays, which data sets have in a dictionary."""
    if not isinstance(value, dict):
        return value
    return {key: item.value() if isinstance(item, _Array) else item for key, item in value.items()}
