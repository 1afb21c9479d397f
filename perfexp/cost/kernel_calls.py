"""Describe operators that torch's dispatcher runs: their work, and the memory they read and write.

Such an operator (e.g. `aten::convolution`) is called a kernel here, since on a GPU most of them
start one. The tape (`perfexp.cost.tape`) calls `kernel_of` after each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from perfexp.cost import Geometry
from perfexp.cost.contractions import Arguments, Term, contraction_of, geometry_of
from perfexp.cost.formulas import cost_of
from perfexp.cost.tensors import Region, is_number, region_of, storage_of, tensors_in

#: perfexp's own convolution. Its autograd function runs it without recording gradients, but the
#: call as a whole is differentiable.
_OF_PERFEXP = "perfexp::convolution"
#: Operators that write without reading the previous value.
_OVERWRITING = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
)
#: Operators that change running statistics in training without declaring it in their schema.
_UNDECLARED = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
#: Operators that allocate memory without writing to it.
_RESERVING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
#: Operators that read only the shape of their tensor.
_SHAPED_LIKE = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")
#: Fields of `KernelWork` that count work.
_WORK = ("macs", "flops", "input_gradient_flops", "weight_gradient_flops")


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """Work and memory traffic of one operator call.

    Attributes:
        operator: name, for example `aten::add`.
        input_gradient_flops: FLOPs of gradients; they count only if the backward pass reaches the
            node.
        weight_gradient_flops: the same for gradients with respect to weights.
        node: number of its autograd node.
        reads: parts of storages that it reads.
        writes: parts of storages that it writes.
        fresh: storages that it creates.
        convolution: geometry if it is a forward convolution.
        known: whether its forward work is known.
        backward_known: whether the work of its gradients is known.
    """

    operator: str
    macs: int
    flops: int
    input_gradient_flops: int
    weight_gradient_flops: int
    node: int
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    fresh: frozenset[int]
    convolution: Geometry | None
    known: bool = True
    backward_known: bool = True


def kernel_of(
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    outputs: Any,
    weights: Collection[int],
    node: int,
) -> KernelWork | None:
    """Return the work of an operator call; None if it only made views.

    Args:
        args: positional arguments.
        keywords: keyword arguments.
        outputs: its results.
        weights: storages of parameters, buffers and values computed from them alone.
        node: number of its autograd node.
    """
    arguments = _by_name(operator, args, keywords)
    inputs, results = list(tensors_in(list(arguments.values()))), list(tensors_in(outputs))
    name = operator._schema.name.partition("::")[2]
    changed, overwrites = list[torch.Tensor](), name in _OVERWRITING
    for argument in operator._schema.arguments:
        overwrites |= argument.is_out
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += tensors_in(arguments.get(argument.name))
    # batch norms do not declare that training changes their running statistics
    if name in _UNDECLARED and arguments["training"]:
        changed += tensors_in([arguments["running_mean"], arguments["running_var"]])
    input_storages = set(map(storage_of, inputs))
    new = [tensor for tensor in results if storage_of(tensor) not in input_storages]
    # views read and write nothing by themselves
    if results and not new and (not changed or torch.Tag.inplace_view in operator.tags):
        return None
    if name in _RESERVING:
        inputs, written = [], []
    else:
        written = [*new, *changed]
    # these read the shape of their inputs, not the memory
    if name.endswith(_SHAPED_LIKE):
        inputs = []
    elif overwrites:
        unread = set(map(id, changed))
        inputs = [tensor for tensor in inputs if id(tensor) not in unread]
    formula = flop_registry.get(operator.overloadpacket)
    registered = formula and partial(formula, *args, **keywords, out_val=outputs)
    return KernelWork(
        operator=operator._schema.name,
        node=node,
        reads=tuple(map(region_of, inputs)),
        writes=tuple(map(region_of, written)),
        fresh=frozenset(map(storage_of, new)),
        convolution=geometry_of(operator._schema.name, arguments),
        **_work(operator, arguments, outputs, weights, registered),
    )


def of_complex_convolution(kernels: Sequence[KernelWork]) -> list[KernelWork]:
    """Return a complex convolution's kernels with the work of four real convolutions.

    Four is its definition. Torch computes three, and adds their operands and outputs: here the
    first counts twice, and the additions count nothing. The tape applies it after each complex
    convolution.
    """
    counted, factors = [], iter((2, 1, 1))
    for kernel in kernels:
        factor = next(factors, 1) if kernel.convolution else 0
        work = {name: factor * getattr(kernel, name) for name in _WORK}
        counted.append(replace(kernel, **work))
    return counted


def _by_name(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an operator's arguments by name, defaults included."""
    declared = operator._schema.arguments
    passed = {argument.name: value for argument, value in zip(declared, args, strict=False)}
    passed |= keywords
    for argument in declared:
        if argument.name not in passed:
            passed[argument.name] = argument.default_value
    return passed


def _work(
    operator: torch._ops.OpOverload,
    arguments: Arguments,
    outputs: Any,
    weights: Collection[int],
    registered: Callable[[], int] | None,
) -> dict[str, Any]:
    """Return the work fields of a `KernelWork`.

    Gradients count if autograd records the call and any of their sources needs a gradient.

    Args:
        registered: returns FLOPs from torch's registry, which may have a formula for a custom
            operator; None if it has none.
    """
    terms, known_flags = contraction_of(operator._schema.name, arguments, outputs), {}
    tensors = tensors_in(list(arguments.values()))
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    is_recorded = torch.is_grad_enabled() or operator._schema.name == _OF_PERFEXP
    if terms is None:
        flops = cost_of(operator, arguments, outputs)
        if flops is None:
            # no formula of perfexp: take the FLOPs that the operator registered with torch
            known_flags = {
                "known": registered is not None,
                "backward_known": not (is_recorded and differentiable),
            }
            macs, odd_flop = divmod(registered() if registered else 0, 2)
            terms = [Term(macs=macs, other_flops=odd_flop)]
        else:
            weight_operands, other_operands = list[torch.Tensor](), list[torch.Tensor]()
            if any(map(is_number, tensors_in(outputs))):
                for tensor in differentiable:
                    # a gradient is taken to cost as many FLOPs as the operator itself
                    side = weight_operands if storage_of(tensor) in weights else other_operands
                    side.append(tensor)
            terms = [
                Term(other_flops=flops, operands=(tuple(weight_operands), tuple(other_operands)))
            ]
    input_flops = weight_flops = 0
    for term in terms:
        for sources in term.operands:
            if not is_recorded or not any(source.requires_grad for source in sources):
                continue
            if all(storage_of(source) in weights for source in sources):
                weight_flops += term.flops
            else:
                input_flops += term.flops
    return {
        "macs": sum(term.macs for term in terms),
        "flops": sum(term.flops for term in terms),
        "input_gradient_flops": input_flops,
        "weight_gradient_flops": weight_flops,
        **known_flags,
    }
