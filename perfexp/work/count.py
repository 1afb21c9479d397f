"""Count the work of a call of a model, on tensors without memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perfexp.work import Work
from perfexp.work.dispatch_modes import recording
from perfexp.work.graph import reached
from perfexp.work.kernel_calls import Kernel
from perfexp.work.meta_tensors import inputs_for, same_random_numbers, with_stand_ins
from perfexp.work.names import original_of
from perfexp.work.rows import RowMaker
from perfexp.work.tape import Call, Operation, Tape
from perfexp.work.tensors import storage_of
from perfexp.work.trial import FAKE_TENSOR_LIMITS, Inconclusive, quiet


def count(
    model: torch.nn.Module, *inputs: Any, keywords: Mapping[str, Any] | None = None, backward: bool = False
) -> Work:
    """The work of one call of a model in its current mode (training or not), without using the device.

    The forward pass runs once on meta tensors, with the model's hooks. Parameters, buffers, attributes of the model and
    the state of the random number generators are restored afterwards. A compiled model is counted as the original. An
    `autocast` around the call applies.
    A call of a module in which no other module is called is one row if torch itself defines the module, or if it has no
    submodules and is not the model itself. Otherwise each torch function that its code calls is a row (`x + y`,
    `F.conv2d`, `torch.flatten`). Multi-head attention and transformer layers are counted by their ordinary code, not by
    the fused operators of inference. A recurrent network is counted by the matrix products of its definition. A fused
    operator leaves out its elementwise part (for an LSTM some 13 FLOPs per hidden element and step).

    Args:
        inputs: positional arguments, nested or not: tensors, `torch.Size` for a tensor of that shape (in the data type
            and on the device of the first parameter), and any other values.
        backward: whether to count the backward pass of a loss on all outputs.

    Raises:
        Inconclusive: the model depends on values, or exceeds tensors without memory.
        RuntimeError, ValueError, AssertionError, IndexError: the model cannot take these inputs.
    """
    model = original_of(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise Inconclusive("a scripted module can't be inspected; pass the module that it was made from")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with (
            _undisturbed(),
            same_random_numbers(),
            torch.inference_mode(False),
            torch.set_grad_enabled(backward),
            with_stand_ins(model, mode),
        ):
            parameters, own = _own(model)
            tape = Tape(model, own)
            args, named = inputs_for(model, (inputs, dict(keywords or {})), mode)
            with mode, recording(tape):
                outputs = model(*args, **named)
    except FAKE_TENSOR_LIMITS as error:
        raise Inconclusive(str(error)) from error
    assert tape.root is not None
    nodes, foreign = reached(outputs) if backward else (None, [])
    maker = RowMaker(parameters, own, nodes)
    return Work(
        rows=tuple(maker.rows(tape.root)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        backward=backward,
        uncounted=_uncounted(_kernels(tape.root), nodes, foreign),
    )


def _own(model: torch.nn.Module) -> tuple[dict[int, int], set[int]]:
    """Elements of the parameters in each storage, and the storages of parameters and buffers."""
    parameters: dict[int, int] = {}
    for parameter in model.parameters():
        storage = storage_of(parameter)
        parameters[storage] = parameters.get(storage, 0) + parameter.numel()
    return parameters, parameters.keys() | {storage_of(buffer) for buffer in model.buffers()}


def _kernels(call: Call) -> Iterator[Kernel]:
    for step in call.steps:
        yield from step.kernels if isinstance(step, Operation) else _kernels(step)


def _uncounted(kernels: Iterator[Kernel], nodes: set[int] | None, foreign: list[str]) -> tuple[str, ...]:
    names = []
    for kernel in kernels:
        if not kernel.known:
            names.append(kernel.operator)
        if not kernel.backward_known and nodes is not None and kernel.node in nodes:
            names.append(f"backward of {kernel.operator}")
    return tuple(dict.fromkeys([*names, *(f"backward of {name}" for name in foreign)]))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Run functions that a model compiled as written, and silence torch's log of unsupported operators.

    Autocast's cache of cast weights is cleared at the end, since some are stand-ins.
    """
    set_stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    stance = set_stance("force_eager") if set_stance else nullcontext()
    try:
        with quiet(), stance:
            yield
    finally:
        torch.clear_autocast_cache()
