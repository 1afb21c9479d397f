"""Describe an operator call by its tensors' layouts.

The description is a dictionary key, and can be repeated elsewhere: the tracing of memory records
convolutions on stand-ins, and a probe measures their workspaces on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class TensorLayout:
    """A tensor's shape, strides in elements, and data type (e.g. `float32`)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} by {list(self.strides)}"

    def allocated(self, device: str) -> torch.Tensor:
        """Return a tensor with this layout and with memory; its values are undefined."""
        return torch.empty_strided(
            self.shape, self.strides, dtype=getattr(torch, self.dtype), device=device
        )


@dataclass(frozen=True)
class OperatorCall:
    """A call of a torch `aten` operator, for example `convolution`.

    Equal calls have equal layouts and arguments.
    """

    operator: str
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, function: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> OperatorCall:
        """Return the call of a function with positional arguments; tensors may be stand-ins."""
        return cls(function.overloadpacket.__name__, _described(arguments))

    def __str__(self) -> str:
        return f"{self.operator}({', '.join(map(_text, self.arguments))})"

    def with_dtypes(self, names: Mapping[str, str]) -> OperatorCall:
        """Return the same call with some data types replaced, by name such as `float32`.

        The trace runs on a CPU; the device may compute the call in half precision.
        """
        arguments = list(self.arguments)
        for index, argument in enumerate(arguments):
            if isinstance(argument, TensorLayout):
                arguments[index] = replace(
                    argument, dtype=names.get(argument.dtype, argument.dtype)
                )
        return replace(self, arguments=tuple(arguments))

    def allocated(self, device: str) -> list[Any]:
        """Return arguments for `run`, with tensors that have memory on a device, e.g. `cuda:0`.

        A probe measures the workspace of the call with them.
        """
        arguments = list(self.arguments)
        for index, argument in enumerate(arguments):
            if isinstance(argument, TensorLayout):
                arguments[index] = argument.allocated(device)
            elif isinstance(argument, tuple):
                arguments[index] = list(argument)
        return arguments

    def run(self, arguments: list[Any]) -> Any:
        """Call the operator with arguments from `allocated`; its autograd is not used."""
        return getattr(torch.ops.aten, self.operator).default(*arguments)


def _described(value: Any) -> Any:
    """Return an argument as a hashable value, with layouts in place of tensors."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorLayout(tuple(value.shape), tuple(value.stride()), dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return value


def _text(value: Any) -> str:
    """Return an argument as it stands in the text of a call, such as `float32[3, 8] by [8, 1]`."""
    if isinstance(value, tuple):
        return str(list(value))
    return str(value)
