"""Count the work of a model call, on tensors without memory.

`measuring` calls `count` once per input size, for FLOP rates and the table of layers. The forward
pass runs on stand-ins (fake tensors) in a forked process, and a `Tape` records its modules and
operators. `_RowMaker` turns the recording into the rows of a `Work`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_map

from perfexp.cost import Geometry, Inconclusive, Shape, Work, WorkRow
from perfexp.cost.kernel_calls import KernelWork
from perfexp.cost.tape import Call, Operation, Tape, nodes_behind, original_of, recording
from perfexp.cost.tensors import Region, distinct_bytes, is_number, storage_of, tensors_in
from perfexp.cost.trial import isolated, replace_tensors, stand_in

#: Module prefix of perfexp's own autograd functions; their operator counts their work.
_OWN_FUNCTIONS = "perfexp."
#: Number of additional counts for a model that draws random numbers.
_OTHER_SEEDS = 4
#: Autograd's node for a change of a view in place.
_WRAPPER = "torch::autograd::CopySlices"


def count(
    model: torch.nn.Module,
    *inputs: Any,
    keywords: Mapping[str, Any] | None = None,
    backward: bool = False,
) -> Work:
    """Return the work of a model call in the model's current mode, without using the device.

    The forward pass runs once on stand-ins without memory, with the model's hooks, in a forked
    process, so this process does not change. A compiled model is counted as the original. An
    `autocast` around the call applies.

    A module call without calls of other modules is a single row in two cases: torch itself defines
    the module, or the module has no submodules and is not the model itself. Otherwise each torch
    function that its code calls is a row, for example `x + y` or `F.conv2d`.

    Multi-head attention and transformer layers are counted by their ordinary code, not by the fused
    inference operators. A recurrent network is counted by the matrix products in its definition.
    Elementwise parts of fused operators are left out, for example some 13 FLOPs per hidden element
    and step in an LSTM.

    Args:
        inputs: positional arguments, nested or not. They may be tensors, `torch.Size` for a tensor
            with that shape (data type and device follow the first parameter), and any other values.
        backward: whether to count the backward pass of a loss on all outputs.

    Raises:
        Inconclusive: the model depends on values, or needs more than stand-ins offer.
        MODULE_ERRORS: the model cannot take these inputs.
    """
    arguments = (original_of(model), inputs, dict(keywords or {}), backward)
    work, has_drawn = isolated(_count_with_seed)(None, *arguments)
    seeds = range(_OTHER_SEEDS if has_drawn else 0)
    others = (isolated(_count_with_seed)(seed, *arguments)[0] for seed in seeds)
    return replace(work, is_random=any(other.rows != work.rows for other in others))


def _count_with_seed(seed: int | None, *arguments: Any) -> tuple[Work, bool]:
    """Count the work; also return whether the model drew random numbers on the host.

    Args:
        seed: seed for the host's generators; None to leave them.
        arguments: arguments of `_count`.
    """
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
    before = _random_states()
    work = _count(*arguments)
    return work, _random_states() != before


def _random_states() -> str:
    """Return the states of the host's generators in Python, NumPy and torch as text.

    Two texts differ if any number was drawn in between. A count that drew numbers may differ with
    another seed.
    """
    # NumPy abbreviates its state, but prints the position, which each draw changes
    return str(
        (random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state().tolist())
    )


def _count(model: torch.nn.Module, inputs: Any, keywords: dict[str, Any], backward: bool) -> Work:
    """Count the work of one model call; see `count`. Runs in an isolated process."""
    if isinstance(model, torch.jit.ScriptModule):
        raise Inconclusive(
            "a scripted module can't be inspected; pass the module that it was made from"
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), torch.set_grad_enabled(backward):
        replace_tensors(model, mode)
        parameters, weights = _weight_storages(model)
        tape = Tape(model, weights)
        args, named = inputs_for(model, (inputs, keywords), mode)
        with mode, recording(tape):
            outputs = model(*args, **named)
    assert tape.root is not None
    nodes, foreign = _backward_nodes(outputs) if backward else (None, [])
    maker = _RowMaker(parameters, weights, nodes)
    return Work(
        rows=tuple(maker.rows(tape.root)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        backward=backward,
        uncounted=_uncounted(_kernels(tape.root), nodes, foreign),
    )


def _weight_storages(model: torch.nn.Module) -> tuple[dict[int, int], set[int]]:
    """Return the number of parameter elements by storage, and all parameter and buffer storages."""
    parameters: dict[int, int] = {}
    for parameter in model.parameters():
        storage = storage_of(parameter)
        parameters[storage] = parameters.get(storage, 0) + parameter.numel()
    return parameters, parameters.keys() | {storage_of(buffer) for buffer in model.buffers()}


def _kernels(call: Call) -> Iterator[KernelWork]:
    """Yield the kernels (operators with work) of a call and its inner calls."""
    for step in call.steps:
        yield from step.kernels if isinstance(step, Operation) else _kernels(step)


def _uncounted(
    kernels: Iterator[KernelWork], nodes: set[int] | None, foreign: list[str]
) -> tuple[str, ...]:
    """Return the names of operators with unknown work, each once; see `Work.uncounted`.

    Args:
        nodes: numbers of the nodes in the backward pass; None without a backward pass.
        foreign: names of the user's autograd functions in the backward pass.
    """
    names = []
    for kernel in kernels:
        if not kernel.known:
            names.append(kernel.operator)
        if not kernel.backward_known and nodes is not None and kernel.node in nodes:
            names.append(f"backward of {kernel.operator}")
    names += [f"backward of {name}" for name in foreign]
    return tuple(dict.fromkeys(names))


def _backward_nodes(outputs: Any) -> tuple[set[int], list[str]]:
    """Return the autograd nodes that a loss on these outputs reaches.

    Returns:
        Sequence numbers of the nodes, and names of foreign nodes, whose backward pass is Python
        code of the user (`torch.autograd.Function`).
    """
    nodes = nodes_behind(outputs)
    functions = [node for node in nodes if isinstance(node, BackwardCFunction)]
    foreign = [
        node.name() for node in functions if not type(node).__module__.startswith(_OWN_FUNCTIONS)
    ]
    # a wrapper hides the node before it, which changes a view in place
    hidden = {node._sequence_nr() - 1 for node in nodes if node.name() == _WRAPPER}
    return {node._sequence_nr() for node in nodes} | hidden, foreign


class _RowMaker:
    """Makes rows from a recorded call.

    Args:
        parameters: number of parameter elements by storage.
        weights: storages of parameters and buffers.
        reached: numbers of nodes in the backward pass; None without a backward pass.
    """

    def __init__(
        self,
        parameters: Mapping[int, int],
        weights: Collection[int],
        reached: Collection[int] | None,
    ) -> None:
        self._unread, self._weights, self._reached = dict(parameters), weights, reached

    def rows(self, call: Call) -> Iterator[WorkRow]:
        """Yield the rows of a call and its inner calls, in execution order."""
        if call.is_row:
            kernels = list[KernelWork]()
            for step in call.steps:
                if isinstance(step, Operation):
                    kernels += step.kernels
            yield self._row(call, None, call.kind, call, kernels)
            return
        number = 0
        for step in call.steps:
            if isinstance(step, Call):
                yield from self.rows(step)
            elif step.dispatched:
                yield self._row(call, number, step.name, step, step.kernels)
                number += 1

    def _row(
        self,
        call: Call,
        operation: int | None,
        kind: str,
        step: Call | Operation,
        kernels: list[KernelWork],
    ) -> WorkRow:
        """Return the row of a module call (`operation` is None) or of one operation in it.

        Args:
            step: the call or operation, with its arguments and results.
            kernels: operators that ran in it.
        """
        returned = set(map(storage_of, tensors_in(step.returned)))
        reads, written = _external_traffic(kernels, returned)
        macs = flops = parameters = 0
        # None without a backward pass, where no operator is reached
        input_flops = weight_flops = None if self._reached is None else 0
        fresh, convolutions = set[int](), list[Geometry]()
        for kernel in kernels:
            macs += kernel.macs
            flops += kernel.flops
            fresh |= kernel.fresh
            if kernel.convolution is not None:
                convolutions.append(kernel.convolution)
            if self._reached is not None and kernel.node in self._reached:
                input_flops = (input_flops or 0) + kernel.input_gradient_flops
                weight_flops = (weight_flops or 0) + kernel.weight_gradient_flops
        for region in reads:
            # shared parameters count in the first row that reads them
            parameters += self._unread.pop(region.storage, 0)
        inputs = [
            tensor for tensor in tensors_in(step.given) if storage_of(tensor) not in self._weights
        ]
        activations = [region for region in written if region.storage in fresh]
        return WorkRow(
            path=call.path,
            call=call.number,
            operation=operation,
            kind=kind,
            macs=macs,
            flops=flops,
            input_gradient_flops=input_flops,
            weight_gradient_flops=weight_flops,
            bytes_min=distinct_bytes(reads) + distinct_bytes(written),
            activation_bytes=distinct_bytes(activations),
            parameters=parameters,
            inputs=_shapes(inputs),
            outputs=_shapes(tensors_in(step.returned)),
            convolution=convolutions[0] if len(convolutions) == 1 else None,
        )


def _shapes(tensors: Iterable[torch.Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _external_traffic(
    kernels: list[KernelWork], returned: Collection[int]
) -> tuple[list[Region], list[Region]]:
    """Return the regions that a row reads and writes, without its intermediates.

    A read counts if the row did not create the memory. A write counts if it goes to such memory, or
    to memory that the row returns.

    Args:
        kernels: the row's operators in order.
        returned: storages of the row's results.
    """
    created: set[int] = set()
    reads: list[Region] = []
    written: list[Region] = []
    for kernel in kernels:
        reads += [region for region in kernel.reads if region.storage not in created]
        created |= kernel.fresh
        for region in kernel.writes:
            if region.storage not in created or region.storage in returned:
                written.append(region)
    return reads, written


def inputs_for(model: torch.nn.Module, inputs: Any, mode: FakeTensorMode) -> Any:
    """Return stand-ins for inputs, in the same nesting; values other than tensors stay unchanged.

    A bare shape (`torch.Size`) becomes a tensor with the data type and device of the model's first
    floating-point parameter. Objects get stand-ins as attributes, permanently: an example is
    transformers' cache.
    """
    first = next((tensor for tensor in model.parameters() if is_number(tensor)), torch.empty(0))

    def replaced(value: Any) -> Any:
        """Return a stand-in for a shape or tensor, and any other value itself."""
        if isinstance(value, torch.Size):
            with mode:
                return torch.empty(value, dtype=first.dtype, device=first.device)
        if isinstance(value, torch.Tensor):
            return stand_in(value, mode)
        _replace_attributes(value, mode)
        return value

    return tree_map(replaced, inputs, is_leaf=lambda value: isinstance(value, torch.Size))


def _replace_attributes(value: Any, mode: FakeTensorMode) -> None:
    """Replace tensors that an object, or objects in its lists, have as attributes."""
    if isinstance(value, (type, torch.nn.Module)):
        return
    attributes = getattr(value, "__dict__", {})
    for name, attribute in attributes.items():
        if isinstance(attribute, torch.Tensor):
            attributes[name] = stand_in(attribute, mode)
        elif isinstance(attribute, list):
            for part in attribute:
                _replace_attributes(part, mode)
